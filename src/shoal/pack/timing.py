"""Jobs opened for stepping: what a benchmark times is the work of `shoal.train`, batch by batch, without its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from shoal.checks import prepare
from shoal.job import Job
from shoal.pack.members import Member
from shoal.pack.plan import Plan, arrange
from shoal.pack.run import Track
from shoal.pack.unit import Executor, Unit


class TimedPack:
    """A pack in the middle of its training; `step(n)` takes every member n batches further."""

    def __init__(self, plan: Plan, units: list[Unit], executor: Executor) -> None:
        self.plan = plan
        self.tracks = [Track(unit, lambda member: None) for unit in units]
        self.executor = executor
        self._latest: dict[int, float] = {}

    @property
    def tier(self) -> str:
        """The tiers in use."""
        return ", ".join(dict.fromkeys(part.tier for part in self.plan.parts))

    @property
    def predicted_ms(self) -> float | None:
        """One step of all members, as predicted."""
        seconds = [part.predicted.get("step_seconds") for part in self.plan.parts]
        known = [value for value in seconds if value is not None]
        return 1e3 * sum(known) if len(known) == len(seconds) else None

    def step(self, n: int) -> None:
        """Train every member for n more batches."""
        for track in self.tracks:
            left = n
            while left and track.ready():
                track.begin()
                batches = min(left, track.next_batches())
                (outcome,) = self.executor.run([(track.unit, batches)])
                self._note(track.unit.members, track.unit.losses())
                track.settle(outcome)
                left -= batches
        if self.tracks and self.tracks[0].unit.members and self.tracks[0].unit.members[0].device.type == "cuda":
            torch.cuda.synchronize()

    def _note(self, members: list[Member], losses: Tensor) -> None:
        for member, row in zip(members, losses[:, -1].tolist(), strict=True):
            self._latest[member.index] = row

    def losses(self) -> list[float]:
        """Every member's loss at its latest batch."""
        return [self._latest[index] for index in sorted(self._latest)]

    def close(self) -> None:
        """Let go of everything."""
        self.tracks = []


def open_pack(jobs: Sequence[Job], device: torch.device | str, compile: bool | Literal["auto"] = "auto") -> TimedPack:
    """Build, group and plan these jobs as `shoal.train` would, and stop before the first batch."""
    members = prepare(jobs, torch.device(device))
    plan, units = arrange(members)
    return TimedPack(plan, units, Executor())
