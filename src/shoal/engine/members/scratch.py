"""Copies of members for trials."""

from __future__ import annotations

import copy
from dataclasses import replace

from shoal.engine.members.member import Member
from shoal.utils.randomness import generator_at


def scratch_copy(member: Member) -> Member:
    """Return a copy of a member for trials. What is done to it does not affect the real one."""
    return replace(
        member,
        model=copy.deepcopy(member.model),
        rng=generator_at(member.rng.get_state()),
        modules=copy.copy(member.modules),
        orders=generator_at(member.orders.get_state()),
        history=[],
        validations=[],
        losses=[],
        logs={},
        rows=[],
        earlier=list(member.earlier),
        optimizer_state={},
        best=None,
        average=None,
    )
