"""Turns: so many batches of each ride, and what came of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from shoal.engine.runtime.unit_runner import Host, Ride
from shoal.engine.tiers.unit import Executor, Outcome, Unit

if TYPE_CHECKING:
    from shoal.engine.members.member import Member

Look = Callable[[Ride, Outcome, int], None]


def turn(
    rides: list[Ride],
    batches: list[int],
    executor: Executor,
    look: Look | None = None,
    done: Callable[[Sequence[Ride]], None] | None = None,
) -> list[Outcome]:
    """So many batches of each ride, and what came of them.

    `done` is called when all have had their batches and before any epoch is closed; `look` sees each before its own is.
    """
    for ride in rides:
        ride.begin()
        ride.start()
    work = [(ride.unit, count) for ride, count in zip(rides, batches, strict=True)]
    outcomes = executor.run(work, partial(_look_ahead, rides, batches))
    if done is not None:
        done(rides)
    for ride, count, outcome in zip(rides, batches, outcomes, strict=True):
        if look is not None:
            look(ride, outcome, count)
        ride.settle(outcome)
    return outcomes


def _look_ahead(rides: list[Ride], batches: list[int]) -> None:
    """What an executor may do while it waits for a device."""
    for ride, count in zip(rides, batches, strict=True):
        ride.look_ahead(count)


def run(units: list[Unit], executor: Executor | None = None, watch: Callable[[Member], None] | None = None) -> None:
    """Train these units' members to their ends, all of them at once."""
    rides = [Ride(unit, _Watching(watch)) for unit in units]
    try:
        while rides := [ride for ride in rides if ride.ready()]:
            turn(rides, [ride.next_batches() for ride in rides], executor or Executor())
            rides += [Ride(unit, ride.host) for ride in rides for unit, _ in ride.separate()]
    except KeyboardInterrupt:
        for ride in rides:
            ride.cancel()
        raise


class _Watching(Host):
    def __init__(self, watch: Callable[[Member], None] | None) -> None:
        self.watch = watch or (lambda member: None)

    def epoch(self, ride: Ride, slot: int) -> None:
        self.watch(ride.members[slot])

    def left(self, ride: Ride, slot: int) -> None:
        self.watch(ride.members[slot])
