"""Moving averages (EMA, SWA) of members' weights, with the member axis first. Each member has its own decay, start and
interval."""

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
    """The averaging rule of one row, and how far it has come."""

    rule: EMA | SWA
    steps_per_epoch: int
    step: int
    """Optimizer steps taken so far."""
    count: int
    """Updates of the average so far."""

    @classmethod
    def of(cls, member: Member) -> _Row:
        rule = member.job.average
        assert rule is not None, "members of one stack all have averages, or none has"
        return cls(rule, member.steps_per_epoch, member.step, (member.average or {}).get("count", 0))

    def due(self) -> bool:
        """Return whether the average takes in the weights after this step."""
        return is_due(self.rule, self.step, self.steps_per_epoch)


class Averages:
    """The averages [M, ...] of some of a stack's tensors.

    The arithmetic is torch.lerp's, in single operations, so that a member's bits do not depend on the other members.
    """

    def __init__(self, rows: Sequence[_Row], indices: Sequence[int], values: Sequence[Tensor]) -> None:
        self.rows = list(rows)
        self.indices = list(indices)
        """Indices into `Stack.state` of the tensors that are averaged."""
        self.values = list(values)

    @classmethod
    def of(
        cls, members: Sequence[Member], state: Sequence[Tensor], names: Sequence[str], indices: Sequence[int]
    ) -> Averages:
        """Build the averages of `members`, one for each row, from what each member has averaged so far.

        Args:
            state: The stack's parameters and buffers.
            names: Their names, in the same order.
            indices: Indices into `state` of the tensors to average.
        """
        averages = cls([_Row.of(member) for member in members], indices, [state[i].detach().clone() for i in indices])
        for row, member in enumerate(members):
            saved = (member.average or {}).get("values", {})
            for index, value in zip(indices, averages.values, strict=True):
                if names[index] in saved:
                    value[row] = saved[names[index]]
        return averages

    @torch.no_grad()
    def update(self, state: Sequence[Tensor], moved: Sequence[bool] | None) -> None:
        """Count an optimizer step of the rows in `moved` (None: all rows), and update the averages that are due."""
        for i, row in enumerate(self.rows):
            row.step += moved is None or moved[i]
        due = [i for i, row in enumerate(self.rows) if (moved is None or moved[i]) and row.due()]
        if not due:
            return
        first = [not self.rows[i].count for i in due]
        weights = [row.rule.weight(row.count) for row in (self.rows[i] for i in due)]
        lerp = _Update(weights, first, state[0].device)
        for index, value in zip(self.indices, self.values, strict=True):
            current = state[index].detach()
            if len(due) < len(self.rows):
                value[due] = lerp(value[due], current[due])
            else:
                value.copy_(current if all(first) else lerp(value, current))
        for i in due:
            self.rows[i].count += 1

    def evaluation_state(self, state: Sequence[Tensor], first_buffer: int) -> list[Tensor]:
        """Return the stack's parameters and buffers with averages in place of weights, for rows that have an average.

        Args:
            state: The stack's parameters, then its buffers.
            first_buffer: The index of the first buffer in `state`.
        """
        started = [row.count > 0 for row in self.rows]
        started_M = torch.tensor(started, device=state[0].device)
        chosen = list(state)
        for index, value in zip(self.indices, self.values, strict=True):
            if not all(started):  # decided on the host, so this does not wait for the device
                chosen[index] = torch.where(_column(started_M, value), value, state[index].detach())
            else:
                chosen[index] = value if index < first_buffer else value.clone()  # validation may write to buffers
        return chosen

    def member_state(self, slot: int, names: Sequence[str], values: Sequence[Tensor]) -> dict[str, Any]:
        """Return one member's average as `Member.average` stores it. `values` are the member's rows, on the host."""
        copies = [value.clone() if value._base is not None else value for value in values]
        return {
            "count": self.rows[slot].count,
            "values": dict(zip((names[p] for p in self.indices), copies, strict=True)),
        }

    def each(self, change: Callable[[Tensor], Tensor], rows: Sequence[_Row]) -> Averages:
        """Return a copy of these averages for other `rows`, with `change` applied to every tensor."""
        new = copy.copy(self)
        new.rows, new.values = [replace(row) for row in rows], [change(value) for value in self.values]
        return new


class _Update:
    """Computes `average.lerp(now, weight)` for each row. The first update of a row copies the weights."""

    def __init__(self, weights: Sequence[float], first: Sequence[bool], device: torch.device) -> None:
        # torch.lerp counts from the average if the weight is below 0.5, and from `now` otherwise
        near = [abs(weight) < 0.5 for weight in weights]
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
