"""One pass over a DataLoader for all members that are at the same epoch of it.

All generators that the pass may use are seeded when it begins: the global ones of torch, numpy and Python, and those
that the loader reaches. Between its reads their states are saved and restored. So what it reads depends only on the
seed and the epoch, and no other random stream is affected.
"""

from __future__ import annotations

import math
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numpy as np
import torch

from shoal.data._items import seed_generator, word
from shoal.data._loader import Loader
from shoal.errors import ReadError, describe
from shoal.utils.gpu_randomness import uncounted
from shoal.utils.locks import one_at_a_time
from shoal.utils.random_state import Generator, get_state, restored, set_state

MOST_AHEAD = 24
"""The most batches that are kept for slower readers; a reader that is further behind reads by itself."""
HELD_BACK = 2
"""Batches that are kept after all have read them, since a member that leaves its unit repeats its last one."""
EARLIER = 2.0
"""How many times as early as seems necessary an epoch begins, since its first batches take a while too."""
GLOBAL = 3
"""The number of generators at the start of a loader's list that are global: those of torch, numpy and Python."""


class Reading:
    """The batches of one epoch, each read once and kept until the slowest reader has read it."""

    def __init__(self, loader: Loader, seed: int, epoch: int) -> None:
        self.loader, self.seed, self.epoch = loader, seed, epoch
        self.first = 0
        """The position in the epoch of the first batch that is kept."""
        self.readers: weakref.WeakSet[Reader] = weakref.WeakSet()
        self._pid = os.getpid()
        self._held: deque[Any] = deque()
        self._end: int | None = None
        self._error: ReadError | None = None
        """The error that reading the next batch raised; every reader gets it when it arrives there."""
        self._batches: Iterator[Any] | None = None
        self._closed = False
        self._first_read = 0.0
        """When the first batch had been read."""
        self._states = self._first_states()

    def _first_states(self) -> list[Any]:
        """Return the states of all generators at the beginning of the epoch."""
        states: list[Any] = []
        with one_at_a_time, restored(self.loader.generators):
            for i, generator in enumerate(self.loader.generators):
                salt = () if i < GLOBAL else (i, _first_seed(generator))
                seed_generator(generator, word(self.seed, self.epoch, *salt))
                states.append(get_state(generator))
        return states

    @property
    def usable(self) -> bool:
        """Whether it can be read in this process: an iterator with workers belongs to the process that started them."""
        return self._pid == os.getpid() and not self._closed

    def holds(self, place: int) -> bool:
        """Return whether the batch at this position is available without reading the epoch again or keeping many
        batches."""
        return self.usable and self.first <= place <= self.first + len(self._held) + MOST_AHEAD

    def count(self, place: int, most: int) -> int:
        """Return how many batches there are from this position on, up to `most`; one that cannot be read counts."""
        while self._end is None and self._error is None and self.first + len(self._held) < place + most:
            self._read()
        known_end = self.first + len(self._held) + (self._error is not None)
        return max(0, min(most, known_end - place))

    def get(self, place: int) -> Any:
        """Return the batch at this position, which is kept or comes next."""
        if self.count(place, 1) == 0:
            raise StopIteration
        if place - self.first >= len(self._held):
            assert self._error is not None
            raise self._error
        return self._held[place - self.first]

    def let_go(self) -> None:
        """Drop batches that all readers have read, or that only a reader far behind has not."""
        slowest = min((reader.place for reader in self.readers), default=self.first)
        while self._held and (self.first < slowest - HELD_BACK or len(self._held) > MOST_AHEAD):
            self._held.popleft()
            self.first += 1

    def skip_to(self, place: int) -> None:
        """Read up to this position, and drop what comes before it."""
        while self.first < place and self.count(self.first, 1) and self._held:
            self._held.popleft()
            self.first += 1

    @property
    def workers(self) -> list[int]:
        """The ids of the loader's worker processes."""
        return [worker.pid for worker in getattr(self._batches, "_workers", ())]

    @property
    def batches_while_starting(self) -> int:
        """How many batches are read in the time in which a launcher starts workers; 0 if unknown."""
        waits: list[float | None] = [
            getattr(worker, "seconds", None) for worker in getattr(self._batches, "_workers", ())
        ]
        count, passed = self.first + len(self._held) - 1, time.monotonic() - self._first_read
        known = [wait for wait in waits if wait is not None]
        if not known or len(known) < len(waits) or count < 1 or passed <= 0:
            return 0
        return math.ceil(EARLIER * max(known) * count / passed)

    def begin(self) -> None:
        """Start the loader's workers, which begin to read, before the first batch is wanted.

        If that fails, its readers get another reading, which tries again when they want a batch.
        """
        if self._batches is not None or not self.usable or self.first or self._held or self._error is not None:
            return
        try:
            with self._own_generators():
                self._batches = self.loader.begin(self.epoch)
        except Exception:
            self.close()

    def close(self) -> None:
        """End the loader's workers. Readers that are not at the end get another reading."""
        self._closed = True
        self._end_workers()

    def _end_workers(self) -> None:
        batches, self._batches = self._batches, None
        shut_down = getattr(batches, "_shutdown_workers", None)
        if self._pid != os.getpid() and batches is not None:
            _FORGOTTEN.append(batches)
        elif callable(shut_down):
            with suppress(Exception):
                shut_down()

    def _read(self) -> None:
        try:
            with self._own_generators():
                if self._batches is None:
                    self._batches = self.loader.begin(self.epoch)
                batch = next(self._batches, _END)
        except Exception as error:
            if self._starts_again():
                return self._read()
            position = f"batch {self.first + len(self._held) + 1} of epoch {self.epoch + 1}"
            self._error = ReadError(f"reading {position} of {self.loader.what} raised {_last_line(error)}")
            self._error.__cause__ = error
            self._end_workers()
            return
        if batch is not _END:
            self._first_read = self._first_read or time.monotonic()
            self._held.append(self.loader.move(batch))
        elif self.first + len(self._held):
            self._end, self._batches = self.first + len(self._held), None
        else:
            self._error = ReadError(
                f"{self.loader.what} gave no batch in epoch {self.epoch + 1}; it must give some each time it is read"
            )

    def _starts_again(self) -> bool:
        """If a launcher could not start a worker, begin the epoch without it, up to the same position, and return
        True."""
        if not any(getattr(worker, "failed_to_start", False) for worker in getattr(self._batches, "_workers", ())):
            return False
        self._end_workers()
        self.loader.avoid_launching()
        self._states = self._first_states()
        with suppress(Exception), self._own_generators():  # what raises does so again at the next batch
            self._batches = self.loader.begin(self.epoch)
            for _ in range(self.first + len(self._held)):
                next(self._batches)
        return True

    @contextmanager
    def _own_generators(self) -> Iterator[None]:
        """Set all generators that reading may use to the states of this reading inside this context."""
        generators = self.loader.generators
        with one_at_a_time, uncounted(), torch.enable_grad(), restored(generators), ExitStack() as stack:
            for device in {"cpu", self.loader.device.type}:
                stack.enter_context(torch.autocast(device, enabled=False))
            for generator, state in zip(generators, self._states, strict=True):
                set_state(generator, state)
            try:
                yield
            finally:
                self._states = [get_state(generator) for generator in generators]


