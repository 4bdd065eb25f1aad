"""DataLoaders and IterableDatasets: read as they are, once for all jobs that are at the same place.

An epoch's batches are those that iterating the loader gives after everything random was seeded from the job's data seed
and the epoch. A job that resumes in the middle of an epoch reads it from its beginning up to its place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset

from shoal.data._items import same
from shoal.data._reading import Loader, Reading
from shoal.data._reading import Reader as Reader
from shoal.data.source import Source, as_bytes
from shoal.errors import JobError, ReadError

SAMPLES = 2
"""Batches that are read before training, to see what they are like."""
MOST_KINDS = 16
"""Shapes of batches that are remembered."""
MOST_BYTES = 256 << 20
"""Validation batches up to so many bytes are read once and held."""


_numbers = count()


class LoaderSource(Source):
    """A DataLoader. Its rows are whole batches; `length` is how many it says an epoch has, 0 where it does not say."""

    streamed = True
    batched = True

    def __init__(self, loader: DataLoader[Any], device: torch.device, what: str = "") -> None:
        self.device, self.length = device, _length(loader)
        self.number = next(_numbers)
        """Different for each source of a process."""
        self.loader = Loader(loader, device, what or f"the DataLoader over {type(loader.dataset).__name__}")
        self.note = f"{self.loader.what} is read as training goes"
        self._readings: list[Reading] = []
        self._kinds: list[tuple[Hashable, list[Any]]] = []
        """Shapes of batches, and batches of these shapes."""
        self._held: list[Any] | None = None
        """All batches of a validation, where they are small."""

    def read(self, seed: int, epoch: int, place: int = 0) -> Reader:
        """The epoch's batches from this place on. Readers of one epoch that are close to each other share a reading."""
        return Reader(partial(self._open, seed, epoch), place)

    def _open(self, seed: int, epoch: int, place: int) -> Reading:
        for reading in self._readings:
            if (reading.seed, reading.epoch) == (seed, epoch) and reading.holds(place):
                return reading
        self.release()
        self._readings.append(Reading(self.loader, seed, epoch))
        self._readings[-1].skip_to(place)
        return self._readings[-1]

    def take(self, rows: Tensor, *, seed: int = 0, epoch: int = 0) -> Any:
        """A batch to try things on; not one of a certain place."""
        return self.sample(1, int(rows[0]))

    def sample(self, kind: int, place: int = 0) -> Any:
        """A batch of the kind of this number, the first being 1; another one for another place, where there is one."""
        if not self._kinds:
            self._look()
        batches = self._kinds[kind - 1][1]
        return cloned(batches[place % len(batches)])

    def kind(self, batch: Any) -> int:
        """The number of a batch's kind: its structure, shapes and dtypes. 0: there are too many kinds."""
        shape = _shape(batch)
        for number, (known, batches) in enumerate(self._kinds, 1):
            if known == shape:
                if len(batches) < SAMPLES:
                    batches.append(batch)
                return number
        if len(self._kinds) == MOST_KINDS:
            return 0
        self._kinds.append((shape, [batch]))
        return len(self._kinds)

    def _look(self) -> None:
        """Read the first batches. Workers are ended again: a fork would not get on with them. Without workers it is
        read twice, to see whether that gives the same."""
        reading = Reading(self.loader, 0, 0)
        try:
            for place in range(reading.count(0, SAMPLES)):
                try:
                    self.kind(reading.get(place))
                except ReadError:
                    if not place:
                        raise
        finally:
            reading.close()
        if not self.loader.loader.num_workers:
            again = Reading(self.loader, 0, 0)
            with suppress(ReadError):
                self.steady = same(self._kinds[0][1][0], again.get(0))

    def try_reading(self) -> None:
        """Read a batch and drop it, to see what reading changes."""
        reading = Reading(self.loader, 0, 0)
        reading.count(0, 1)
        reading.close()

    def feed(self, rows: Tensor, batch_size: int, *, seed: int = 0, epoch: int = 0) -> Iterator[Any]:
        """All batches of an epoch, the same each time: how validation reads."""
        if self._held is not None:
            yield from map(cloned, self._held)
            return
        held: list[Any] | None = []
        size = 0
        reading = Reading(self.loader, seed, epoch)
        try:
            for batch in Reader(lambda place: reading, 0):
                size += sum(leaf.nbytes for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor))
                held = [*held, cloned(batch)] if held is not None and size <= MOST_BYTES else None
                yield batch
        finally:
            reading.close()
        self._held = held

    def release(self) -> None:
        unread = [reading for reading in self._readings if not (reading.readers and reading.usable)]
        for reading in unread:
            reading.close()
        self._readings = [reading for reading in self._readings if reading not in unread]

    def close(self) -> None:
        for reading in self._readings:
            reading.close()
        self._readings = []

    def fingerprint(self) -> str:
        """Of what the loader is made of, and of its first batch where that was seen to be the same when it is read
        again. Reading all of it would take too long."""
        first, loader = self.sample(1), self.loader.loader
        digest = hashlib.sha256(" ".join(map(str, describe_loader(loader).items())).encode())
        digest.update(repr(_shape(first)).encode())
        for leaf in pytree.tree_leaves(first) if self.steady and not loader.num_workers else ():
            if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
                digest.update(as_bytes(leaf))
        return f"loader-{digest.hexdigest()[:16]}"


def cloned(batch: Any) -> Any:
    """A copy for one who may write to it."""
    return pytree.tree_map_only(Tensor, Tensor.clone, batch)


def as_loader(
    data: Any, batch_size: int, drop_last: bool, collate: Callable[[list[Any]], Any] | None
) -> DataLoader[Any]:
    """The DataLoader itself, or one over an IterableDataset, by the job's settings."""
    if isinstance(data, DataLoader):
        return data
    return DataLoader(data, batch_size=batch_size, drop_last=drop_last, collate_fn=collate)


def describe_loader(loader: DataLoader[Any]) -> dict[str, Any]:
    """What a loader is made of, as plain values: equal for loaders that read the same data in the same way."""
    dataset: Any = loader.dataset
    collate = loader.collate_fn
    iterable = isinstance(dataset, IterableDataset)
    sampler = None if iterable else loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    return {
        "dataset": type(dataset).__qualname__,
        "rows": None if iterable else len(dataset),
        "batch_size": loader.batch_size,
        "drop_last": loader.drop_last,
        "sampler": type(sampler).__qualname__,
        "order": type(getattr(sampler, "sampler", None)).__qualname__,
        "collate": getattr(collate, "__qualname__", type(collate).__qualname__),
        "workers": loader.num_workers,
    }


def _length(loader: DataLoader[Any]) -> int:
    try:
        return max(0, len(loader))
    except (TypeError, NotImplementedError):
        return 0
    except Exception as error:
        raise JobError(f"is a DataLoader whose len() raised {error!r}; look at its sampler") from error


def _shape(batch: Any) -> Hashable:
    leaves, spec = pytree.tree_flatten(batch)
    shapes = ((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else type(x).__name__ for x in leaves)
    return repr(spec), *shapes
