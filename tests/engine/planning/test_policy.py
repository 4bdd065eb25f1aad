"""What each policy promises, in simulated queues that hypothesis draws."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations, count, takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.engine.planning.policy import (
    POLICIES,
    FairShare,
    Fifo,
    Policy,
    Priority,
    RoundRobin,
    ShortestFirst,
    Ticket,
    policy_for,
)
from shoal.errors import JobError
from shoal.testing import Load, Moment, check_moments, check_policy, simulate

SLICE = 3.0
ALL = [
    Fifo(patience=5),
    Fifo(patience=40),
    Priority(slice_seconds=SLICE, patience=5),
    Priority(slice_seconds=None, patience=5),
    ShortestFirst(patience=5),
    ShortestFirst(slice_seconds=SLICE, patience=20),
    RoundRobin(slice_seconds=SLICE, patience=5),
    FairShare(slice_seconds=SLICE, patience=5),
]


def loads(most: int = 12, *, sizes: int = 1, length: int = 12, last: int = 30) -> st.SearchStrategy[list[Load]]:
    """Queues: arrivals, owners, priorities, lengths, and sizes up to the given one."""
    one = st.builds(
        Load,
        seconds=st.integers(1, length).map(float),
        arrives=st.integers(0, last).map(float),
        owner=st.sampled_from("abc"),
        priority=st.integers(-2, 2),
        bytes=st.integers(1, sizes),
        known=st.booleans(),
    )
    return st.lists(one, min_size=1, max_size=most)


def overdue(t: Ticket, moment: Moment, patience: float) -> bool:
    return moment.now - t.since > patience * sum(u.arrived <= t.since for u in moment.tickets)


def joins(moments: Sequence[Moment]) -> list[int]:
    return [index for moment in moments for index in moment.admission.join]


@settings(max_examples=40, deadline=None)
@pytest.mark.parametrize("policy", ALL, ids=repr)
@given(loads(sizes=5), st.integers(5, 9))
def test_nobody_starves_and_nothing_exceeds_the_room(policy: Policy, queue: list[Load], room: int) -> None:
    moments = list(simulate(policy, queue, room=room))
    check_moments(policy, iter(moments), queue, room=room, tick=1.0)
    assert set(joins(moments)) == set(range(len(queue)))
    if not policy.preempts:
        assert len(joins(moments)) == len(queue), "ran to its end"


@settings(max_examples=60, deadline=None)
@given(loads(sizes=3), st.integers(3, 6), st.sampled_from([2.0, 10.0, math.inf]))
def test_fifo(queue: list[Load], room: int, patience: float) -> None:
    """A job that came later runs earlier only in room too small for the other, and only within its patience."""
    came = sorted(range(len(queue)), key=lambda i: (queue[i].arrives, i))
    for moment in simulate(Fifo(patience=patience), queue, room=room):
        used = sum(t.bytes for t in moment.running)
        for t in moment.after:
            passed = [i for i in moment.admission.join if came.index(i) > came.index(t.index)]
            if not t.running and passed:
                assert used - sum(queue[i].bytes for i in passed) + t.bytes > room
                assert moment.now - t.since <= patience


@settings(max_examples=60, deadline=None)
@given(loads(), st.integers(1, 4))
def test_fifo_with_equal_sizes_is_the_order_of_arrival(queue: list[Load], seats: int) -> None:
    order = joins(list(simulate(Fifo(patience=2), queue, room=seats)))
    assert order == sorted(range(len(queue)), key=lambda i: (queue[i].arrives, i))


def check_best_ride(policy: Policy, queue: list[Load], seats: int, worth: Callable[[Ticket], float]) -> None:
    """No job waits while one of less worth has its place, ageing and slices that must not end yet excepted."""
    for moment in simulate(policy, queue, room=seats):
        before = {t.index: t for t in moment.tickets}
        free = [
            t
            for t in moment.running
            if (t.since < moment.now and policy.slice_seconds and moment.now - t.since >= policy.slice_seconds)
            or (t.index in moment.admission.join and not overdue(before[t.index], moment, policy.patience))
        ]
        out = [t for t in moment.after if not t.running]
        assert not out or all(worth(t) >= max(map(worth, out)) for t in free)


@settings(max_examples=60, deadline=None)
@given(loads(), st.integers(1, 4), st.sampled_from([None, 1.0, SLICE]), st.sampled_from([2.0, 10.0, math.inf]))
def test_priority(queue: list[Load], seats: int, length: float | None, patience: float) -> None:
    policy = Priority(slice_seconds=length, patience=patience)
    check_best_ride(policy, queue, seats, lambda t: t.priority)


@settings(max_examples=60, deadline=None)
@given(loads(), st.integers(1, 4), st.sampled_from([None, 1.0, SLICE]), st.sampled_from([2.0, 10.0, math.inf]))
def test_shortest_first(queue: list[Load], seats: int, length: float | None, patience: float) -> None:
    policy = ShortestFirst(slice_seconds=length, patience=patience)
    check_best_ride(policy, queue, seats, lambda t: -math.inf if math.isnan(t.seconds) else -t.seconds)


@settings(max_examples=60, deadline=None)
@given(loads(8, length=30), st.integers(1, 4), st.sampled_from([4.0, 30.0, math.inf]))
def test_round_robin(queue: list[Load], seats: int, patience: float) -> None:
    """From the moment when both are there, two jobs have had the same time up to one slice."""
    policy = RoundRobin(slice_seconds=SLICE, patience=patience)
    start: dict[tuple[int, int], float] = {}
    for moment in simulate(policy, queue, room=seats):
        for a, b in combinations(sorted(moment.tickets, key=lambda t: t.index), 2):
            lead = a.device_seconds - b.device_seconds
            assert abs(lead - start.setdefault((a.index, b.index), lead)) <= SLICE


def test_round_robin_goes_round() -> None:
    moments = list(simulate(RoundRobin(slice_seconds=2), [Load(seconds=4)] * 3, room=1))
    assert [t.index for moment in moments for t in moment.running] == [0, 0, 1, 1, 2, 2] * 2


@settings(max_examples=60, deadline=None)
@given(loads(16, length=20, last=10), st.integers(1, 4))
def test_fair_share(queue: list[Load], seats: int) -> None:
    """While two owners have jobs that wait, neither gains more on the one behind than a slice for each place."""
    policy = FairShare(slice_seconds=SLICE, patience=math.inf)
    start: dict[tuple[str, str], float] = {}
    for moment in simulate(policy, queue, room=seats):
        had = {t.owner: t.owner_device_seconds for t in moment.after if not t.running}
        start = {pair: lead for pair, lead in start.items() if set(pair) <= set(had)}
        for a, b in combinations(sorted(had), 2):
            lead = had[a] - had[b]
            first = abs(start.setdefault((a, b), lead))
            assert abs(lead) <= max(first, SLICE) + SLICE * seats


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(3, 9), min_size=2, max_size=3), st.integers(1, 4))
def test_fair_share_does_not_count_jobs(counts: list[int], seats: int) -> None:
    """One owner with many jobs, another with few: the same device time while both have jobs that wait."""
    queue = [Load(seconds=9, owner="abc"[i]) for i, jobs in enumerate(counts) for _ in range(jobs)]
    for moment in simulate(FairShare(slice_seconds=SLICE, patience=math.inf), queue, room=seats):
        had = {t.owner: t.owner_device_seconds for t in moment.after if not t.running}
        if len(had) < len(counts):
            break
        assert max(had.values()) - min(had.values()) <= SLICE + 1


def test_fair_share_counts_jobs_that_have_ended() -> None:
    queue = [Load(seconds=SLICE, owner="a") for _ in range(6)] + [Load(seconds=3 * SLICE, owner="b")] * 2
    moments = list(simulate(FairShare(slice_seconds=SLICE), queue, room=1))
    owners = [moment.running[0].owner for moment in moments][:: int(SLICE)]
    assert all(Counter(owners[: 2 * k])["a"] == k for k in range(1, 6)), owners


STREAMS = {
    "priority": ([Load(seconds=3)], Load(seconds=5, priority=-1), Load(seconds=2, priority=3)),
    "shortest": ([Load(seconds=3)], Load(seconds=50), Load(seconds=2)),
    "fifo": ([Load(seconds=s) for s in (2, 3, 4)], Load(seconds=5, bytes=3), Load(seconds=4)),
}
"""A job that runs first; one that waits; and those that come every second and go before it, or leave it no room."""


def rides_of_the_job_that_waits(policy: Policy, name: str) -> list[float]:
    """The moments when it joins."""
    ahead, late, other = STREAMS[name]
    stream = [replace(other, arrives=float(second)) for second in range(1, 201)]
    queue = [*ahead, replace(late, arrives=1.0), *stream]
    moments = takewhile(lambda m: m.now <= 200, simulate(policy, queue, room=len(ahead)))
    return [moment.now for moment in moments if len(ahead) in moment.admission.join]


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_that_goes_before_it_starves_nobody(name: str) -> None:
    ahead, late, _ = STREAMS[name]
    first, *_ = rides_of_the_job_that_waits(POLICIES[name](patience=20.0), name)
    assert 20 < first - late.arrives - 1 <= (len(ahead) + 2) * (20.0 + 10.0)


@pytest.mark.parametrize("name", STREAMS)
def test_without_patience_the_same_streams_would(name: str) -> None:
    assert rides_of_the_job_that_waits(POLICIES[name](patience=math.inf), name) == []


def test_ageing_leaves_the_policy_in_force_on_a_long_queue() -> None:
    """One job of large priority and many others for one place: ageing takes a slice in each `patience` seconds."""
    policy = Priority(slice_seconds=2.0, patience=10.0)
    queue = [Load(seconds=900, priority=1), *(Load(seconds=900, arrives=float(i)) for i in range(15))]
    moments = takewhile(lambda m: m.now < 800, simulate(policy, queue, room=1))
    had = Counter(t.index for moment in moments for t in moment.running)
    assert len(had) == 16, "all of them run"
    assert had[0] >= 800 * (1 - 2 / 10)


@pytest.mark.parametrize("name", POLICIES)
def test_ours_keep_the_contract(name: str) -> None:
    policy = policy_for(name)
    assert policy.name == name and type(policy) is POLICIES[name] and policy_for(policy) is policy
    check_policy(policy)


class Own(Policy):
    """Smallest first."""

    def order(self, tickets: Sequence[Ticket], now: float) -> list[Ticket]:
        return sorted(tickets, key=lambda t: t.bytes)


class Twice(Policy):
    def order(self, tickets: Sequence[Ticket], now: float) -> list[Ticket]:
        return [*tickets, *tickets[:1]]


class InPlace(Policy):
    def order(self, tickets: Sequence[Ticket], now: float) -> list[Ticket]:
        assert isinstance(tickets, list)
        tickets.sort(key=lambda t: t.bytes)
        return tickets


class Moody(Policy):
    calls = count()

    def order(self, tickets: Sequence[Ticket], now: float) -> list[Ticket]:
        return list(tickets) if next(self.calls) % 2 else list(reversed(tickets))


class Impatient(Policy):
    """Would have its decision taken back at once, if slices could end at once."""

    def order(self, tickets: Sequence[Ticket], now: float) -> list[Ticket]:
        return sorted(tickets, key=lambda t: t.running)


def test_contract_of_a_users_own_policy() -> None:
    check_policy(Own())
    assert Own(patience=5).name == "Own" and not Own().preempts
    assert Own(slice_seconds=5).preempts
    check_policy(Own(slice_seconds=5, patience=math.inf))
    for policy, line in (
        (Twice(), "each must come once"),
        (InPlace(), "changed the list"),
        (Moody(), "gave different results"),
        (Impatient(slice_seconds=5), "decides differently"),
        ("fifo", "not a shoal.Policy"),
    ):
        with pytest.raises(AssertionError, match=line):
            check_policy(policy)  # type: ignore[arg-type]


def test_mistakes() -> None:
    with pytest.raises(JobError, match=r"policy is 'fifoo'; use one of 'fifo', 'priority'.*'fair', or a shoal\.Policy"):
        policy_for("fifoo")
    for wrong in (None, 3, Fifo, ["fifo"]):
        with pytest.raises(ValueError, match="policy is"):
            policy_for(wrong)  # type: ignore[arg-type]
    for value in (0, -1.0, math.nan, "5"):
        with pytest.raises(JobError, match=f"patience of policy 'fifo' is {value!r}; use seconds"):
            Fifo(patience=value)  # type: ignore[arg-type]
    for value in (0, -1.0, math.nan, math.inf, "5"):
        with pytest.raises(JobError, match=f"slice_seconds of policy 'priority' is {value!r}; use seconds"):
            Priority(slice_seconds=value)  # type: ignore[arg-type]
    for kind in (RoundRobin, FairShare):
        with pytest.raises(JobError, match=r"slice_seconds of policy .* is None; it shares time in slices"):
            kind(slice_seconds=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="does not fit into 3 bytes"):
        next(simulate(Fifo(), [Load(seconds=1, bytes=4)], room=3))
