"""Decisions: which jobs join and which leave, for any queue, any policy and any room."""

import math
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.engine.planning.policy import FairShare, Fifo, Policy, Priority, RoundRobin, ShortestFirst, Ticket
from shoal.engine.planning.queue import Admission, admit, ranked
from shoal.errors import JobError

NOW = 100.0
Fits = Callable[[list[Ticket]], bool]


def room_for(room: int, seats: int) -> Fits:
    return lambda some: len(some) <= seats and sum(t.bytes for t in some) <= room


def overdue(t: Ticket, tickets: Sequence[Ticket], patience: float) -> bool:
    """The rule as it is stated: so long for each job that was there when the wait began."""
    return not t.running and NOW - t.since > patience * sum(u.arrived <= t.since for u in tickets)


def kept(t: Ticket, policy: Policy) -> bool:
    """Whether a job must not be sent back yet."""
    return t.running and (policy.slice_seconds is None or NOW - t.since < policy.slice_seconds)


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    kind = draw(st.sampled_from([Fifo, Priority, ShortestFirst, RoundRobin, FairShare]))
    lengths = st.sampled_from([1.0, 7.0, 40.0])
    length = draw(lengths if issubclass(kind, (RoundRobin, FairShare)) else st.none() | lengths)
    return kind(slice_seconds=length, patience=draw(st.sampled_from([1.0, 5.0, 30.0, 1000.0, math.inf])))


@st.composite
def queues(draw: st.DrawFn) -> tuple[list[Ticket], Fits]:
    """Tickets of which those that run fit together."""
    fits = room_for(draw(st.integers(1, 20)), draw(st.integers(1, 6)))
    tickets: list[Ticket] = []
    for index in range(draw(st.integers(0, 10))):
        arrived = draw(st.integers(0, 99))
        ticket = Ticket(
            index=index,
            owner=draw(st.sampled_from("ab")),
            priority=draw(st.integers(-1, 1)),
            arrived=arrived,
            since=draw(st.integers(arrived, 100)),
            seconds=draw(st.sampled_from([math.nan, 1.0, 2.0, 50.0])),
            bytes=draw(st.integers(0, 8)),
            running=draw(st.booleans()),
            turn=index,
            owner_device_seconds=draw(st.integers(0, 100)),
        )
        if ticket.running and not fits([ticket, *(t for t in tickets if t.running)]):
            ticket = replace(ticket, running=False)
        tickets.append(ticket)
    return [
        replace(t, owner_device_seconds=next(u.owner_device_seconds for u in tickets if u.owner == t.owner))
        for t in tickets
    ], fits


def apply(tickets: list[Ticket], admission: Admission) -> list[Ticket]:
    turns = {index: turn for turn, index in enumerate([*admission.leave, *admission.join], start=len(tickets))}
    return [
        replace(t, running=not t.running, since=NOW, turn=turns[t.index]) if t.index in turns else t for t in tickets
    ]


@settings(max_examples=200, deadline=None)
@given(queues(), policies(), st.randoms())
def test_a_decision(queue: tuple[list[Ticket], Fits], policy: Policy, shuffler: random.Random) -> None:
    tickets, fits = queue
    admission = admit(tickets, policy, fits, NOW)
    waiting = {t.index for t in tickets if not t.running}
    assert set(admission.join) <= waiting and len(set(admission.join)) == len(admission.join)
    assert set(admission.leave) <= {t.index for t in tickets} - waiting

    after = apply(tickets, admission)
    runners = [t for t in after if t.running]
    assert fits(runners), "over the room"
    assert not any(kept(t, policy) for t in tickets if t.index in admission.leave), "sent away too soon"
    assert admission.join or not admission.leave, "sent away for nobody"
    assert admit(after, policy, fits, NOW) == Admission([], []), "a decision stands"

    out = [t for t in after if not t.running and fits([t])]
    if not any(NOW - t.since > policy.patience for t in out):
        assert not any(fits([*runners, t]) for t in out), "room that nobody has, though somebody fits"

    shuffled = list(tickets)
    shuffler.shuffle(shuffled)
    assert admit(shuffled, policy, fits, NOW) == admission


@settings(max_examples=200, deadline=None)
@given(queues(), policies())
def test_no_job_runs_in_the_place_of_one_that_goes_before(queue: tuple[list[Ticket], Fits], policy: Policy) -> None:
    """A job that is left out does not fit beside those that go before it, or room is held back for another."""
    tickets, fits = queue
    admission = admit(tickets, policy, fits, NOW)
    runners = {t.index for t in apply(tickets, admission) if t.running}
    order = ranked(tickets, policy, NOW)
    holds = False
    for place, t in enumerate(order):
        before = [u for u in order[:place] if u.index in runners]
        if t.index in runners:
            assert t.running or not holds, "joined in front of one that room is held back for"
        elif not (holds and not t.running):
            assert not fits([*before, t])
            holds = holds or (not t.running and NOW - t.since > policy.patience and fits([t]))


