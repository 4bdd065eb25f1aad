"""Run jobs batch by batch, as `shoal.train` would: a benchmark times its steps, without what happens at its end."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Literal

import torch

from shoal.engine.members.member import Member
from shoal.engine.planning.planner import Plan
from shoal.engine.processes.child import Child
from shoal.engine.processes.sharing import assign_members, processes_for
from shoal.engine.runtime.planning_context import PlanningContext
from shoal.engine.runtime.unit_runner import UnitListener, UnitRunner, turn
from shoal.engine.tiers.unit import Executor, Outcome, Unit
from shoal.jobs.job import Job
from shoal.preparation.checks import prepare


class TimedPack:
    """A pack in the middle of its training; `step(n)` advances every member by n batches."""

    def __init__(self, planning: PlanningContext, members: Sequence[Member], count: int = 1) -> None:
        own_members, *other_shares = assign_members(members, planning, count) if count > 1 else [list(members)]
        self.plan = planning.propose(members)
        self.device = members[0].device
        self._helpers = [Child(partial(_serve, planning, share)) for share in other_shares if share]
        self._threads = torch.get_num_threads()
        if self._helpers:
            torch.set_num_threads(1)  # as in each helper
        units = planning.units(own_members)
        if planning.gpu:
            self.plan = Plan(str(self.device), list({id(part): part for _, part in units}.values()))
        self._ours = _Steps([unit for unit, _ in units], planning.executor)
        self._latest: dict[int, float] = {}

    @property
    def tier(self) -> str:
        """The tiers in use, and the number of processes."""
        tiers = ", ".join(dict.fromkeys(part.tier for part in self.plan.parts))
        return f"{tiers}, {1 + len(self._helpers)} processes" if self._helpers else tiers

    @property
    def predicted_ms(self) -> float | None:
        """Predicted milliseconds of one step of all members; None if not known."""
        seconds = [part.predicted.get("step_seconds") for part in self.plan.parts]
        predicted = [value for value in seconds if value is not None]
        return 1e3 * sum(predicted) / (1 + len(self._helpers)) if len(predicted) == len(seconds) else None

    def step(self, n: int) -> None:
        """Train every member for n more batches."""
        for helper in self._helpers:
            helper.pipe.send(n)
        self._latest |= self._ours.step(n)
        for helper in self._helpers:
            self._latest |= helper.pipe.recv()
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def losses(self) -> list[float]:
        """Return every member's loss at its latest batch."""
        return [self._latest[index] for index in sorted(self._latest)]

    def close(self) -> None:
        """End the helper processes, and restore the number of threads."""
        torch.set_num_threads(self._threads)
        for helper in self._helpers:
            helper.close()
            helper.end()
        self._helpers = []


class _Steps:
    """Advances units by a number of batches, all of them together."""

    def __init__(self, units: list[Unit], executor: Executor) -> None:
        self.latest: dict[int, float] = {}
        self.runners = [UnitRunner(unit, UnitListener()) for unit in units]
        self.executor = executor

    def step(self, n: int) -> dict[int, float]:
        """Advance every unit by n batches, and return the members' latest losses by index."""
        batches_left = {id(runner): n for runner in self.runners}
        while ready := [runner for runner in self.runners if batches_left[id(runner)] and runner.ready()]:
            turns = [min(batches_left[id(runner)], runner.next_batches()) for runner in ready]
            turn(ready, turns, self.executor, self._look)
            for runner, batches in zip(ready, turns, strict=True):
                batches_left[id(runner)] -= batches
        return self.latest

    def _look(self, runner: UnitRunner, outcome: Outcome, done: int) -> None:
        self.latest |= {member.index: member.losses[-1] for member in runner.members if member.losses}


def _serve(planning: PlanningContext, members: Sequence[Member], pipe: Connection) -> None:
    """Run in a helper process: step whenever the parent asks for it."""
    steps = _Steps([unit for unit, _ in planning.units(members)], Executor())
    while True:
        pipe.send(steps.step(pipe.recv()))


def open_pack(jobs: Sequence[Job], device: torch.device | str, compile: bool | Literal["auto"] = "auto") -> TimedPack:
    """Build, group and plan these jobs as `shoal.train` would, and stop before the first batch."""
    members = prepare(jobs, torch.device(device))
    planning = PlanningContext(members, compile=compile)
    count = processes_for(members, planning, None)
    return TimedPack(planning, members, count)
