"""Turns: so many batches of each ride, and what came of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from shoal.engine.runtime.unit_runner import UnitListener, UnitRunner
from shoal.engine.tiers.unit import Executor, Outcome, Unit

if TYPE_CHECKING:
    from shoal.engine.members.member import Member

Look = Callable[[UnitRunner, Outcome, int], None]


def turn(
    runners: list[UnitRunner],
    batches: list[int],
    executor: Executor,
    look: Look | None = None,
    done: Callable[[Sequence[UnitRunner]], None] | None = None,
) -> list[Outcome]:
    """So many batches of each ride, and what came of them.

    `done` is called when all have had their batches and before any epoch is closed; `look` sees each before its own is.
    """
    for runner in runners:
        runner.begin()
        runner.start()
    work = [(runner.unit, count) for runner, count in zip(runners, batches, strict=True)]
    outcomes = executor.run(work, partial(_look_ahead, runners, batches))
    if done is not None:
        done(runners)
    for runner, count, outcome in zip(runners, batches, outcomes, strict=True):
        if look is not None:
            look(runner, outcome, count)
        runner.finish_turn(outcome)
    return outcomes


def _look_ahead(runners: list[UnitRunner], batches: list[int]) -> None:
    """What an executor may do while it waits for a device."""
    for runner, count in zip(runners, batches, strict=True):
        runner.look_ahead(count)


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