@settings(max_examples=200, deadline=None)
@given(queues(), policies())
def test_ranks_are_as_stated(queue: tuple[list[Ticket], Fits], policy: Policy) -> None:
    tickets, _ = queue
    came = sorted(tickets, key=lambda t: (t.arrived, t.index))
    order = policy.order(came, NOW)
    first = [t for t in order if kept(t, policy)]
    late = sorted((t for t in order if overdue(t, tickets, policy.patience)), key=lambda t: t.since)
    rest = [t for t in order if t not in first and t not in late]
    assert ranked(tickets, policy, NOW) == first + late + rest
    waiting = [t for t in order if not t.running and t not in late]
    assert all(t.since <= u.since for t in late for u in waiting), "one that began to wait earlier is late earlier"


def ticket(index: int, *, size: int = 1, waits: float = 0.0, runners: float | None = None, priority: int = 0) -> Ticket:
    since = NOW - (waits if runners is None else runners)
    return Ticket(
        index=index, arrived=since, since=since, running=runners is not None, bytes=size, priority=priority, seconds=1.0
    )


def test_small_jobs_fill_the_room_until_one_has_waited_too_long() -> None:
    fits = room_for(4, 9)
    for waits, join in ((5.0, [2]), (10.0, [2]), (10.5, [])):
        tickets = [ticket(0, size=3, runners=50), ticket(1, size=2, waits=waits), ticket(2)]
        assert admit(tickets, Fifo(patience=10), fits, NOW).join == join
    assert admit(tickets[1:], Fifo(patience=10), fits, NOW).join == [1, 2]


def test_while_room_is_held_back_those_that_run_continue() -> None:
    """The one that waits for room needs all of it, and one job must not be sent back yet."""
    waits = ticket(0, size=4, waits=50, priority=5)
    runners = [ticket(1, runners=1), ticket(2, runners=50), ticket(3, runners=50)]
    policy = Priority(slice_seconds=10, patience=20)
    assert admit([waits, *runners, ticket(4)], policy, room_for(4, 9), NOW) == Admission([], [])
    runners[0] = ticket(1, runners=10)
    assert admit([waits, *runners, ticket(4)], policy, room_for(4, 9), NOW) == Admission([0], [2, 3, 1])


def test_a_job_that_fits_nowhere_holds_nothing_up() -> None:
    tickets = [ticket(0, size=9, waits=99), ticket(1, waits=1)]
    assert admit(tickets, Fifo(patience=10), room_for(4, 9), NOW).join == [1]


@pytest.mark.parametrize("policy", [Fifo(), Priority()])
def test_what_does_not_fit_any_more_leaves(policy: Policy) -> None:
    """Room can shrink: the decision fits all the same, and the first that came stays."""
    tickets = [ticket(i, size=2, runners=9 - i) for i in range(4)]
    assert admit(tickets, policy, room_for(5, 9), NOW) == Admission([], [2, 3])


def test_a_place_is_taken_only_after_a_slice_and_only_by_a_larger_priority() -> None:
    for runners, priority, expected in (
        (9.0, 1, Admission([], [])),
        (10.0, 1, Admission([1], [0])),
        (10.0, 0, Admission([], [])),
    ):
        tickets = [ticket(0, runners=runners), ticket(1, waits=3, priority=priority)]
        assert admit(tickets, Priority(slice_seconds=10), room_for(9, 1), NOW) == expected


def test_newcomers_do_not_move_the_moment_of_ageing() -> None:
    old = ticket(0, waits=31, priority=-1)
    there = [replace(ticket(i, runners=50), arrived=10.0) for i in (1, 2)]
    assert ranked([old, *there], Priority(patience=10), NOW)[0] is old
    crowd = [ticket(i, waits=1, priority=3) for i in range(3, 50)]
    assert ranked([old, *there, *crowd], Priority(patience=10), NOW)[0] is old
    assert ranked([old, *there, *crowd], Priority(patience=10.5), NOW)[0] is not old


class Loses(Policy):
    def order(self, tickets: Sequence[Ticket], now: float) -> list[Ticket]:
        return list(tickets[1:])


def test_a_policy_that_loses_tickets_is_told() -> None:
    with pytest.raises(JobError, match="policy 'Loses' gave 1 tickets back for 2"):
        admit([ticket(0), ticket(1)], Loses(), room_for(9, 9), NOW)


def test_no_torch() -> None:
    script = "import sys, shoal.testing, shoal.engine.planning.queue; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)
