"""A DataLoader, with what is needed to iterate over it: its generators, its workers, and the memory for them."""

from __future__ import annotations

import copy
import math
import multiprocessing
import os
import shutil
import signal
import warnings
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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

from shoal.data._items import generators_of
from shoal.data._launcher import Launcher
from shoal.utils.random_state import NUMPY, PYTHON, Generator, Snapshot

SAMPLERS = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Samplers that keep nothing from one epoch to the next but their generators."""
SHARED_MEMORY = "/dev/shm"
"""Where workers put their batches."""


class Loader:
    """A DataLoader, with what is needed to read it."""

    def __init__(self, loader: DataLoader[Any], device: torch.device, what: str) -> None:
        self.loader, self.device, self.what = loader, device, what
        self.parts = [*_parts(loader), loader.collate_fn]
        own_generators = generators_of(loader, *self.parts)
        self.generators: list[Generator] = [torch.default_generator, NUMPY, PYTHON, *own_generators]
        self.free_memory: Callable[[], float] = lambda: math.inf
        """Returns how many bytes of memory are free, as far as that is known."""
        self.launches = False
        """Whether the workers of all epochs may be started by a process that is forked once: what they use does not
        change between epochs."""
        self._launcher: Launcher | None = None
        self._may_launch = True
        """False once a launcher has failed."""
        self._worker_bytes: int | None = None

    def begin(self, epoch: int) -> Iterator[Any]:
        """Start to iterate over it."""
        loader, pins = self.loader, self.loader.pin_memory and self.device.type != "cpu"
        if loader.persistent_workers or loader.pin_memory != pins:
            # persistent workers would continue with the random states of the previous epoch; pinning memory would use
            # the GPU, which this process may have to avoid: see `engine/processes/guard.py`
            loader = copy.copy(loader)
            loader.__dict__.update(persistent_workers=False, _iterator=None, pin_memory=pins)
        for part in _parts(loader):
            set_epoch = getattr(part, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
        with _without_interrupts(), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # other threads exist; workers use nothing of theirs
            launched = self._launched(loader) if self.launches and self._may_launch else None
            return iter(loader) if launched is None else launched

    def _launched(self, loader: DataLoader[Any]) -> Iterator[Any] | None:
        """Start to iterate with workers that a launcher starts; None if that is not possible."""
        context = loader.multiprocessing_context or multiprocessing.get_context()
        if context.get_start_method() != "fork":
            return None
        generators = Snapshot(self.generators)
        try:
            if self._launcher is None or not self._launcher.usable:
                if self.free_memory() < _own_memory(os.getpid()):  # what it may need when this process changes its own
                    return None
                self._launcher = Launcher(loader, self.generators)
            return self._launcher.iterate(copy.copy(loader))
        except Exception:  # no more processes or files, or something that cannot be sent
            generators.restore()
            self.avoid_launching()
            return None

    def avoid_launching(self) -> None:
        """Start workers without a launcher from now on. One that exists stays, since workers of it may be reading."""
        self._may_launch = False

    def stop_launching(self) -> None:
        """End the launcher, and all workers that it has started."""
        self.launches = False
        if self._launcher is not None:
            self._launcher.close()
        self._launcher = None

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
            workers: Ids of the processes of one epoch. The memory of one is looked at once, since that takes a while.
        """
        if self._worker_bytes is None:
            self._worker_bytes = len(workers) * max(map(_own_memory, workers[:1]), default=0)  # they are alike
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


def _register_user_dict(batch: Any) -> None:
    """Register a UserDict as a pytree, which collate functions of tokenizers return."""
    kind = type(batch)
    if isinstance(batch, UserDict) and kind not in pytree.SUPPORTED_NODES:
        pytree.register_pytree_node(
            kind,
            lambda batch: (list(batch.values()), list(batch.keys())),
            lambda values, keys: kind(dict(zip(keys, values, strict=True))),
        )
