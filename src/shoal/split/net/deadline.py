"""How long a worker may take: learned from the rounds so far, and from the workers that have finished this one."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from shoal.errors import SplitError

REMEMBERED = 50
"""Times of the last rounds that count."""


@dataclass(kw_only=True, slots=True)
class Deadline:
    """The most seconds that a worker may take for a round, transfers included.

    >>> deadline = Deadline()
    >>> deadline.observe("a", 10.0)
    >>> deadline.limit("b")
    32.0
    """

    fixed: float | None = None
    """Always this; None: from what has been measured."""
    factor: float = 3.0
    """Times the median of the measured ones."""
    margin: float = 2.0
    """Seconds on top."""
    first: float = 300.0
    """While nothing has been measured."""
    _times: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _own: dict[str, float] = field(default_factory=dict)
    _misses: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.fixed is not None and not self.fixed > 0:
            raise SplitError(f"deadline is {self.fixed!r}; use seconds above 0, or None to have it measured")

    def observe(self, worker: str, seconds: float) -> None:
        """A worker has finished a round in so many seconds."""
        self._times.append(seconds)
        self._own[worker] = seconds
        self._misses.pop(worker, None)

    def missed(self, worker: str) -> None:
        """A worker was too late: if it returns, it gets twice as long, so that a slow one is not excluded for ever."""
        self._misses[worker] = min(self._misses.get(worker, 0) + 1, 6)

    def limit(self, worker: str, finished: Sequence[float] = ()) -> float:
        """Seconds from the beginning of the round. `finished`: what others have taken for this one already."""
        if self.fixed is not None:
            return self.fixed
        known = [*self._times, *finished]
        if not known:
            return self.first
        usual = max(median(known), self._own.get(worker, 0.0))
        return (self.factor * usual + self.margin) * float(1 << self._misses.get(worker, 0))
