"""Map-style Datasets: held as tensors if that is exact and cheap, otherwise read ahead by worker processes.

An item that cannot be read does not stop a run from starting. It raises when it is read, and ends the job that reads
it.
"""

from __future__ import annotations

import hashlib
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, default_collate

from shoal.data._items import Items, same
from shoal.data.source import Source, as_bytes
from shoal.errors import JobError, describe

MAX_BYTES = 512 << 20
"""A Dataset larger than this is streamed."""
MAX_SECONDS = 10.0
"""A Dataset that takes longer than this to read completely is streamed."""
ROWS_AT_ONCE = 64
"""Rows that are read between two looks at the random generators, each of which takes as long as reading many rows."""
SLOW_BATCH = 0.002
"""Batches that take more seconds than this to read are worth worker processes."""
SLOW_EPOCH = 0.5
"""So are epochs that take more than this, since the processes are started anew for each."""


class DatasetSource(Source):
    """A map-style Dataset that is read during training. Readers with the same order share one reading."""

    streamed = True

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] | None, device: torch.device) -> None:
        self.dataset = dataset
        self.collate = collate or default_collate
        self.device = device
        self.length = len(dataset)
        self.items = Items(dataset)
        self.item_seconds, self.steady = _probe_items(self.items, self.length)
        """Seconds to read an item, and whether an item is the same when it is read again under the same seed."""
        self.note = "the Dataset is read as training goes"
        self._shared: dict[tuple[Any, ...], weakref.ref[_Reading]] = {}

    def take(self, rows: Tensor, *, seed: int = 0, epoch: int = 0) -> Any:
        if rows.ndim != 1:
            raise ValueError(
                f"rows have shape {list(rows.shape)}; a Dataset gives one batch at a time: use one dimension"
            )
        return self._move(self.collate(self.items.batch(rows.tolist(), seed, epoch)))

    def feed(self, rows: Tensor, batch_size: int, *, seed: int = 0, epoch: int = 0) -> Iterator[Any]:
        key = (seed, epoch, batch_size, hashlib.sha256(rows.contiguous().numpy().tobytes()).digest())
        shared_ref = self._shared.get(key)
        reading = shared_ref() if shared_ref is not None else None
        if reading is None or reading.started:
            reading = _Reading(self._load([r.tolist() for r in torch.split(rows, batch_size)], seed, epoch))
            self._shared = {k: v for k, v in self._shared.items() if v() is not None}
            self._shared[key] = weakref.ref(reading)
        return _Reader(reading)

    def _load(self, batches: list[list[int]], seed: int, epoch: int) -> Iterator[Any]:
        slow = bool(batches) and self.item_seconds * len(batches[0]) > SLOW_BATCH
        slow = slow and self.item_seconds * sum(map(len, batches)) > SLOW_EPOCH
        loader: DataLoader[Any] = DataLoader(
            _Seeded(self.items, seed, epoch),
            batch_sampler=batches,
            collate_fn=self.collate,
            num_workers=min(4, os.cpu_count() or 1, len(batches)) if slow else 0,
            generator=torch.Generator(),  # otherwise it would draw from the default generator, which a member uses
            pin_memory=self.device.type == "cuda",
        )
        loaded = iter(loader)
        for rows in batches:
            try:
                batch = next(loaded)
            except Exception:
                # raises the same error without a worker's traceback
                self.take(torch.tensor(rows), seed=seed, epoch=epoch)
                raise
            yield self._move(batch)

    def _move(self, batch: Any) -> Any:
        if self.device.type == "cpu":
            return batch
        return pytree.tree_map_only(Tensor, lambda t: t.to(self.device, non_blocking=True), batch)

    def fingerprint(self) -> str:
        digest = hashlib.sha256(f"{type(self.dataset).__qualname__} {self.length}".encode())
        for row in (0, self.length // 2, self.length - 1):
            try:
                item = self.items(row, 0, 0)
            except Exception as error:
                item = describe(error)
            for leaf in pytree.tree_leaves(item):
                is_strided = isinstance(leaf, Tensor) and leaf.layout == torch.strided
                digest.update(as_bytes(leaf) if is_strided else repr(leaf).encode())
        return digest.hexdigest()[:16]


class _Reading:
    """One pass over the batches for several readers. A batch is kept until the slowest of them has read it."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self.batches = batches
        self.error: Exception | None = None
        self.ahead: deque[Any] = deque()
        self.first = 0
        self.readers: weakref.WeakSet[_Reader] = weakref.WeakSet()

    @property
    def started(self) -> bool:
        """Whether batches have been dropped, so that a new reader needs its own reading."""
        return self.first > 0

    def get(self, position: int) -> Any:
        """Return the batch at this position, reading up to it if necessary."""
        while self.first + len(self.ahead) <= position:
            if self.error is not None:
                raise self.error  # the same error for every reader
            try:
                self.ahead.append(next(self.batches))
            except Exception as error:
                self.error = error
                raise
        return self.ahead[position - self.first]

    def let_go(self) -> None:
        """Drop batches that all readers have read."""
        slowest = min((reader.place for reader in self.readers), default=self.first)
        while self.ahead and self.first < slowest:
            self.ahead.popleft()
            self.first += 1


class _Reader(Iterator[Any]):
    def __init__(self, reading: _Reading) -> None:
        self.reading = reading
        self.place = 0
        reading.readers.add(self)

    def __next__(self) -> Any:
        batch = self.reading.get(self.place)
        self.place += 1
        self.reading.let_go()
        return batch


class _Seeded(Dataset[Any]):
    """A Dataset whose items are read under their own seed, in a worker or not."""

    def __init__(self, items: Items, seed: int, epoch: int) -> None:
        self.items, self.seed, self.epoch = items, seed, epoch

    def __getitems__(self, rows: list[int]) -> list[Any]:
        return self.items.batch(rows, self.seed, self.epoch)


def check_dataset(data: Any) -> None:
    """Raise a JobError unless the data is a map-style Dataset."""
    if hasattr(data, "to_numpy"):  # a table of pandas or polars: its items are columns
        raise JobError(f"is a {type(data).__name__}; pass what its to_numpy() gives")
    if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")) or isinstance(data, str):
        raise JobError(
            f"is a {type(data).__name__}; pass tensors or arrays, a map-style Dataset (__len__ and __getitem__), a "
            "DataLoader or an IterableDataset"
        )
    if len(data) == 0:
        raise JobError("has no rows; pass at least one")


def materialise(dataset: Any) -> Any | None:
    """Return the whole Dataset as collated tensors, or None if that might differ from reading it or would cost too
    much.

    It is the same if items consist of tensors and numbers, reading them draws from no generator, and items read twice
    are equal.
    """
    items = Items(dataset)
    try:
        return _read_all(items, len(dataset))
    except Exception:  # unreadable items or differing shapes show when batches are read, with the job's name
        return None


def _read_all(items: Items, length: int) -> Any | None:
    first = items.plain([0])
    if first is None or _bytes(first) * length > MAX_BYTES or _probe_items(items, length)[0] * length > MAX_SECONDS:
        return None
    rows: list[Any] = []
    for start in range(0, length, ROWS_AT_ONCE):
        some = items.plain(range(start, min(start + ROWS_AT_ONCE, length)))
        if some is None:
            return None
        rows += some
    spread = _spread(length, 16)
    again = items.plain(spread)
    if again is None or not all(same(rows[row], item) for row, item in zip(spread, again, strict=True)):
        return None
    return default_collate(rows)


def _probe_items(items: Items, length: int) -> tuple[float, bool]:
    """Return the seconds to read an item, and whether items are the same when they are read again, tried on a few."""
    seconds: list[float] = []
    steady = True
    with items.generators_restored():
        for row in _spread(length, 4):
            start = time.perf_counter()
            try:
                item = items.read(row, 0, 0)
                seconds.append(time.perf_counter() - start)
                steady = steady and same(item, items.read(row, 0, 0))
            except Exception:  # it ends the job that reads it
                continue
    return (sum(seconds) / len(seconds) if seconds else 0.0), steady


def _spread(length: int, count: int) -> Sequence[int]:
    """Return up to `count` indices spread evenly over `length`."""
    return sorted({int(i * (length - 1) / max(1, count - 1)) for i in range(count)})


def _bytes(item: Any) -> int:
    return sum(leaf.nbytes if isinstance(leaf, (Tensor, np.ndarray)) else 8 for leaf in pytree.tree_leaves(item))
