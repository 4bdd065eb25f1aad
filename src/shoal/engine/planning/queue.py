"""Which jobs join now, and which are sent back to wait: a policy's order and what fits, made into a decision. Pure.

Three rules hold under every policy, a user's own too:

1. A job runs for at least `slice_seconds` (without: to its end), so that places are not taken back and forth.
2. Ageing. A job that has waited `patience` seconds for each of the jobs that were there when its wait began goes before
   all that began to wait later. No job that comes afterwards changes that number or goes before it, so with n jobs
   there it waits at most n * (patience + r), where r is the longest that others keep their places: a slice, or without
   slices the longest job. Since the number counts, the policy stays in force on a long queue: of n waiting jobs, one
   each `patience` seconds goes out of the policy's order, however large n is.
3. Reserve. Smaller jobs may fill the room beside one that does not fit, until it has waited `patience` seconds. From
   then on no job after it joins, and it has its place as soon as enough others have left.
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
"""Whether these jobs can run together; fewer of them must then fit too."""


@dataclass(frozen=True, slots=True)
class Admission:
    """A decision, as indices of jobs, the first in order first."""

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
        """A job arrives."""
        assert ticket.index not in self._tickets
        self._owners[ticket.owner] += ticket.device_seconds
        self._tickets[ticket.index] = ticket
        self.move(ticket.index, running=ticket.running, now=ticket.since)

    def admit(self, fits: Fits, now: float) -> Admission:
        """Decide which jobs run from now on, and note it."""
        admission = admit(self.tickets, self.policy, fits, now)
        for index in admission.leave:
            self.move(index, running=False, now=now)
        for index in admission.join:
            self.move(index, running=True, now=now)
        return admission

    def move(self, index: int, *, running: bool, now: float) -> None:
        """A job joins, or is sent back to wait."""
        self._turn += 1
        self._tickets[index] = replace(self._tickets[index], running=running, since=now, turn=self._turn)

    def add_device_time(self, index: int, seconds: float, left: float) -> None:
        """A job had so much device time, and has so much left as far as is known."""
        ticket = self._tickets[index]
        self._owners[ticket.owner] += seconds
        self._tickets[index] = replace(ticket, device_seconds=ticket.device_seconds + seconds, seconds=left)

    def remove(self, index: int) -> None:
        """A job has ended."""
        del self._tickets[index]


def admit(tickets: Sequence[Ticket], policy: Policy, fits: Fits, now: float) -> Admission:
    """Which of the unfinished jobs run from now on.

    What runs after the decision always fits, even where what ran before does not fit any more. A job that does not
    fit alone is passed over.
    """
    if fits(list(tickets)):
        fits = _always  # fewer of them fit, too
    chosen: list[Ticket] = []
    held = False
    order = ranked(tickets, policy, now)
    for t in order:
        if held and not t.running:
            continue
        if fits([*chosen, t]):
            chosen.append(t)
        elif not t.running and now - t.since > policy.patience:
            held = fits([t])
    running = {t.index for t in chosen}
    return Admission(
        join=[t.index for t in chosen if not t.running],
        leave=[t.index for t in order if t.running and t.index not in running],
    )


def _always(tickets: list[Ticket]) -> bool:
    return True


def ranked(tickets: Sequence[Ticket], policy: Policy, now: float) -> list[Ticket]:
    """Those that must not be sent back yet, then those that have waited too long, then the policy's order."""
    came = sorted(tickets, key=lambda t: (t.arrived, t.index))
    order = policy.order(came, now)
    if sorted(t.index for t in order) != sorted(t.index for t in came):
        raise JobError(
            f"policy {policy.name!r} gave {len(order)} tickets back for {len(came)}, or other ones; "
            "its order must hold each once: try shoal.testing.check_policy"
        )
    arrivals = [t.arrived for t in came]

    def rank(t: Ticket) -> tuple[int, float]:
        spent = now - t.since
        if t.running:
            return (0, 0.0) if policy.slice_seconds is None or spent < policy.slice_seconds else (2, 0.0)
        return (1, t.since) if spent > policy.patience * bisect_right(arrivals, t.since) else (2, 0.0)

    return sorted(order, key=rank)


class MemberLimit:
    """How many members may run at once after memory was full.

    The limit is about the kinds of jobs that filled the memory. When the last of them has ended it is lifted: what was
    wrong about their bytes says nothing about those of others.

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
        """From now on at most so many, since jobs of these kinds did not fit."""
        self.most = min(self.most, most)
        self._kinds |= set(kinds)

    def lift(self, kinds: Collection[str]) -> None:
        """Forget the limit, unless jobs of a kind that did not fit are among these, which are left."""
        if self._kinds.isdisjoint(kinds):
            self.forget()

    def forget(self) -> None:
        """No limit again."""
        self.most, self._kinds = math.inf, set()
