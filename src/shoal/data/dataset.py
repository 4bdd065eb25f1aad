"""Map-style Datasets: made into tensors when that is exact and cheap, else read ahead by worker processes.

An item that draws at random (an augmentation) is read under a seed of its own, a function of (data seed, epoch, row):
what it gives depends on the job alone, not on the number of workers or on who else reads it.
"""

from __future__ import annotations

import hashlib
import os
import random
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

from shoal.data.source import Source, as_bytes
from shoal.errors import JobError

MAX_BYTES = 512 << 20
"""A Dataset larger than this is streamed."""
MAX_SECONDS = 10.0
"""A Dataset that takes longer than this to read through is streamed."""
SLOW_BATCH = 0.002
"""Batches that take longer than this to read, in seconds, are worth worker processes."""


class DatasetSource(Source):
    """A map-style Dataset, read as training goes; readers in the same order share one reading."""

    streamed = True

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] | None, device: torch.device) -> None:
        self.dataset = dataset
        self.collate = collate or default_collate
        self.device = device
        self.length = len(dataset)
        self.item_seconds = _item_seconds(dataset, self.length)
        self.note = "the Dataset is read as training goes"
        self._shared: dict[tuple[Any, ...], weakref.ref[_Reading]] = {}

    def take(self, rows: Tensor, *, seed: int = 0, epoch: int = 0) -> Any:
        if rows.ndim != 1:
            raise ValueError(
                f"rows have shape {list(rows.shape)}; a Dataset gives one batch at a time: use one dimension"
            )
        items = [read_item(self.dataset, row, seed, epoch) for row in rows.tolist()]
        return self._move(self.collate(items))

    def feed(self, rows: Tensor, batch_size: int, *, seed: int = 0, epoch: int = 0) -> Iterator[Any]:
        key = (seed, epoch, batch_size, hashlib.sha256(rows.contiguous().numpy().tobytes()).digest())
        known = self._shared.get(key)
        reading = known() if known is not None else None
        if reading is None or reading.started:
            reading = _Reading(self._load([r.tolist() for r in torch.split(rows, batch_size)], seed, epoch))
            self._shared = {k: v for k, v in self._shared.items() if v() is not None}
            self._shared[key] = weakref.ref(reading)
        return _Reader(reading)

    def _load(self, batches: list[list[int]], seed: int, epoch: int) -> Iterator[Any]:
        slow = bool(batches) and self.item_seconds * len(batches[0]) > SLOW_BATCH
        loader: DataLoader[Any] = DataLoader(
            _Seeded(self.dataset, seed, epoch),
            batch_sampler=batches,
            collate_fn=self.collate,
            num_workers=min(4, os.cpu_count() or 1, len(batches)) if slow else 0,
            generator=torch.Generator(),  # else the loader draws from the default generator, which belongs to a member
            pin_memory=self.device.type == "cuda",
        )
        for batch in loader:
            yield self._move(batch)

    def _move(self, batch: Any) -> Any:
        if self.device.type == "cpu":
            return batch
        return pytree.tree_map_only(Tensor, lambda t: t.to(self.device, non_blocking=True), batch)

    def fingerprint(self) -> str:
        digest = hashlib.sha256(f"{type(self.dataset).__qualname__} {self.length}".encode())
        for row in (0, self.length // 2, self.length - 1):
            for leaf in pytree.tree_leaves(read_item(self.dataset, row, 0, 0)):
                digest.update(as_bytes(leaf) if isinstance(leaf, Tensor) else repr(leaf).encode())
        return digest.hexdigest()[:16]


class _Reading:
    """One pass over the batches, for several readers: a batch is kept until the slowest of them has had it."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self.batches = batches
        self.kept: deque[Any] = deque()
        self.first = 0
        self.readers: weakref.WeakSet[_Reader] = weakref.WeakSet()

    @property
    def started(self) -> bool:
        """Whether batches have been let go: then a new reader has to start a reading of its own."""
        return self.first > 0

    def get(self, place: int) -> Any:
        while self.first + len(self.kept) <= place:
            self.kept.append(next(self.batches))
        return self.kept[place - self.first]

    def let_go(self) -> None:
        slowest = min((reader.place for reader in self.readers), default=self.first)
        while self.kept and self.first < slowest:
            self.kept.popleft()
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

    def __init__(self, dataset: Any, seed: int, epoch: int) -> None:
        self.dataset, self.seed, self.epoch = dataset, seed, epoch

    def __getitem__(self, row: int) -> Any:
        return read_item(self.dataset, row, self.seed, self.epoch)


def read_item(dataset: Any, row: int, seed: int, epoch: int) -> Any:
    """One item, with torch's, numpy's and python's generators seeded by (seed, epoch, row), and put back after."""
    kept = torch.default_generator.get_state(), np.random.get_state(), random.getstate()
    word = int.from_bytes(hashlib.blake2b(f"{seed} {epoch} {row}".encode(), digest_size=8).digest(), "little")
    try:
        torch.default_generator.manual_seed(word)
        np.random.seed(word & 0xFFFFFFFF)
        random.seed(word)
        return dataset[row]
    finally:
        torch.default_generator.set_state(kept[0])
        np.random.set_state(kept[1])
        random.setstate(kept[2])


def check_dataset(data: Any) -> None:
    """JobError where the data is not a map-style Dataset."""
    if isinstance(data, torch.utils.data.IterableDataset):
        raise JobError(
            "is an IterableDataset; rows are taken by index: pass a map-style Dataset (__len__ and __getitem__)"
        )
    if isinstance(data, DataLoader):
        raise JobError("is a DataLoader; pass its dataset, with batch_size= and collate= on the job")
    if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")) or isinstance(data, str):
        raise JobError(
            f"is a {type(data).__name__}; pass tensors or arrays, or a map-style Dataset (__len__ and __getitem__)"
        )
    if len(data) == 0:
        raise JobError("has no rows; pass at least one")


def materialise(dataset: Any) -> Any | None:
    """The whole Dataset as collated tensors, or None where that might not be the same thing or would cost too much.

    It is the same thing when items hold tensors and numbers alone, reading them draws nothing from a global generator,
    and items read twice are equal.
    """
    length = len(dataset)
    first = dataset_probe(dataset, 0)
    if first is None or _bytes(first) * length > MAX_BYTES or _item_seconds(dataset, length) * length > MAX_SECONDS:
        return None
    items = []
    for row in range(length):
        item = dataset_probe(dataset, row)
        if item is None:
            return None
        items.append(item)
    if not all(_same(items[row], dataset_probe(dataset, row)) for row in _spread(length, 16)):
        return None
    try:
        return default_collate(items)
    except (
        RuntimeError,
        TypeError,
        KeyError,
    ):  # items of different shape: the user's own collate, or an error that names the job
        return None


def dataset_probe(dataset: Any, row: int) -> Any | None:
    """The item, or None where it is not made of tensors and numbers or where reading it drew at random."""
    before = torch.default_generator.get_state(), np.random.get_state(), random.getstate()
    item = dataset[row]
    drew = not torch.equal(before[0], torch.default_generator.get_state()) or random.getstate() != before[2]
    drew = drew or not all(np.array_equal(a, b) for a, b in zip(before[1], np.random.get_state(), strict=True))
    torch.default_generator.set_state(before[0])
    np.random.set_state(before[1])
    random.setstate(before[2])
    plain = isinstance(item, (tuple, list, dict, Tensor)) and all(
        isinstance(leaf, (Tensor, np.ndarray, np.generic, int, float)) for leaf in pytree.tree_leaves(item)
    )
    return item if plain and not drew else None


def _item_seconds(dataset: Any, length: int) -> float:
    rows = _spread(length, 4)
    start = time.perf_counter()
    for row in rows:
        read_item(dataset, row, 0, 0)
    return (time.perf_counter() - start) / len(rows)


def _spread(length: int, count: int) -> Sequence[int]:
    return sorted({int(i * (length - 1) / max(1, count - 1)) for i in range(count)})


def _bytes(item: Any) -> int:
    return sum(leaf.nbytes if isinstance(leaf, (Tensor, np.ndarray)) else 8 for leaf in pytree.tree_leaves(item))


def _same(a: Any, b: Any) -> bool:
    if b is None:
        return False
    leaves_a, spec_a = pytree.tree_flatten(a)
    leaves_b, spec_b = pytree.tree_flatten(b)
    return bool(spec_a == spec_b) and all(
        torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else bool(np.array_equal(x, y))
        for x, y in zip(leaves_a, leaves_b, strict=True)
    )
