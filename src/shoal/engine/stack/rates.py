"""Learning rates and other scheduled numbers of a stack, step by step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from shoal.engine.optim import ScheduleRunner
from shoal.engine.stack._per_member_optimizers import PerMemberOptimizers
from shoal.engine.stack.optimizers import StackedOptimizer
from shoal.engine.stack.stack import Stack

FEW = 4
"""Steps from which looking ahead costs less than asking each time."""


class Rates:
    """Moves every member's schedule on; the stack's columns always hold the numbers of the next step."""

    def __init__(self, stack: Stack) -> None:
        self.parts = [
            _Ruled(part) if isinstance(part, StackedOptimizer) else _Own(part) for part in stack.optimizer.parts
        ]

    @property
    def last(self) -> list[float]:
        """Every member's learning rate at its last step."""
        return [rate for part in self.parts for rate in part.last]

    def carry(self, rates: Mapping[int, float]) -> None:
        """Learning rates of last steps that were taken elsewhere, by slots."""
        for slot, rate in rates.items():
            part = self._at(slot)
            part.last[slot - part.first] = rate

    def _at(self, slot: int) -> _Ruled | _Own:
        return next(part for part in self.parts if part.first <= slot < part.first + len(part.last))

    def rest(self, slots: Iterable[int]) -> None:
        """Whose schedules stand still from here on: they have left, and their rows wait for others."""
        self.settle()
        for part in self.parts:
            part.rest({slot - part.first for slot in slots})

    @property
    def raises_in(self) -> int | None:
        """Of the steps that `begin` looked at: after which one the first schedule raises; None: after none."""
        return min((part.raises_in for part in self.parts if part.raises_in is not None), default=None)

    @property
    def failed(self) -> bool:
        """Whether a schedule has raised after the last step."""
        return any(part.failed for part in self.parts)

    def failures(self) -> dict[int, Exception]:
        """What the schedules of members raised, by their slots, after steps that were taken."""
        return {part.first + slot: error for part in self.parts for slot, error in part.failures().items()}

    @property
    def tables(self) -> list[Tensor | None]:
        """Part by part the numbers of the coming steps, [G, names, M, steps + 1]; None where they are constant or
        cannot be foreseen."""
        return [part.table for part in self.parts]

    def begin(self, steps: int, least: int = FEW) -> None:
        """Look `steps` optimizer steps ahead, where schedules allow it, so that no step has to ask Python."""
        for part in self.parts:
            part.begin(steps, least)

    def step(self) -> None:
        """After an optimizer step of all members."""
        for part in self.parts:
            part.step()

    def skip(self, steps: int) -> None:
        """So many steps were taken where Python did not see them, with numbers from a table."""
        for part in self.parts:
            part.skip(steps)

    def sync_schedules(self) -> None:
        """Note the learning rates of the last step taken."""
        for part in self.parts:
            part.sync_schedules()

    def settle(self) -> None:
        """Catch the schedules up with the steps that were taken from the table."""
        for part in self.parts:
            part.settle()

    def epoch(self, values: Mapping[int, float | None]) -> None:
        """At the end of some members' epochs, with the watched value of each."""
        for slot, value in values.items():
            part = self._at(slot)
            job = part.span.recipes[slot - part.first].member.job
            if job.schedule_every == "epoch" and job.schedule is not None:
                part.epoch(slot - part.first, value)


