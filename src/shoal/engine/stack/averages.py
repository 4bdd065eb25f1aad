"""Averages of members' weights, members first, each with its own decay, start and interval."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shoal.engine.members.member import Member
from shoal.engine.optim.rule import coefficient_dtype
from shoal.jobs.averaging import EMA, SWA, is_due


@dataclass(slots=True)
class _Row:
    """Where one row's average is."""

    rule: EMA | SWA
    steps_per_epoch: int
    step: int
    """Optimizer steps done."""
    count: int
    """Updates of the average."""

    @classmethod
    def of(cls, member: Member) -> _Row:
        rule = member.job.average
        assert rule is not None, "members of one stack all have averages, or none has"
        return cls(rule, member.steps_per_epoch, member.step, (member.average or {}).get("count", 0))

    def due(self) -> bool:
        return is_due(self.rule, self.step, self.steps_per_epoch)


class Averages:
    """The averages [M, ...] of some of a stack's tensors.

    The arithmetic is torch.lerp's, in single operations, so that a member's bits do not depend on the other members.
    """

    def __init__(self, rows: Sequence[_Row], places: Sequence[int], values: Sequence[Tensor]) -> None:
        self.rows = list(rows)
        self.places = list(places)
        """Which of the stack's parameters and buffers are averaged."""
        self.values = list(values)

    @classmethod
    def of(
        cls, members: Sequence[Member], state: Sequence[Tensor], names: Sequence[str], places: Sequence[int]
    ) -> Averages:
        """The averages of members, one for each row, wherever they are in their training."""
        averages = cls([_Row.of(member) for member in members], places, [state[p].detach().clone() for p in places])
        for row, member in enumerate(members):
            known = (member.average or {}).get("values", {})
            for place, value in zip(places, averages.values, strict=True):
                if names[place] in known:
                    value[row] = known[names[place]]
        return averages

    @torch.no_grad()
    def update(self, state: Sequence[Tensor], moved: Sequence[bool] | None) -> None:
        """After an optimizer step of these rows (None: of all): take their weights in where that is due."""
        for place, row in enumerate(self.rows):
            row.step += moved is None or moved[place]
        due = [place for place, row in enumerate(self.rows) if (moved is None or moved[place]) and row.due()]
        if not due:
            return
        first = [not self.rows[place].count for place in due]
        weights = [row.rule.weight(row.count) for row in (self.rows[place] for place in due)]
        updated = _Update(weights, first, state[0].device)
        for place, value in zip(self.places, self.values, strict=True):
            now = state[place].detach()
            if len(due) < len(self.rows):
                value[due] = updated(value[due], now[due])
            else:
                value.copy_(now if all(first) else updated(value, now))
        for place in due:
            self.rows[place].count += 1

    def evaluation_state(self, state: Sequence[Tensor], first_buffer: int) -> list[Tensor]:
        """The stack's tensors with averages in place of the weights, for rows that have one."""
        begun = [row.count > 0 for row in self.rows]
        has_one = torch.tensor(begun, device=state[0].device)
        chosen = list(state)
        for place, value in zip(self.places, self.values, strict=True):
            if not all(begun):  # known here: the device is not waited for
                chosen[place] = torch.where(_column(has_one, value), value, state[place].detach())
            else:
                chosen[place] = value if place < first_buffer else value.clone()  # validation may write to buffers
        return chosen

    def member_state(self, slot: int, names: Sequence[str], values: Sequence[Tensor]) -> dict[str, Any]:
        """A member's average as it has it itself; `values`: its rows on the host."""
        copies = [value.clone() if value._base is not None else value for value in values]
        return {
            "count": self.rows[slot].count,
            "values": dict(zip((names[p] for p in self.places), copies, strict=True)),
        }

    def each(self, change: Callable[[Tensor], Tensor], rows: Sequence[_Row]) -> Averages:
        """The same averages of other rows, with every tensor changed so."""
        new = copy.copy(self)
        new.rows, new.values = [replace(row) for row in rows], [change(value) for value in self.values]
        return new


class _Update:
    """`average.lerp(now, weight)` for each row; at a row's first update the weights as they are."""

    def __init__(self, weights: Sequence[float], first: Sequence[bool], device: torch.device) -> None:
        near = [abs(weight) < 0.5 for weight in weights]  # to the average: torch.lerp counts from there
        factors = [weight if close else weight - 1 for weight, close in zip(weights, near, strict=True)]
        self._factor = torch.tensor(factors, dtype=torch.float64, device=device)
        self._near = None if all(near) else torch.tensor(near, device=device)
        self._first = torch.tensor(first, device=device) if any(first) else None

    def __call__(self, average: Tensor, now: Tensor) -> Tensor:
        dtype = coefficient_dtype(now.dtype)
        wide, start = (now, average) if now.is_complex() else (now.to(dtype), average.to(dtype))
        base = start if self._near is None else torch.where(_column(self._near, now), start, wide)
        updated = wide.sub(start).mul_(_column(self._factor.to(dtype), now)).add_(base).to(now.dtype)
        return updated if self._first is None else torch.where(_column(self._first, now), now, updated)


def _column(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *[1] * (like.dim() - 1))
