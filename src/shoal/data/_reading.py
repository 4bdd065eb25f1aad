"""One pass over a DataLoader, for all that are at the same epoch of it.

Everything that the pass may draw from is seeded when it begins: torch's, numpy's and Python's global generators and
those that the loader reaches itself. In between, it has them in the states in which it left them. So what it reads
depends on the seed and the epoch alone, and no other random stream is moved.
"""

from __future__ import annotations

import copy
import os
import signal
import warnings
import weakref
from collections import UserDict, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from shoal.data._items import generators_of, seed_generator, word
from shoal.errors import ReadError, describe
from shoal.utils.gpu_randomness import uncounted
from shoal.utils.locks import one_at_a_time
from shoal.utils.random_state import NUMPY, PYTHON, Generator, get_state, restored, set_state

MOST_AHEAD = 24
"""Batches that are held for readers that are behind; one that is further behind reads by itself."""
HELD_BACK = 2
"""Batches that are held after all have read them: a member that leaves its unit repeats its last one."""
GLOBAL = 3
"""Generators that come first in a list of a loader's: those of torch, numpy and Python that all share."""


class Loader:
    """A DataLoader, with what is needed to read it."""

    def __init__(self, loader: DataLoader[Any], device: torch.device, what: str) -> None:
        self.loader, self.device, self.what = loader, device, what
        self.parts = [*_parts(loader), loader.collate_fn]
        own = generators_of(loader, *self.parts)
        self.generators: list[Generator] = [torch.default_generator, NUMPY, PYTHON, *own]

    def begin(self, epoch: int) -> Iterator[Any]:
        """Start to iterate it."""
        loader, pins = self.loader, self.loader.pin_memory and self.device.type != "cpu"
        if loader.persistent_workers or loader.pin_memory != pins:
            # workers would continue in the random states that the epoch before left; pinned memory is a GPU's, which
            # this process may not have touched: see `engine/runtime/guard.py`
            loader = copy.copy(loader)
            loader.__dict__.update(persistent_workers=False, _iterator=None, pin_memory=pins)
        for part in _parts(loader):
            set_epoch = getattr(part, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
        with _without_interrupts(), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # other threads exist; workers touch none of theirs
            return iter(loader)

    def move(self, batch: Any) -> Any:
        """The batch on the device."""
        _know(batch)
        return batch if self.device.type == "cpu" else pytree.tree_map(self._move, batch)

    def _move(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(self.device, non_blocking=True)
        return leaf.to(self.device) if callable(getattr(leaf, "to", None)) else leaf


class Reading:
    """The batches of one epoch, each read once and held until the slowest reader has it."""

    def __init__(self, loader: Loader, seed: int, epoch: int) -> None:
        self.loader, self.seed, self.epoch = loader, seed, epoch
        self.first = 0
        """The place in the epoch of the first batch that is held."""
        self.readers: weakref.WeakSet[Reader] = weakref.WeakSet()
        self._pid = os.getpid()
        self._held: deque[Any] = deque()
        self._end: int | None = None
        self._error: ReadError | None = None
        """What reading the next batch raised; every reader sees it when it comes there."""
        self._batches: Iterator[Any] | None = None
        self._closed = False
        self._states: list[Any] = []
        with one_at_a_time, restored(loader.generators):
            for place, generator in enumerate(loader.generators):
                salt = () if place < GLOBAL else (place, _first_seed(generator))
                seed_generator(generator, word(seed, epoch, *salt))
                self._states.append(get_state(generator))

    @property
    def usable(self) -> bool:
        """Whether it can be read from here: an iterator with workers belongs to the process that started them."""
        return self._pid == os.getpid() and not self._closed

    def holds(self, place: int) -> bool:
        """Whether the batch of this place can be had without reading the epoch again, and without holding many."""
        return self.usable and self.first <= place <= self.first + len(self._held) + MOST_AHEAD

    def count(self, place: int, most: int) -> int:
        """How many batches there are from this place on, up to so many; one that cannot be read counts."""
        while self._end is None and self._error is None and self.first + len(self._held) < place + most:
            self._read()
        there = self.first + len(self._held) + (self._error is not None)
        return max(0, min(most, there - place))

    def get(self, place: int) -> Any:
        """The batch of this place, which is held or comes next."""
        if self.count(place, 1) == 0:
            raise StopIteration
        if place - self.first >= len(self._held):
            assert self._error is not None
            raise self._error
        return self._held[place - self.first]

    def let_go(self) -> None:
        """Forget batches that all readers have had, or that only a reader far behind has not."""
        slowest = min((reader.place for reader in self.readers), default=self.first)
        while self._held and (self.first < slowest - HELD_BACK or len(self._held) > MOST_AHEAD):
            self._held.popleft()
            self.first += 1

    def skip_to(self, place: int) -> None:
        """Read up to this place, and forget what comes before it."""
        while self.count(place=self.first, most=1) and self.first < place and self._held:
            self._held.popleft()
            self.first += 1

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
            at = f"batch {self.first + len(self._held) + 1} of epoch {self.epoch + 1}"
            self._error = ReadError(f"reading {at} of {self.loader.what} raised {_last_line(error)}")
            self._error.__cause__ = error
            self._end_workers()
            return
        if batch is not _END:
            self._held.append(self.loader.move(batch))
        elif self.first + len(self._held):
            self._end, self._batches = self.first + len(self._held), None
        else:
            self._error = ReadError(
                f"{self.loader.what} gave no batch in epoch {self.epoch + 1}; it must give some each time it is read"
            )

    @contextmanager
    def _own_generators(self) -> Iterator[None]:
        """Inside, all generators that reading may draw from are where this reading left them."""
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
"""Iterators of another process, which this one must not tidy up: their workers are not its own."""


class Reader(Iterator[Any]):
    """One reader's way through an epoch. One that is too far behind the others gets a reading of its own."""

    def __init__(self, open: Callable[[int], Reading], place: int) -> None:
        """`open` gives a reading that holds a place."""
        self._open, self.place = open, place
        self.reading = open(place)
        self.reading.readers.add(self)

    def _follow(self) -> Reading:
        if not self.reading.holds(self.place):
            self.reading.readers.discard(self)
            self.reading = self._open(self.place)
            self.reading.readers.add(self)
        return self.reading

    def count(self, most: int) -> int:
        """How many batches there are for it, up to so many; one that cannot be read counts."""
        return self._follow().count(self.place, most)

    def __next__(self) -> Any:
        batch = self._follow().get(self.place)
        self.place += 1
        self.reading.let_go()
        return batch


def _parts(loader: DataLoader[Any]) -> Iterator[Any]:
    """What may want to know the epoch, as a DistributedSampler does."""
    sampler: Any = getattr(loader, "sampler", None)
    batches: Any = getattr(loader, "batch_sampler", None)
    inner = getattr(batches, "sampler", None)
    yield from {id(part): part for part in (sampler, batches, inner, loader.dataset) if part is not None}.values()


def _first_seed(generator: Generator) -> int:
    """What a user seeded a generator with, where that can be known. Drawing from it does not change it."""
    if isinstance(generator, torch.Generator):
        return generator.initial_seed()
    if isinstance(generator, np.random.Generator):
        entropy = getattr(getattr(generator.bit_generator, "seed_seq", None), "entropy", None)
        if isinstance(entropy, int) and entropy < 1 << 64:  # else it is the system's
            return entropy
    return 0


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Processes that are started inside never see Ctrl-C, which goes to all in a terminal: the run ends its turn first,
    and then them."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _last_line(error: Exception) -> str:
    """What was raised, without the traceback that an error from a worker has in its message."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and "Caught " in lines[0]:
        return lines[-1].strip()
    return describe(error)


def _know(batch: Any) -> None:
    """Have torch look into a UserDict, as tokenizers' collate functions give."""
    kind = type(batch)
    if isinstance(batch, UserDict) and kind not in pytree.SUPPORTED_NODES:
        pytree.register_pytree_node(
            kind,
            lambda batch: (list(batch.values()), list(batch.keys())),
            lambda values, keys: kind(dict(zip(keys, values, strict=True))),
        )