class _Ruled:
    """Of members whose optimizers are one rule: columns hold their numbers."""

    def __init__(self, optimizer: StackedOptimizer) -> None:
        self.optimizer, self.span = optimizer, optimizer.span
        self.first = self.span.start
        self.last = self._current()
        self.table: Tensor | None = None
        self.raises_in: int | None = None
        self._ahead = 0
        self.rest(set())

    def rest(self, slots: set[int]) -> None:
        self.resting = slots
        self._stepped = any(
            member.job.schedule is not None and member.job.schedule_every == "step" and slot not in slots
            for slot, member in enumerate(self.span.members)
        )
        self.failed = any(runner.error is not None for _, runner in self._moving())

    def begin(self, steps: int, least: int) -> None:
        self.table, self._ahead, self.raises_in = None, 0, None
        if not self._stepped or steps < least:
            return
        still = self.optimizer.columns.packed.cpu().unsqueeze(-1).expand(-1, -1, -1, steps + 1)
        tables = [
            still[:, :, slot] if slot in self.resting else runner.table(steps + 1)
            for slot, runner in enumerate(self._runners())
        ]
        self.raises_in = min((r.raises_in for _, r in self._moving() if r.raises_in is not None), default=None)
        if all(table is not None for table in tables):
            wide = torch.stack([tables[r] for r in self.span.rows], 2)  # type: ignore[misc]
            self.table = wide.to(self.span.device)

    def step(self) -> None:
        if not self._stepped:
            return
        if self.table is not None:
            self._ahead += 1
            self.optimizer.columns.packed.copy_(self.table[..., self._ahead])
            self.failed = self._ahead == self.raises_in
            return
        self.last = self._current()
        for slot, runner in self._moving():
            runner.step()
            self.failed |= runner.error is not None
            self._put(slot)

    def skip(self, steps: int) -> None:
        if self.table is not None:
            self._ahead += steps
            self.failed = self._ahead == self.raises_in
        elif self._stepped:
            for slot, runner in self._moving():
                runner.step(steps - 1)
                self.last[slot] = runner.values()[0].get("lr", float("nan"))
                runner.step()
                self.failed |= runner.error is not None

    def failures(self) -> dict[int, Exception]:
        if not self.failed:
            return {}
        self.sync_schedules()
        self.settle()
        return {slot: runner.error for slot, runner in self._moving() if runner.error is not None}

    def sync_schedules(self) -> None:
        names = self.optimizer.columns.names
        if self.table is not None and self._ahead and "lr" in names:
            self.last = self.table[0, names.index("lr"), : len(self.last), self._ahead - 1].tolist()
        elif not self._stepped:
            self.last = self._current()

    def settle(self) -> None:
        if self.table is not None:
            for _, runner in self._moving():
                runner.step(self._ahead)
        self.table, self._ahead = None, 0

    def epoch(self, slot: int, value: float | None) -> None:
        runner = self._runners()[slot]
        if not runner.needs_metric or value is not None:
            runner.epoch(value)
            self.failed |= runner.error is not None
        self._put(slot)

    def _put(self, slot: int) -> None:
        values = self._runners()[slot].values()
        for row, own in enumerate(self.span.rows):
            if own == slot:
                self.optimizer.columns.set_row(row, values)

    def _runners(self) -> list[ScheduleRunner]:
        return [plan.runner for plan in self.optimizer.plans if plan.runner is not None]

    def _moving(self) -> list[tuple[int, ScheduleRunner]]:
        return [(slot, runner) for slot, runner in enumerate(self._runners()) if slot not in self.resting]

    def _current(self) -> list[float]:
        count, columns = len(self.span.recipes), self.optimizer.columns
        if "lr" not in columns.names:
            return [float("nan")] * count
        lr: list[float] = columns.groups[0]["lr"][:count].tolist()
        return lr


class _Own:
    """Of members with optimizers and schedulers of their own."""

    table: Tensor | None = None
    raises_in: int | None = None

    def __init__(self, optimizer: PerMemberOptimizers) -> None:
        self.optimizer, self.span = optimizer, optimizer.span
        self.first = self.span.start
        self.last = self._current()
        self.errors: dict[int, Exception] = {}

    @property
    def failed(self) -> bool:
        return bool(self.errors)

    def failures(self) -> dict[int, Exception]:
        return self.errors

    def rest(self, slots: set[int]) -> None:
        """Nobody sits in the seats of others here."""

    def begin(self, steps: int, least: int) -> None:
        """There is nothing to look ahead to: the schedulers are asked."""

    def step(self) -> None:
        self.last = self._current()
        for slot, (member, schedule) in enumerate(zip(self.span.members, self.optimizer.schedules, strict=True)):
            if schedule is not None and member.job.schedule_every == "step" and slot not in self.optimizer.failed:
                self._move(slot, schedule)

    def _move(self, slot: int, schedule: Any, *metric: float) -> None:
        if slot not in self.errors:
            try:
                schedule.step(*metric)
            except Exception as error:
                self.errors[slot] = error

    def skip(self, steps: int) -> None:
        raise AssertionError("steps of optimizers without a rule are never out of sight")

    def sync_schedules(self) -> None:
        """`step` has noted them."""

    def settle(self) -> None:
        """Nothing was taken from a table."""

    def epoch(self, slot: int, value: float | None) -> None:
        schedule = self.optimizer.schedules[slot]
        if isinstance(schedule, ReduceLROnPlateau):
            if value is not None:
                self._move(slot, schedule, value)
        elif schedule is not None:
            self._move(slot, schedule)

    def _current(self) -> list[float]:
        return [float(opt.param_groups[0].get("lr", float("nan"))) for opt in self.optimizer.optimizers]
