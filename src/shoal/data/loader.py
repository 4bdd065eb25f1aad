"""DataLoaders and IterableDatasets: read as they are, once for all jobs that are at the same position.

An epoch's batches are those that the loader yields after everything random was seeded from the job's data seed and the
epoch. A job that resumes in the middle of an epoch reads it from the beginning up to its position.
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

from shoal.data._items import reachable as reachable
from shoal.data._items import same
from shoal.data._loader import Loader
from shoal.data._reading import Reader as Reader
from shoal.data._reading import Reading
from shoal.data.source import Source, as_bytes, cloned
from shoal.errors import JobError, ReadError

SAMPLES = 2
"""Batches that are read before training, to see their shapes."""
MOST_KINDS = 16
"""The most shapes of batches that are remembered."""
MOST_BYTES = 256 << 20
"""Validation batches of up to so many bytes in all are read once and kept."""


_numbers = count()


class LoaderSource(Source):
    """A DataLoader. Its rows are whole batches; `length` is its `len()`, or 0 if it has none."""

    streamed = True
    batched = True

    def __init__(self, loader: DataLoader[Any], device: torch.device, what: str = "") -> None:
        self.device, self.length = device, _length(loader)
        self.number = next(_numbers)
        """A number that is different for each source of a process."""
        self.loader = Loader(loader, device, what or f"the DataLoader over {type(loader.dataset).__name__}")
        self.note = f"{self.loader.what} is read as training goes"
        self._readings: list[Reading] = []
        self._kinds: list[tuple[Hashable, list[Any]]] = []
        """Shapes of batches, and example batches of these shapes."""
        self.overlaps = False
        """Whether an epoch may begin before the one before it has been read, see `engine/units/overlapping.py`."""
        self._held: list[Any] | None = None
        """All batches of a validation, if they are small."""

    def read(self, seed: int, epoch: int, place: int = 0, *, goes_on: bool = False) -> Reader:
        """Return the epoch's batches from this position on. Readers of one epoch that are close to each other share a
        reading.

        Args:
            goes_on: Whether the next epoch will be read too, so that its workers may start early.
        """
        reader = Reader(partial(self._open, seed, epoch), place)
        if goes_on and self.overlaps:
            self.loader.launches = True
            reader.open_next, reader.last = partial(self.read, seed, epoch + 1), self.length - self.loader.most_waiting
        return reader

    def _open(self, seed: int, epoch: int, place: int) -> Reading:
        for reading in self._readings:
            if (reading.seed, reading.epoch) == (seed, epoch) and reading.holds(place):
                return reading
        self._close_unread()
        self._readings.append(Reading(self.loader, seed, epoch))
        self._readings[-1].skip_to(place)
        return self._readings[-1]

    def take(self, rows: Tensor, *, seed: int = 0, epoch: int = 0) -> Any:
        """Return some batch for trials, not the one at a certain position."""
        return self.sample(1, int(rows[0]))

    def sample(self, kind: int, place: int = 0) -> Any:
        """Return an example batch of a kind, numbered from 1; another `place` gives another one if there is one."""
        if not self._kinds:
            self._read_samples()
        batches = self._kinds[kind - 1][1]
        return cloned(batches[place % len(batches)])

    def kind(self, batch: Any) -> int:
        """Return the number of a batch's kind (structure, shapes and dtypes); 0 if there are too many kinds."""
        shape = _shape(batch)
        for number, (known_shape, batches) in enumerate(self._kinds, 1):
            if known_shape == shape:
                if len(batches) < SAMPLES:
                    batches.append(batch)
                return number
        if len(self._kinds) == MOST_KINDS:
            return 0
        self._kinds.append((shape, [batch]))
        return len(self._kinds)

    def _read_samples(self) -> None:
        """Read the first batches, to learn their kinds.

        Workers are ended afterwards, since the process may fork. Without workers the first batch is read twice, to see
        whether it is the same.
        """
        reading = Reading(self.loader, 0, 0)
        try:
            for i in range(reading.count(0, SAMPLES)):
                try:
                    self.kind(reading.get(i))
                except ReadError:
                    if not i:
                        raise
        finally:
            reading.close()
        if not self.loader.loader.num_workers:
            second_reading = Reading(self.loader, 0, 0)
            with suppress(ReadError):
                self.steady = same(self._kinds[0][1][0], second_reading.get(0))

    def try_reading(self) -> None:
        """Read a batch and drop it, to see what reading changes."""
        reading = Reading(self.loader, 0, 0)
        reading.count(0, 1)
        reading.close()

    def feed(self, rows: Tensor, batch_size: int, *, seed: int = 0, epoch: int = 0) -> Iterator[Any]:
        """Yield all batches of an epoch, the same each time, as validation reads them."""
        if self._held is not None:
            yield from map(cloned, self._held)
            return
        small_batches: list[Any] | None = []
        size = 0
        reading = Reading(self.loader, seed, epoch)
        try:
            for batch in Reader(lambda place: reading, 0):
                size += sum(leaf.nbytes for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor))
                small_batches = (
                    [*small_batches, cloned(batch)] if small_batches is not None and size <= MOST_BYTES else None
                )
                yield batch
        finally:
            reading.close()
        self._held = small_batches

    def release(self) -> None:
        self._close_unread()
        if not self._readings:
            self.loader.stop_launching()

    def _close_unread(self) -> None:
        unread = [reading for reading in self._readings if not (reading.readers and reading.usable)]
        for reading in unread:
            reading.close()
        self._readings = [reading for reading in self._readings if reading not in unread]

    def close(self) -> None:
        try:
            for reading in self._readings:
                reading.close()
            self._readings = []
        finally:  # a second Ctrl-C must leave no process either
            self.loader.stop_launching()

    def fingerprint(self) -> str:
        """Return a hash of the loader's settings, and of its first batch if that is known to be the same when read
        again.

        Reading all of it would take too long.
        """
        first, loader = self.sample(1), self.loader.loader
        digest = hashlib.sha256(" ".join(map(str, describe_loader(loader).items())).encode())
        digest.update(repr(_shape(first)).encode())
        for leaf in pytree.tree_leaves(first) if self.steady and not loader.num_workers else ():
            if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
                digest.update(as_bytes(leaf))
        return f"loader-{digest.hexdigest()[:16]}"


def as_loader(
    data: Any, batch_size: int, drop_last: bool, collate: Callable[[list[Any]], Any] | None
) -> DataLoader[Any]:
    """Return the DataLoader itself, or one over an IterableDataset with the job's settings."""
    if isinstance(data, DataLoader):
        return data
    return DataLoader(data, batch_size=batch_size, drop_last=drop_last, collate_fn=collate)


def describe_loader(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return a loader's settings as plain values: equal for loaders that read the same data in the same way."""
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
