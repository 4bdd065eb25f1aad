"""Decide which jobs start now and which go back to waiting, from the policy's order and from what fits. Pure functions.

Three rules hold under every policy, including a user's own:

1. A job runs for at least `slice_seconds` (without slices: to its end), so that places do not change hands constantly.
2. Ageing. A job that has waited `patience` seconds for each of the jobs that were there when its wait began goes before
   all jobs that began to wait later. No later job changes that number or goes before it, so with n jobs there it waits
   at most n * (patience + r), where r is the longest that others keep their places: a slice, or without slices the
   longest job. On a long queue the policy stays in force: of n waiting jobs, one every `patience` seconds starts out of
   the policy's order, however large n is.
3. Reserve. Smaller jobs may fill the memory beside a job that does not fit, until it has waited `patience` seconds.
   From then on no job after it starts, and it starts as soon as enough others have left.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from shoal.engine.planning.policy import Policy, Ticket
from shoal.errors import JobError

Fits = Callable[[list[Ticket]], bool]
"""Returns whether these jobs can run together. If they fit, any subset must fit too."""


@dataclass(frozen=True, slots=True)
class Admission:
    """A decision, as indices of jobs in order."""

    join: list[int]
    leave: list[int]


class Queue:
    """The tickets of all unfinished jobs."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._tickets: dict[int, Ticket] = {}
        self._owners: defaultdict[str, float] = defaultdict(float)
        self._turn = 0

    def __len__(self) -> int:
        return len(self._tickets)

    @property
    def tickets(self) -> list[Ticket]:
        return [replace(t, owner_device_seconds=self._owners[t.owner]) for t in self._tickets.values()]

    def add(self, ticket: Ticket) -> None:
        """Add a job that has arrived."""
        assert ticket.index not in self._tickets
        self._owners[ticket.owner] += ticket.device_seconds
        self._tickets[ticket.index] = ticket
        self.move(ticket.index, running=ticket.running, now=ticket.since)

    def admit(self, fits: Fits, now: float) -> Admission:
        """Decide which jobs run from now on, and update their tickets."""
        admission = admit(self.tickets, self.policy, fits, now)
        for index in admission.leave:
            self.move(index, running=False, now=now)
        for index in admission.join:
            self.move(index, running=True, now=now)
        return admission

    def move(self, index: int, *, running: bool, now: float) -> None:
        """Note that a job starts to run, or goes back to waiting."""
        self._turn += 1
        self._tickets[index] = replace(self._tickets[index], running=running, since=now, turn=self._turn)

    def add_device_time(self, index: int, seconds: float, seconds_left: float) -> None:
        """Add device time that a job has used, and set how much it is predicted to have left."""
        ticket = self._tickets[index]
        self._owners[ticket.owner] += seconds
        self._tickets[index] = replace(ticket, device_seconds=ticket.device_seconds + seconds, seconds=seconds_left)

    def remove(self, index: int) -> None:
        """Remove a job that has ended."""
        del self._tickets[index]


def admit(tickets: Sequence[Ticket], policy: Policy, fits: Fits, now: float) -> Admission:
    """Decide which of the unfinished jobs run from now on.

    What runs after the decision always fits, even if what ran before it no longer does. A job that does not fit alone
    is skipped.
    """
    if fits(list(tickets)):
        fits = _always  # then any subset fits too
    chosen: list[Ticket] = []
    reserved = False
    order = ranked(tickets, policy, now)
    for t in order:
        if reserved and not t.running:
            continue
        if fits([*chosen, t]):
            chosen.append(t)
        elif not t.running and now - t.since > policy.patience:
            reserved = fits([t])
    running = {t.index for t in chosen}
    return Admission(
        join=[t.index for t in chosen if not t.running],
        leave=[t.index for t in order if t.running and t.index not in running],
    )


def _always(tickets: list[Ticket]) -> bool:
    return True


def ranked(tickets: Sequence[Ticket], policy: Policy, now: float) -> list[Ticket]:
    """Return the jobs in order: those that must not be stopped yet, those that have waited too long, then the policy's
    order."""
    by_arrival = sorted(tickets, key=lambda t: (t.arrived, t.index))
    order = policy.order(by_arrival, now)
    if sorted(t.index for t in order) != sorted(t.index for t in by_arrival):
        raise JobError(
            f"policy {policy.name!r} gave {len(order)} tickets back for {len(by_arrival)}, or other ones; "
            "its order must hold each once: try shoal.testing.check_policy"
        )
    arrivals = [t.arrived for t in by_arrival]

    def rank(t: Ticket) -> tuple[int, float]:
        elapsed = now - t.since
        if t.running:
            return (0, 0.0) if policy.slice_seconds is None or elapsed < policy.slice_seconds else (2, 0.0)
        return (1, t.since) if elapsed > policy.patience * bisect_right(arrivals, t.since) else (2, 0.0)

    return sorted(order, key=rank)


class MemberLimit:
    """The most members that may run at once after memory was full.

    The limit concerns the kinds of jobs that filled the memory. It is lifted when the last of them has ended, since
    wrong predictions for them say nothing about other kinds.

    >>> limit = MemberLimit()
    >>> limit.lower(4, {"wide"}); limit.lift({"narrow", "wide"}); limit.most
    4
    >>> limit.lift({"narrow"}); limit.most
    inf
    """

    def __init__(self) -> None:
        self.most = math.inf
        self._kinds: set[str] = set()

    def lower(self, most: int, kinds: Collection[str]) -> None:
        """Allow at most so many members from now on, since jobs of these kinds did not fit."""
        self.most = min(self.most, most)
        self._kinds |= set(kinds)

    def lift(self, kinds: Collection[str]) -> None:
        """Remove the limit, unless a kind that did not fit is among `kinds`, those of the unfinished jobs."""
        if self._kinds.isdisjoint(kinds):
            self.forget()

    def forget(self) -> None:
        """Remove the limit."""
        self.most, self._kinds = math.inf, set()
