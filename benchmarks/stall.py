"""How long joining and leaving hold up the others on a GPU, once the pack's size has been seen.

python benchmarks/stall.py --network mlp --seats 32

Three times as many jobs as seats, of different lengths: finished jobs free memory for queued ones. It reports the
milliseconds for which the others stand still, and the steps that they would have taken meanwhile.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from shoal.engine.members.member import Member
from shoal.engine.runtime import run
from shoal.engine.runtime.planning_context import PlanningContext
from shoal.engine.runtime.unit_runner import UnitRunner
from shoal.evidence.bench.workloads import Spec, workload
from shoal.preparation.checks import prepare


class Seats(PlanningContext):
    """A board on which every member takes one seat."""

    def bytes(self, members: Sequence[Member]) -> float:
        return float(len(members))


LEAVES: list[tuple[int, float]] = []
"""How many left at once, and the milliseconds that it took."""
_leave = UnitRunner.leave


def leave(self: UnitRunner, ends: dict[int, str]) -> None:
    """As it is, timed."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    _leave(self, ends)
    torch.cuda.synchronize()
    if ends:
        LEAVES.append((len(ends), 1e3 * (time.perf_counter() - start)))


class Timed(run.Run):
    """A run that notes how long its parts take."""

    def __init__(self, members: Sequence[Member], planning: PlanningContext) -> None:
        super().__init__(members, planning)
        self.joins: list[float] = []
        self.joined: list[int] = []
        self.settling: list[float] = []
        self.steps: list[float] = []

    def _seat(self, members: list[Member]) -> None:
        first, start = not self.runners, time.perf_counter()
        super()._seat(members)
        torch.cuda.synchronize()
        if not first:
            self.joins.append(1e3 * (time.perf_counter() - start))
            self.joined.append(len(members))

    def _turn(self) -> None:
        start = time.perf_counter()
        spent: list[float] = []
        look = self._look
        self._look = lambda runner, outcome, done: (  # type: ignore[method-assign]
            spent.append(outcome.seconds),
            self.steps.append(1e3 * outcome.seconds / max(1, done)),
            look(runner, outcome, done),
        )
        try:
            super()._turn()
        finally:
            self._look = look  # type: ignore[method-assign]
        self.settling.append(1e3 * (time.perf_counter() - start - sum(spent)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="mlp")
    parser.add_argument("--seats", type=int, default=32)
    args = parser.parse_args()
    made = workload(Spec(network=args.network, members=3 * args.seats, precision="bf16", batches=64), epochs=1)
    lengths = [200 + 53 * (7 * index % 40) for index in range(len(made))]
    jobs = [
        dataclasses.replace(job, epochs=None, steps=steps, name=str(index))
        for index, (job, steps) in enumerate(zip(made, lengths, strict=True))
    ]
    members = prepare(jobs, torch.device("cuda", 0))
    planning = Seats(members, compile=False)
    planning.budget = args.seats
    run = Timed(members, planning)
    UnitRunner.leave = leave  # type: ignore[method-assign]
    run.go()
    step = statistics.median(run.steps)
    found: dict[str, Any] = {
        "network": args.network, "seats": args.seats, "joins": len(run.joins), "units": len(planning.plan.parts),
        "step_ms": step, "join_ms": statistics.median(run.joins), "join_ms_most": max(run.joins),
        "join_steps": statistics.median(run.joins) / step, "join_steps_most": max(run.joins) / step,
        "joined_at_once_most": max(run.joined), "leave_ms": statistics.median(ms for _, ms in LEAVES),
        "leave_ms_most": max(ms for _, ms in LEAVES), "leave_steps_most": max(ms for _, ms in LEAVES) / step,
        "left_at_once_most": max(count for count, _ in LEAVES), "settle_ms": statistics.median(run.settling),
        "settle_ms_most": max(run.settling), "statuses": sorted({member.status for member in members}),
    }  # fmt: skip
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
