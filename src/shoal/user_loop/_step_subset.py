"""Steps of some members of a user's own loop, while the others wait."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from shoal.engine.rules.op_context import NotStackable
from shoal.engine.tiers.serial import SerialUnit
from shoal.engine.tiers.stacked.given_batches import GivenBatchesStack
from shoal.engine.tracing.patches import Untraceable
from shoal.errors import MemberError, describe
from shoal.user_loop._batch_source import Batches

Stepped = tuple[list[tuple[list[int], Tensor]], dict[int, Exception]]
"""The ids of members with their losses, stack by stack, and what some of them raised."""


def asked_ids(members: Sequence[int], known: Sequence[int]) -> list[int]:
    """The ids that somebody asked for, as they were given.

    Raises:
        KeyError: when there is no such member.
        ValueError: when one is named twice.
    """
    asked = list(members)
    unknown = [id for id in asked if id not in known]
    if unknown:
        raise KeyError(f"no member {unknown[0]!r} in this pack; it has {', '.join(map(str, known)) or 'none'}")
    if len(set(asked)) < len(asked):
        twice = next(id for id in asked if asked.count(id) > 1)
        raise ValueError(f"members has {twice} more than once; a member takes one step: name it once")
    return asked


def in_order(found: Mapping[int, Tensor], ids: Sequence[int], device: torch.device) -> Tensor:
    """Losses by id as one tensor in the order of `ids`; NaN for those who have none."""
    dtype = next(iter(found.values())).dtype if found else torch.get_default_dtype()
    nan = torch.full((), math.nan, dtype=dtype, device=device)
    return torch.stack([found.get(id, nan).to(dtype) for id in ids])


def step_some(
    units: Sequence[GivenBatchesStack | SerialUnit],
    batches: Batches,
    dissolve: Callable[[GivenBatchesStack, str], list[SerialUnit]],
) -> tuple[dict[int, Tensor], dict[int, Exception]]:
    """One step of those who have a batch; their losses by id, and what some of them raised.

    Some rows of a stack step as a stack of their own.
    """
    found: dict[int, Tensor] = {}
    failed: dict[int, Exception] = {}
    waiting = list(units)
    while waiting:
        unit = waiting.pop(0)
        slots = [slot for slot, member in enumerate(unit.members) if member.index in batches.places]
        if not slots:
            continue
        if isinstance(unit, SerialUnit):
            parts, errors = step_alone(unit, batches)
        else:
            part = unit.part(slots) if len(slots) < len(unit.members) else unit
            try:
                if not part.knows(batches.key):
                    part.learn(batches.key, [batches.of(member) for member in part.members], batches.per_member)
                parts, errors = part.step(batches.key, batches.rows(part))
            except (Untraceable, NotStackable) as refusal:
                waiting = [*dissolve(unit, f"on a batch of {batches.shapes()}: {refusal}"), *waiting]
                continue
            except Exception as error:  # whose it is, and whether it ends them, their own loops say
                waiting = [*dissolve(unit, f"a stacked step raised {describe(error)}"), *waiting]
                continue
            if part is not unit:
                unit.take(slots, part)
        failed |= errors
        found |= {id: loss for ids, losses in parts for id, loss in zip(ids, losses, strict=True)}
    return found, failed


def step_alone(unit: SerialUnit, batches: Batches) -> Stepped:
    """A serial member's step: its batch is an epoch of one."""
    batches.hand(unit.member)
    unit.begin_epoch(torch.zeros(1, 1, dtype=torch.int64))
    try:
        unit.run(1)
    except MemberError as error:
        unit._stuck = False
        assert isinstance(error.cause, Exception)
        return [], {unit.member.index: error.cause}
    unit.member.step += 1
    id = unit.member.index
    errors = {id: unit.failures()[0]} if unit.failures() else {}
    return [([id], unit.losses()[0].to(batches.leaves[0].device))], errors