_END = object()
_FORGOTTEN: list[Any] = []
"""Iterators of another process, kept alive so that this process does not clean up their workers."""


class Reader(Iterator[Any]):
    """One reader's position in an epoch. A reader that is too far behind the others gets its own reading."""

    def __init__(self, open: Callable[[int], Reading], place: int) -> None:
        """Start at batch `place`. `open` returns a reading that has the batch at a position."""
        self._open, self.place = open, place
        self.reading = open(place)
        self.reading.readers.add(self)
        self.last = math.inf
        """How many batches of the epoch are read when the next epoch begins, if it may begin before this one ends."""
        self.open_next: Callable[[], Reader] | None = None
        """Returns a reader of the next epoch."""
        self.next: Reader | None = None
        """The reader of the next epoch, whose workers have been started."""

    def _follow(self) -> Reading:
        if not self.reading.holds(self.place):
            self.reading.readers.discard(self)
            self.reading = self._open(self.place)
            self.reading.readers.add(self)
        return self.reading

    def count(self, most: int) -> int:
        """Return how many batches are left for it, up to `most`; one that cannot be read counts."""
        return self._follow().count(self.place, most)

    def __next__(self) -> Any:
        batch = self._follow().get(self.place)
        self.place += 1
        self.reading.let_go()
        if self.open_next is not None and self.place >= self.last - self.reading.batches_while_starting:
            self._begin_next(self.open_next, batch)
        return batch

    def _begin_next(self, open_next: Callable[[], Reader], batch: Any) -> None:
        """Start the workers of the next epoch, so that they start while those of this one read its last batches."""
        self.open_next = None
        if self.reading.loader.has_room(batch, self.reading.workers):
            self.next = open_next()
            self.next.reading.begin()


def _first_seed(generator: Generator) -> int:
    """Return the seed that a user gave a generator, if it can be known. Drawing numbers does not change it."""
    if isinstance(generator, torch.Generator):
        return generator.initial_seed()
    if isinstance(generator, np.random.Generator):
        entropy = getattr(getattr(generator.bit_generator, "seed_seq", None), "entropy", None)
        if isinstance(entropy, int) and entropy < 1 << 64:  # otherwise it was drawn by the system
            return entropy
    return 0


def _last_line(error: Exception) -> str:
    """Return the error's message, without the traceback that an error from a worker contains."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and "Caught " in lines[0]:
        return lines[-1].strip()
    return describe(error)
