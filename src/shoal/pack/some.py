"""Steps of some members of a user's own loop, while the others wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shoal.errors import MemberError
from shoal.pack.handout import Batches
from shoal.pack.serial import SerialUnit
from shoal.pack.stacked.handed import HandedStack
from shoal.pack.stacked.site import NotStackable
from shoal.pack.trace import Untraceable


def step_some(
    units: Sequence[HandedStack | SerialUnit],
    batches: Batches,
    dissolve: Callable[[HandedStack, str], list[SerialUnit]],
) -> dict[int, Tensor]:
    """One step of those who have a batch; their losses by id. Some rows of a stack step as a stack of their own."""
    found: dict[int, Tensor] = {}
    waiting = list(units)
    while waiting:
        unit = waiting.pop(0)
        slots = [slot for slot, member in enumerate(unit.members) if member.index in batches.places]
        if not slots:
            continue
        if isinstance(unit, SerialUnit):
            losses, errors = step_alone(unit, batches)
            if losses is None:
                raise next(iter(errors.values()))
        else:
            part = unit.part(slots) if len(slots) < len(unit.members) else unit
            try:
                if not part.knows(batches.key):
                    part.learn(batches.key, [batches.of(member) for member in part.members], batches.per_member)
            except (Untraceable, NotStackable) as refusal:
                waiting = [*dissolve(unit, f"on a batch of {batches.shapes()}: {refusal}"), *waiting]
                continue
            losses = part.step(batches.key, batches.rows(part))
            if part is not unit:
                unit.take(slots, part)
        for slot, loss in zip(slots, losses, strict=True):
            unit.members[slot].step += 1
            found[unit.members[slot].index] = loss
    return found


def step_alone(unit: SerialUnit, batches: Batches) -> tuple[Tensor | None, dict[int, Exception]]:
    """A serial member's step: its batch is an epoch of one."""
    batches.hand(unit.member)
    unit.begin_epoch(torch.zeros(1, 1, dtype=torch.int64))
    try:
        unit.run(1)
    except MemberError as error:
        unit._stuck = False
        assert isinstance(error.cause, Exception)
        return None, {unit.member.index: error.cause}
    return unit.losses()[0].to(batches.leaves[0].device), {}
