"""What a supervisor does to a run, and what follows: members pause, and stacks that became small are taken apart."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from shoal.engine.planning.planner import predict

if TYPE_CHECKING:
    from shoal.engine.runtime.commands import Supervisor
    from shoal.engine.runtime.run import Run
    from shoal.engine.runtime.unit_runner import UnitRunner

WORTH = 0.95
"""What a stack must gain over its members one after another to be kept; of one member alone, nothing is gained."""


def supervise(run: Run, supervisor: Supervisor) -> None:
    """Let the supervisor decide; members that it leaves at their pauses give their places back."""
    supervisor.look(run)
    members = [*(member for runner in run.runners for member in runner.members), *run.waiting.values()]
    run.paused |= {m.index: m for m in run.take_out({m.index for m in members if m.pausing}, "pause")}
    assert run.waiting or run.runners or not run.paused, "members are paused and nobody decides about them"
    for runner in [runner for runner in run.runners if _lost(run, runner)]:
        runner.alone |= dict.fromkeys(runner.members, "too few are left to gain from a stack")
        run.separate(runner)


def _lost(run: Run, runner: UnitRunner) -> bool:
    """Whether so few are left in a stack that they are faster one by one; never where times may decide nothing."""
    planning = run.planning
    if planning.gpu or not planning.timed or runner.unit.tier != "stacked" or not runner.unit.at_step_boundary:
        return False
    gain = predict([planning.request(member) for member in runner.members]).get("gain", math.nan)
    return gain < WORTH or (math.isnan(gain) and len(runner.members) == 1)
