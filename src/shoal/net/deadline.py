"""How long a worker may take, learned from earlier rounds and from the workers that have finished this one."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from shoal.errors import SplitError

REMEMBERED = 50
"""How many times of the last rounds are used."""


@dataclass(kw_only=True, slots=True)
class Deadline:
    """The largest number of seconds that a worker may take for a round, transfers included.

    >>> deadline = Deadline()
    >>> deadline.observe("a", 10.0)
    >>> deadline.limit("b")
    32.0
    """

    fixed: float | None = None
    """A fixed limit; None derives it from measured times."""
    factor: float = 3.0
    """The limit is this factor times the median of the measured times."""
    margin: float = 2.0
    """Seconds added to the limit."""
    first: float = 300.0
    """The limit while nothing has been measured."""
    _times: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _latest: dict[str, float] = field(default_factory=dict)
    _misses: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.fixed is not None and not self.fixed > 0:
            raise SplitError(f"deadline is {self.fixed!r}; use seconds above 0, or None to have it measured")

    def observe(self, worker: str, seconds: float) -> None:
        """Record that a worker has finished a round in this many seconds."""
        self._times.append(seconds)
        self._latest[worker] = seconds
        self._misses.pop(worker, None)

    def missed(self, worker: str) -> None:
        """Record that a worker was too late, and double its limit, so that a slow worker is not excluded forever."""
        self._misses[worker] = min(self._misses.get(worker, 0) + 1, 6)

    def limit(self, worker: str, finished: Sequence[float] = ()) -> float:
        """Return the limit in seconds from the beginning of the round.

        Args:
            finished: The seconds of workers that have finished this round already.
        """
        if self.fixed is not None:
            return self.fixed
        times = [*self._times, *finished]
        if not times:
            return self.first
        expected = max(median(times), self._latest.get(worker, 0.0))
        return (self.factor * expected + self.margin) * float(1 << self._misses.get(worker, 0))
