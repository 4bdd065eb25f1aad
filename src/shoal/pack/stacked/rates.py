"""Learning rates and other scheduled numbers of a stack, step by step."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from shoal.pack.stacked.stack import OwnOptimizers, Stack, StackedOptimizer

FEW = 4
"""Steps from which looking ahead costs less than asking each time."""


class Rates:
    """Moves every member's schedule on; the stack's columns always hold the numbers of the next step."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.last = self._current()
        self._table: Tensor | None = None
        self._ahead = 0

    def begin(self, steps: int, least: int = FEW) -> None:
        """Look `steps` optimizer steps ahead, where schedules allow it, so that no step has to ask Python."""
        self._table, self._ahead = None, 0
        optimizer = self.stack.optimizer
        if not isinstance(optimizer, StackedOptimizer) or not self._stepped() or steps < least:
            return
        tables = [plan.runner.table(steps + 1) for plan in optimizer.plans if plan.runner is not None]
        if all(table is not None for table in tables):
            wide = torch.stack([tables[r] for r in self.stack.rows], 2)
            self._table = wide.to(self.stack.device)  # [G, names, M, steps + 1]

    @property
    def table(self) -> Tensor | None:
        """Numbers of the coming steps, [G, names, M, steps + 1]; None where they are constant or cannot be foreseen."""
        return self._table

    def step(self) -> None:
        """After an optimizer step of all members."""
        optimizer = self.stack.optimizer
        if isinstance(optimizer, OwnOptimizers):
            self.last = self._current()
            for member, schedule in zip(self.stack.members, optimizer.schedules, strict=True):
                if schedule is not None and member.job.schedule_every == "step":
                    schedule.step()
            return
        if not self._stepped():
            return
        if self._table is not None:
            self._ahead += 1
            optimizer.columns.packed.copy_(self._table[..., self._ahead])
            return
        self.last = self._current()
        for slot, plan in enumerate(optimizer.plans):
            assert plan.runner is not None
            plan.runner.step()
            self._put(optimizer, slot)

    def skip(self, steps: int) -> None:
        """So many steps were taken where Python did not see them, with numbers from a table."""
        optimizer = self.stack.optimizer
        if self._table is not None or not isinstance(optimizer, StackedOptimizer):
            self._ahead += steps
            return
        for slot, plan in enumerate(optimizer.plans):
            assert plan.runner is not None
            plan.runner.step(steps - 1)
            self.last[slot] = plan.runner.values()[0].get("lr", float("nan"))
            plan.runner.step()

    def settle_rates(self) -> None:
        """Note the learning rates of the last step taken."""
        optimizer = self.stack.optimizer
        if (
            self._table is not None
            and self._ahead
            and isinstance(optimizer, StackedOptimizer)
            and "lr" in optimizer.columns.names
        ):
            lr = optimizer.columns.names.index("lr")
            self.last = self._table[0, lr, : len(self.stack.members), self._ahead - 1].tolist()
        elif not self._stepped() and isinstance(optimizer, StackedOptimizer):
            self.last = self._current()

    def settle(self) -> None:
        """Catch the schedules up with the steps that were taken from the table."""
        optimizer = self.stack.optimizer
        if self._table is not None and isinstance(optimizer, StackedOptimizer):
            for plan in optimizer.plans:
                assert plan.runner is not None
                plan.runner.step(self._ahead)
        self._table, self._ahead = None, 0

    def epoch(self, values: Mapping[int, float | None]) -> None:
        """At the end of some members' epochs, with the watched value of each."""
        optimizer = self.stack.optimizer
        for slot, value in values.items():
            member = self.stack.members[slot]
            if member.job.schedule_every != "epoch" or member.job.schedule is None:
                continue
            if isinstance(optimizer, OwnOptimizers):
                schedule = optimizer.schedules[slot]
                if isinstance(schedule, ReduceLROnPlateau):
                    if value is not None:
                        schedule.step(value)
                elif schedule is not None:
                    schedule.step()
                continue
            runner = optimizer.plans[slot].runner
            assert runner is not None
            if not runner.needs_metric or value is not None:
                runner.epoch(value)
            self._put(optimizer, slot)

    def _put(self, optimizer: StackedOptimizer, slot: int) -> None:
        runner = optimizer.plans[slot].runner
        assert runner is not None
        for row, own in enumerate(self.stack.rows):
            if own == slot:
                optimizer.columns.set_row(row, runner.values())

    def _stepped(self) -> bool:
        return any(m.job.schedule is not None and m.job.schedule_every == "step" for m in self.stack.members)

    def _current(self) -> list[float]:
        optimizer = self.stack.optimizer
        if isinstance(optimizer, OwnOptimizers):
            return [float(opt.param_groups[0].get("lr", float("nan"))) for opt in optimizer.optimizers]
        if "lr" not in optimizer.columns.names:
            return [float("nan")] * len(self.stack.members)
        lr: list[float] = optimizer.columns.groups[0]["lr"][: len(self.stack.members)].tolist()
        return lr
