"""Which jobs go first where more want to run than there is memory for.

A policy is one function: tickets in, the same tickets out, in the order in which they should have a place. It is pure
and knows nothing of memory, networks or devices. `queue.admit` decides by that order, and keeps what holds under
every policy: no job starves, and no job is sent away right after it joined.
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
    """What a policy may know of an unfinished job. All times are seconds, moments are on one clock."""

    index: int
    """The job's place in its list."""
    name: str = ""
    owner: str = ""
    priority: int = 0
    """Larger goes first."""
    arrived: float
    """The moment it came."""
    since: float
    """The moment it began to wait, or to run: it has waited, or run without a break, for `now - since`."""
    turn: int = 0
    """Counts up whenever any job begins to wait or to run: the order where moments are equal."""
    seconds: float = math.nan
    """Predicted work left; nan: not known."""
    bytes: int = 0
    """Predicted memory."""
    running: bool
    device_seconds: float = 0.0
    """Device time it has had in all."""
    owner_device_seconds: float = 0.0
    """Device time its owner has had, in all jobs, ended ones too."""


@dataclass(frozen=True, kw_only=True)
class Policy(ABC):
    """Which job should run first. A policy of your own has `order`, and other defaults if it likes."""

    slice_seconds: float | None = None
    """A job that runs has its place for this long before another may take it; None: until it ends."""
    patience: float = 600.0
    """Ageing. A job goes before all that began to wait later once it has waited this long for each of the jobs
    that were there when its wait began, itself included. One that should be next but finds no room has room held back
    for it once it has waited this long. `math.inf`: never, so that jobs may starve."""

    def __post_init__(self) -> None:
        length = self.slice_seconds
        if length is not None and not (isinstance(length, (int, float)) and 0 < length < math.inf):
            raise JobError(f"slice_seconds of policy {self.name!r} is {length!r}; use seconds, more than 0")
        if not (isinstance(self.patience, (int, float)) and self.patience > 0):
            raise JobError(f"patience of policy {self.name!r} is {self.patience!r}; use seconds, more than 0")

    @property
    def name(self) -> str:
        """Its short name, such as "fair"; of a policy of your own, its class's name."""
        return next((name for name, kind in POLICIES.items() if kind is type(self)), type(self).__name__)

    @property
    def preempts(self) -> bool:
        """Whether a job that runs may lose its place to another."""
        return self.slice_seconds is not None

    @abstractmethod
    def order(self, tickets: Sequence[Ticket], now: float) -> list[Ticket]:
        """The tickets, those that should run first come first; jobs that run compete with those that wait.

        They are given in the order in which they came, so a stable sort leaves ties to the first that came.
        """


@dataclass(frozen=True, kw_only=True)
class Fifo(Policy):
    """First come, first served."""

    def order(self, tickets: Sequence[Ticket], now: float) -> list[Ticket]:
        return sorted(tickets, key=lambda t: t.arrived)


@dataclass(frozen=True, kw_only=True)
class Priority(Policy):
    """The largest priority first. It takes the place of a smaller one, never of an equal one."""

    slice_seconds: float | None = 10.0

    def order(self, tickets: Sequence[Ticket], now: float) -> list[Ticket]:
        return sorted(tickets, key=lambda t: (-t.priority, not t.running))


@dataclass(frozen=True, kw_only=True)
class ShortestFirst(Policy):
    """The least predicted work left first, then those of which nothing is known.

    With `slice_seconds` a shorter job takes the place of a longer one.
    """

    def order(self, tickets: Sequence[Ticket], now: float) -> list[Ticket]:
        return sorted(tickets, key=lambda t: (math.isnan(t.seconds), t.seconds, not t.running))


@dataclass(frozen=True, kw_only=True)
class Sliced(Policy):
    """A policy that means nothing without slices."""

    slice_seconds: float = 60.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.preempts:
            raise JobError(f"slice_seconds of policy {self.name!r} is None; it shares time in slices: use seconds")


@dataclass(frozen=True, kw_only=True)
class RoundRobin(Sliced):
    """All jobs in turn, a slice each. A job that has used up its slice, or is new, goes to the end of the line."""

    def order(self, tickets: Sequence[Ticket], now: float) -> list[Ticket]:
        def lined_up(t: Ticket) -> float:
            return now - (now - t.since) % self.slice_seconds if t.running else t.since

        # At one moment, those that had another slice were before those that had to leave, and of them the one that
        # began to run later was before the other: the line stays as it was.
        return sorted(tickets, key=lambda t: (lined_up(t), not t.running, -t.since, t.turn))


@dataclass(frozen=True, kw_only=True)
class FairShare(Sliced):
    """The owner who has had the least device time first, each place before in the line counted as one more slice.

    Among the jobs of one owner: first come, first served.
    """

    def order(self, tickets: Sequence[Ticket], now: float) -> list[Ticket]:
        places: Counter[str] = Counter()
        share = {}
        for t in tickets:
            share[t.index] = t.owner_device_seconds + places[t.owner] * self.slice_seconds
            places[t.owner] += 1
        return sorted(tickets, key=lambda t: (share[t.index], not t.running))


POLICIES: dict[str, type[Policy]] = {
    "fifo": Fifo,
    "priority": Priority,
    "shortest": ShortestFirst,
    "round-robin": RoundRobin,
    "fair": FairShare,
}


def policy_for(policy: str | Policy) -> Policy:
    """A policy by its name, or as it is."""
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, str) and policy in POLICIES:
        return POLICIES[policy]()
    raise JobError(f"policy is {policy!r}; use one of {', '.join(map(repr, POLICIES))}, or a shoal.Policy of your own")
