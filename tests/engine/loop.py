"""Units trained to their ends without a queue, a plan or a folder."""

from __future__ import annotations

from collections.abc import Callable

from shoal.engine.members.member import Member
from shoal.engine.runtime.unit_runner import UnitListener, UnitRunner, turn
from shoal.engine.tiers.unit import Executor, Unit


def run(units: list[Unit], executor: Executor | None = None, watch: Callable[[Member], None] | None = None) -> None:
    """Train these units' members to their ends, all of them at once."""
    runners = [UnitRunner(unit, _Watching(watch)) for unit in units]
    try:
        while runners := [runner for runner in runners if runner.ready()]:
            turn(runners, [runner.next_batches() for runner in runners], executor or Executor())
            runners += [UnitRunner(unit, runner.host) for runner in runners for unit, _ in runner.separate()]
    except KeyboardInterrupt:
        for runner in runners:
            runner.cancel()
        raise


class _Watching(UnitListener):
    def __init__(self, watch: Callable[[Member], None] | None) -> None:
        self.watch = watch or (lambda member: None)

    def epoch(self, runner: UnitRunner, slot: int) -> None:
        self.watch(runner.members[slot])

    def left(self, runner: UnitRunner, slot: int) -> None:
        self.watch(runner.members[slot])
