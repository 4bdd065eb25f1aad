"""How many of torch's threads steps on a CPU use: one, or all where that is faster now.

On busy cores several threads wait for each other at every operator: the last of them may get its core only after
milliseconds. A step then takes tens of times as long as with one thread, and cannot be interrupted. So a small operator
is timed first, which shows whether the cores are busy.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from shoal.engine.tiers.unit import Unit

SMALL_SECONDS = 2e-3
"""A batch that takes less time gains nothing from threads."""
LONG_SECONDS = 2e-2
"""A batch that takes more time is long enough for threads, although the first batch is slower than others."""
TRIES = 4
"""Batches that are timed with several threads, in turns with batches of one thread; the first of each is slower."""
BETTER, WORSE = 0.9, 2.0
"""Several threads are used below `BETTER` times the seconds of one thread, and given up at once above `WORSE` times."""
AGAIN_SECONDS, AGAIN_FACTOR = 10.0, 20.0
"""The threads are tried again after so many seconds, since the load of the machine changes, but at the earliest after
so many times the seconds of a batch for which they were given up."""
PIECE_SECONDS = 0.05
"""Several threads run batches in pieces that should take so many seconds with one, so that they can be given up."""
NUMBERS = 65536
"""Each thread's share of the small operator, more than torch gives to a single thread."""
PROBE_SECONDS, PROBES = 0.02, 5
"""The small operator is called for so many seconds with several threads, longer than a thread keeps its core, and so
many times with one."""
WAITING = 2.0
"""The cores are busy if the small operator takes so many times as long with several threads as with one."""


def busy(threads: int) -> bool:
    """Return whether so many of torch's threads would wait for each other now, since others use the cores."""
    numbers = torch.zeros(threads * NUMBERS, dtype=torch.float32, device="cpu")
    _operator_seconds(numbers, threads)  # starts the threads
    one = min(_operator_seconds(numbers, 1, calls=PROBES))
    several = _operator_seconds(numbers, threads, seconds=PROBE_SECONDS)
    return sum(several) > WAITING * one * len(several)


def threads_to_time(device: torch.device) -> int | None:
    """Return the number of torch's threads with which to time steps on a CPU; None on a GPU.

    It is one if the cores are busy: several threads would wait for each other, and a small operator could take a
    thousand times as long.
    """
    if device.type != "cpu":
        return None
    threads = torch.get_num_threads()
    return 1 if threads > 1 and busy(threads) else threads


def _operator_seconds(numbers: torch.Tensor, threads: int, calls: int = 1, seconds: float = 0.0) -> list[float]:
    """Time calls of a small operator: at least so many, and until so many seconds have passed."""
    before, times = torch.get_num_threads(), list[float]()
    torch.set_num_threads(threads)
    try:
        end = perf_counter() + seconds
        while len(times) < calls or perf_counter() < end:
            start = perf_counter()
            numbers.add_(1)
            times.append(perf_counter() - start)
    finally:
        torch.set_num_threads(before)
    return times


class Threads:
    """Chooses how many of torch's threads a unit's steps use: one, or all if that is faster."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._begin()

    def _begin(self) -> None:
        self._several: bool | None = None
        """Whether several threads are faster; None: not known yet."""
        self._one_seconds: list[float] = []
        self._several_seconds: list[float] = []
        self._until = perf_counter() + AGAIN_SECONDS

    def run(self, unit: Unit, batches: int) -> None:
        """Call `unit.run` with the best number of threads. While that is not known, its first batches are timed."""
        if perf_counter() > self._until:
            self._begin()
        done = 0
        while done < batches and not (done and unit.failures()):
            if self._several is None:
                self._try(unit)
                done += 1
            elif self._several:
                done += self._run_several(unit, batches - done)
            else:
                self._timed(unit, batches - done, 1)
                done = batches

    def _try(self, unit: Unit) -> None:
        """Run one batch with one thread or with several, and decide as soon as enough is known.

        One batch of one thread, or two where it was short, show whether steps are long enough for several. Busy cores
        are not tried.
        """
        one, several = self._one_seconds, self._several_seconds
        first = 1 if one and one[0] > LONG_SECONDS else 2
        if len(one) < len(several) + first:
            one.append(self._timed(unit, 1, 1))
            known = len(one) == 2 or (len(one) == 1 and one[0] > LONG_SECONDS)
            if not several and known and (min(one) < SMALL_SECONDS or busy(self._most)):
                self._several = False
            return
        several.append(self._timed(unit, 1, self._most))
        if several[-1] > WORSE * min(one):
            self._several = False
            self._until = perf_counter() + max(AGAIN_SECONDS, AGAIN_FACTOR * several[-1])
        elif len(several) == TRIES:
            self._several = min(several) < BETTER * min(one)

    def _run_several(self, unit: Unit, batches: int) -> int:
        """Run batches with several threads, and stop when they have taken the time that all would take with one; return
        how many were run."""
        one = min(self._one_seconds)
        done, seconds, piece = 0, 0.0, max(1, int(PIECE_SECONDS / one))
        while done < batches and seconds < batches * one and not (done and unit.failures()):
            count = min(piece, batches - done)
            seconds += self._timed(unit, count, self._most)
            done += count
        self._several = seconds < done * one
        return done

    @staticmethod
    def _timed(unit: Unit, batches: int, threads: int) -> float:
        torch.set_num_threads(threads)
        start = perf_counter()
        try:
            unit.run(batches)
        finally:
            torch.set_num_threads(1)
        return perf_counter() - start
