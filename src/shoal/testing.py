"""Contract tests for classes that users may write themselves. They need no test framework."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shoal.engine.planning.policy import Policy, Ticket
from shoal.engine.planning.queue import Admission, Queue, admit


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A job of a simulated queue."""

    seconds: float
    """How long the job must run in total."""
    arrives: float = 0.0
    owner: str = ""
    priority: int = 0
    bytes: int = 1
    known: bool = True
    """Whether the queue knows the job's length in advance."""


@dataclass(frozen=True, slots=True)
class Moment:
    """One decision in a simulated queue."""

    now: float
    tickets: list[Ticket]
    """The tickets before the decision."""
    admission: Admission
    after: list[Ticket]

    @property
    def running(self) -> list[Ticket]:
        """The tickets that run after the decision."""
        return [t for t in self.after if t.running]


def simulate(policy: Policy, loads: Sequence[Load], *, room: int, tick: float = 1.0) -> Iterator[Moment]:
    """Decide every `tick` seconds which loads run within `room` bytes, until all loads have run for their time."""
    if too_large := [load for load in loads if load.bytes > room]:
        raise ValueError(f"{too_large[0]} does not fit into {room} bytes; use fewer bytes, or a larger room")
    queue = Queue(policy)
    coming = sorted(range(len(loads)), key=lambda i: (loads[i].arrives, i), reverse=True)
    step = 0
    while len(queue) or coming:
        now = step * tick
        while coming and loads[coming[-1]].arrives <= now:
            queue.add(_arrival(coming[-1], loads[coming.pop()], now))
        tickets = queue.tickets
        admission = queue.admit(lambda some: sum(t.bytes for t in some) <= room, now)
        moment = Moment(now, tickets, admission, queue.tickets)
        yield moment
        for t in moment.running:
            queue.add_device_time(t.index, tick, t.seconds - tick)
            if t.device_seconds + tick >= loads[t.index].seconds:
                queue.remove(t.index)
        step += 1


def _arrival(index: int, load: Load, now: float) -> Ticket:
    """Return the ticket of a load when it arrives."""
    return Ticket(
        index=index,
        name=f"job {index}",
        owner=load.owner,
        priority=load.priority,
        arrived=now,
        since=now,
        seconds=load.seconds if load.known else math.nan,
        bytes=load.bytes,
        running=False,
    )


def check_policy(policy: Policy, *, rounds: int = 20, seed: int = 0) -> None:
    """Raise an AssertionError, in one line, if a policy breaks its contract.

    Its order contains each ticket once, is the same when it is asked again, and does not change its arguments. In
    simulated queues every job ends, none waits longer than `queue.admit` promises, memory is never exceeded, and a
    decision holds until time has passed.
    """
    assert isinstance(policy, Policy), f"{policy!r} is not a shoal.Policy; derive its class from it"
    draw = random.Random(seed)
    _check_order(policy, [], 0.0)
    unit = policy.slice_seconds if policy.slice_seconds is not None else min(policy.patience, 600.0) / 8
    for _ in range(rounds):
        loads = [_draw_load(draw, unit) for _ in range(draw.randint(1, 8))]
        _check_order(policy, [_arrival(i, load, load.arrives) for i, load in enumerate(loads)], 100 * unit)
        check_moments(policy, simulate(policy, loads, room=4, tick=unit / 2), loads, room=4, tick=unit / 2)


def check_moments(policy: Policy, moments: Iterator[Moment], loads: Sequence[Load], *, room: int, tick: float) -> None:
    """Check every decision of a simulated queue for what must hold under any policy."""
    longest = max((load.seconds for load in loads), default=0.0)
    longest_turn = longest if policy.slice_seconds is None else min(policy.slice_seconds, longest)
    num_present: dict[tuple[int, float], int] = {}
    """The number of jobs in the queue when a wait began."""
    work = sum(load.seconds + tick for load in loads) + max((load.arrives for load in loads), default=0.0)
    for moment in moments:
        now, after = moment.now, moment.after
        _check_order(policy, moment.tickets, now)
        used = sum(t.bytes for t in moment.running)
        assert used <= room, f"{policy.name} at {now:g} s: {used} bytes are used, but only {room} are there"
        again = admit(after, policy, lambda some: sum(t.bytes for t in some) <= room, now)
        assert again == Admission([], []), (
            f"{policy.name} at {now:g} s: asked again at once, it decides differently: {again}"
        )
        assert not after or moment.running, f"{policy.name} at {now:g} s: jobs wait and none runs"
        for t in moment.tickets:
            if not t.running:
                n = num_present.setdefault((t.index, t.since), sum(u.arrived <= t.since for u in moment.tickets))
                bound = n * (policy.patience + longest_turn + 2 * tick)
                assert now - t.since <= bound, f"{policy.name} at {now:g} s: {t.name} waits longer than {bound:g} s"
        assert now <= work, f"{policy.name}: work of {work:g} s is not done after that time"


def _check_order(policy: Policy, tickets: list[Ticket], now: float) -> None:
    """Check that the policy's order has every ticket once, is repeatable and leaves its arguments unchanged."""
    original = list(tickets)
    first, second = policy.order(original, now), policy.order(original, now)
    assert original == tickets, f"{policy.name}: order changed the list it was given; use sorted()"
    assert sorted(t.index for t in first) == sorted(t.index for t in tickets), (
        f"{policy.name}: order gave {[t.index for t in first]} for {[t.index for t in tickets]}; each must come once"
    )
    assert first == second, (
        f"{policy.name}: for the same arguments, order gave different results; use only tickets and now"
    )


def _draw_load(draw: random.Random, unit: float) -> Load:
    return Load(
        seconds=draw.randint(1, 12) * unit,
        arrives=draw.choice([0.0, draw.randint(0, 12) * unit]),
        owner=draw.choice("abc"),
        priority=draw.randint(-2, 2),
        bytes=draw.randint(1, 4),
        known=draw.random() < 0.8,
    )
