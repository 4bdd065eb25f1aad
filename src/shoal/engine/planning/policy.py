"""Policies: which jobs run first if not all of them fit in memory.

A policy is one pure function that takes tickets and returns them in the order in which they should run. It knows
nothing of memory, networks or devices. `queue.admit` decides by that order, and guarantees under every policy that no
job starves and that no job is stopped right after it started.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.errors import JobError


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """What a policy knows about an unfinished job. All times are in seconds, and all moments are on one clock."""

    index: int
    """The job's index in the list of jobs."""
    name: str = ""
    owner: str = ""
    priority: int = 0
    """Jobs with a larger priority go first."""
    arrived: float
    """The moment at which the job arrived."""
    since: float
    """The moment at which it began to wait or to run: it has waited, or run without a break, for `now - since`."""
    turn: int = 0
    """A counter that increases whenever any job begins to wait or to run. It orders jobs with equal moments."""
    seconds: float = math.nan
    """Predicted seconds of work left; nan if not known."""
    bytes: int = 0
    """Predicted bytes of memory."""
    running: bool
    device_seconds: float = 0.0
    """Device time that the job has used so far."""
    owner_device_seconds: float = 0.0
    """Device time that all jobs of its owner have used, including ended ones."""


@dataclass(frozen=True, kw_only=True)
class Policy(ABC):
    """Decides which jobs run first. Subclasses define `order` and may change the defaults."""

    slice_seconds: float | None = None
    """A running job keeps its place for this long before another job may take it; None: until it ends."""
    patience: float = 600.0
    """Ageing. A job goes before all jobs that began to wait later once it has waited this long for each of the jobs
    that were there when its wait began, itself included. If the next job does not fit, memory is reserved for it once
    it has waited this long. `math.inf`: never, so that jobs may starve."""

    def __post_init__(self) -> None:
        length = self.slice_seconds
        if length is not None and not (isinstance(length, (int, float)) and 0 < length < math.inf):
            raise JobError(f"slice_seconds of policy {self.name!r} is {length!r}; use seconds, more than 0")
        if not (isinstance(self.patience, (int, float)) and self.patience > 0):
            raise JobError(f"patience of policy {self.name!r} is {self.patience!r}; use seconds, more than 0")

    @property
    def name(self) -> str:
        """The policy's short name, such as "fair"; for a user's policy, the name of its class."""
        return next((name for name, kind in POLICIES.items() if kind is type(self)), type(self).__name__)

    @property
    def preempts(self) -> bool:
        """Whether a running job may lose its place to another."""
        return self.slice_seconds is not None

    @abstractmethod
    def order(self, tickets: Sequence[Ticket], now: float) -> list[Ticket]:
        """Return the tickets in the order in which the jobs should run. Running jobs compete with waiting ones.

        The tickets are given in order of arrival, so a stable sort resolves ties in favour of the earlier job.
        """


@dataclass(frozen=True, kw_only=True)
class Fifo(Policy):
    """First come, first served."""

    def order(self, tickets: Sequence[Ticket], now: float) -> list[Ticket]:
        return sorted(tickets, key=lambda t: t.arrived)


@dataclass(frozen=True, kw_only=True)
class Priority(Policy):
    """The largest priority first. A job takes the place of one with a smaller priority, never of one with the same."""

    slice_seconds: float | None = 10.0

    def order(self, tickets: Sequence[Ticket], now: float) -> list[Ticket]:
        return sorted(tickets, key=lambda t: (-t.priority, not t.running))


@dataclass(frozen=True, kw_only=True)
class ShortestFirst(Policy):
    """The job with the least predicted work left runs first; jobs without a prediction run last.

    With `slice_seconds`, a shorter job takes the place of a longer one.
    """

    def order(self, tickets: Sequence[Ticket], now: float) -> list[Ticket]:
        return sorted(tickets, key=lambda t: (math.isnan(t.seconds), t.seconds, not t.running))


@dataclass(frozen=True, kw_only=True)
class Sliced(Policy):
    """A policy that requires slices."""

    slice_seconds: float = 60.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.preempts:
            raise JobError(f"slice_seconds of policy {self.name!r} is None; it shares time in slices: use seconds")


@dataclass(frozen=True, kw_only=True)
class RoundRobin(Sliced):
    """All jobs in turn, one slice each. A job that has used its slice, or is new, goes to the end of the line."""

    def order(self, tickets: Sequence[Ticket], now: float) -> list[Ticket]:
        def lined_up(t: Ticket) -> float:
            return now - (now - t.since) % self.slice_seconds if t.running else t.since

        # Ties keep the order of the line: jobs that got another slice were before those that were stopped, and among
        # them the one that began to run later was before the other.
        return sorted(tickets, key=lambda t: (lined_up(t), not t.running, -t.since, t.turn))


@dataclass(frozen=True, kw_only=True)
class FairShare(Sliced):
    """The job whose owner has used the least device time runs first. Each earlier job of the same owner counts as one
    more slice.

    Jobs of one owner run in order of arrival.
    """

    def order(self, tickets: Sequence[Ticket], now: float) -> list[Ticket]:
        queued: Counter[str] = Counter()
        share = {}
        for t in tickets:
            share[t.index] = t.owner_device_seconds + queued[t.owner] * self.slice_seconds
            queued[t.owner] += 1
        return sorted(tickets, key=lambda t: (share[t.index], not t.running))


POLICIES: dict[str, type[Policy]] = {
    "fifo": Fifo,
    "priority": Priority,
    "shortest": ShortestFirst,
    "round-robin": RoundRobin,
    "fair": FairShare,
}


def policy_for(policy: str | Policy) -> Policy:
    """Return the policy with this name, or `policy` itself if it is a Policy."""
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, str) and policy in POLICIES:
        return POLICIES[policy]()
    raise JobError(f"policy is {policy!r}; use one of {', '.join(map(repr, POLICIES))}, or a shoal.Policy of your own")
