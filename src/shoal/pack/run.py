"""The loop over units: each round every unit gets a turn, and what happened is then settled member by member.

It knows nothing of how a tier trains.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from shoal.pack.ride import Ride, Watcher
from shoal.pack.unit import Executor, Unit


def run(units: list[Unit], executor: Executor | None = None, watch: Watcher | None = None) -> None:
    """Train the units' members to their ends; what came of them is then in the members."""
    executor = executor or Executor()
    rides = [Ride(unit, watch or (lambda member: None)) for unit in units]
    try:
        while rides := [ride for ride in rides if ride.ready()]:
            turn(rides, [ride.next_batches() for ride in rides], executor)
    except KeyboardInterrupt:
        for ride in rides:
            ride.cancel()
        raise


def turn(rides: list[Ride], batches: list[int], executor: Executor, look: Callable[[Ride], None] | None = None) -> None:
    """So many batches of each ride, and what came of them; `look` sees each before its epochs are closed."""
    for ride in rides:
        ride.begin()
        ride.start()
    work = [(ride.unit, count) for ride, count in zip(rides, batches, strict=True)]
    outcomes = executor.run(work, partial(_look_ahead, rides, batches))
    for ride, outcome in zip(rides, outcomes, strict=True):
        if look is not None:
            look(ride)
        ride.settle(outcome)


def _look_ahead(rides: list[Ride], batches: list[int]) -> None:
    """What an executor may do while it waits for a device."""
    for ride, count in zip(rides, batches, strict=True):
        ride.look_ahead(count)
