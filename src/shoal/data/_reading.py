"""One pass over a DataLoader for all members that are at the same epoch of it.

All generators that the pass may use are seeded when it begins: the global ones of torch, numpy and Python, and those
that the loader reaches. Between its reads their states are saved and restored. So what it reads depends only on the
seed and the epoch, and no other random stream is affected.
"""

from __future__ import annotations

import copy
import math
import os
import shutil
import signal
import warnings
import weakref
from collections import UserDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)  # fmt: skip

from shoal.data._items import generators_of, seed_generator, word
from shoal.errors import ReadError, describe
from shoal.utils.gpu_randomness import uncounted
from shoal.utils.locks import one_at_a_time
from shoal.utils.random_state import NUMPY, PYTHON, Generator, get_state, restored, set_state

MOST_AHEAD = 24
"""The most batches that are kept for slower readers; a reader that is further behind reads by itself."""
HELD_BACK = 2
"""Batches that are kept after all have read them, since a member that leaves its unit repeats its last one."""
SAMPLERS = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Samplers that keep nothing from one epoch to the next but their generators."""
SHARED_MEMORY = "/dev/shm"
"""Where workers put their batches."""
GLOBAL = 3
"""The number of generators at the start of a loader's list that are global: those of torch, numpy and Python."""


class Loader:
    """A DataLoader, with what is needed to read it."""

    def __init__(self, loader: DataLoader[Any], device: torch.device, what: str) -> None:
        self.loader, self.device, self.what = loader, device, what
        self.parts = [*_parts(loader), loader.collate_fn]
        own_generators = generators_of(loader, *self.parts)
        self.generators: list[Generator] = [torch.default_generator, NUMPY, PYTHON, *own_generators]
        self.free_memory: Callable[[], float] = lambda: math.inf
        """Returns how many bytes of memory are free, as far as that is known."""
        self._worker_bytes: int | None = None

    def begin(self, epoch: int) -> Iterator[Any]:
        """Start to iterate over it."""
        loader, pins = self.loader, self.loader.pin_memory and self.device.type != "cpu"
        if loader.persistent_workers or loader.pin_memory != pins:
            # persistent workers would continue with the random states of the previous epoch; pinning memory would use
            # the GPU, which this process may have to avoid: see `engine/runtime/guard.py`
            loader = copy.copy(loader)
            loader.__dict__.update(persistent_workers=False, _iterator=None, pin_memory=pins)
        for part in _parts(loader):
            set_epoch = getattr(part, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
        with _without_interrupts(), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # other threads exist; workers use nothing of theirs
            return iter(loader)

    @property
    def may_overlap(self) -> bool:
        """Whether an epoch may begin while the one before it is read: it has workers, and beginning it changes nothing
        but generators."""
        loader = self.loader
        batches = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
        order = batches.sampler if type(batches) is BatchSampler else batches
        return (
            loader.num_workers > 0
            and not isinstance(loader.dataset, IterableDataset)
            and type(order) in SAMPLERS
            and not any(hasattr(part, "set_epoch") for part in self.parts)
            and all(getattr(type(loader), name) is getattr(DataLoader, name) for name in ("__iter__", "_get_iterator"))
        )

    @property
    def most_waiting(self) -> int:
        """The most batches that its workers have been asked for, or have ready."""
        return self.loader.num_workers * (self.loader.prefetch_factor or 0)

    def has_room(self, batch: Any, workers: Sequence[int]) -> bool:
        """Return whether there is memory for the workers of two epochs, and for their batches, if all are like this.

        Args:
            workers: Ids of the processes of one epoch. Their memory is looked at once, since that takes a while.
        """
        if self._worker_bytes is None:
            self._worker_bytes = sum(map(_own_memory, workers))
        if self.free_memory() < 2 * self._worker_bytes:
            return False
        size = sum(leaf.nbytes for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor))
        try:
            return shutil.disk_usage(SHARED_MEMORY).free > 2 * self.most_waiting * size
        except OSError:
            return True

    def move(self, batch: Any) -> Any:
        """Return the batch on the device."""
        _register_user_dict(batch)
        return batch if self.device.type == "cpu" else pytree.tree_map(self._move, batch)

    def _move(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(self.device, non_blocking=True)
        return leaf.to(self.device) if callable(getattr(leaf, "to", None)) else leaf


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
        self._states: list[Any] = []
        with one_at_a_time, restored(loader.generators):
            for i, generator in enumerate(loader.generators):
                salt = () if i < GLOBAL else (i, _first_seed(generator))
                seed_generator(generator, word(seed, epoch, *salt))
                self._states.append(get_state(generator))

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
            position = f"batch {self.first + len(self._held) + 1} of epoch {self.epoch + 1}"
            self._error = ReadError(f"reading {position} of {self.loader.what} raised {_last_line(error)}")
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
        if self.open_next is not None and self.place >= self.last:
            self._begin_next(self.open_next, batch)
        return batch

    def _begin_next(self, open_next: Callable[[], Reader], batch: Any) -> None:
        """Start the workers of the next epoch, so that they start while those of this one read the last batches."""
        self.open_next = None
        if self.reading.loader.has_room(batch, self.reading.workers):
            self.next = open_next()
            self.next.reading.begin()


def _parts(loader: DataLoader[Any]) -> Iterator[Any]:
    """Yield the parts of a loader that may have `set_epoch`, as a DistributedSampler has."""
    sampler: Any = getattr(loader, "sampler", None)
    batches: Any = getattr(loader, "batch_sampler", None)
    inner = getattr(batches, "sampler", None)
    yield from {id(part): part for part in (sampler, batches, inner, loader.dataset) if part is not None}.values()


def _own_memory(process: int) -> int:
    """Return the bytes of memory that a process does not share with the one that forked it; 0 if unknown."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))
    except (OSError, ValueError, IndexError):
        return 0


def _first_seed(generator: Generator) -> int:
    """Return the seed that a user gave a generator, if it can be known. Drawing numbers does not change it."""
    if isinstance(generator, torch.Generator):
        return generator.initial_seed()
    if isinstance(generator, np.random.Generator):
        entropy = getattr(getattr(generator.bit_generator, "seed_seq", None), "entropy", None)
        if isinstance(entropy, int) and entropy < 1 << 64:  # otherwise it was drawn by the system
            return entropy
    return 0


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Start processes inside this context that ignore Ctrl-C, which a terminal sends to all: the run ends its turn
    first, and then them."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)


def _last_line(error: Exception) -> str:
    """Return the error's message, without the traceback that an error from a worker contains."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and "Caught " in lines[0]:
        return lines[-1].strip()
    return describe(error)


def _register_user_dict(batch: Any) -> None:
    """Register a UserDict as a pytree, which collate functions of tokenizers return."""
    kind = type(batch)
    if isinstance(batch, UserDict) and kind not in pytree.SUPPORTED_NODES:
        pytree.register_pytree_node(
            kind,
            lambda batch: (list(batch.values()), list(batch.keys())),
            lambda values, keys: kind(dict(zip(keys, values, strict=True))),
        )
