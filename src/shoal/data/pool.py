"""All the data of a run. Each data set is put on the device once, however many jobs read it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Subset, TensorDataset

from shoal.data.dataset import DatasetSource, check_dataset, materialise
from shoal.data.loader import LoaderSource, as_loader
from shoal.data.rows import Rows
from shoal.data.source import Source, TensorSource, is_tensors, parts, tensor_leaves
from shoal.errors import JobError
from shoal.jobs.loaders import gives_batches
from shoal.utils.numpy_values import tensor_of

MOST_NUMBERS = 1 << 24
"""Tensors with more whole numbers are not searched for their smallest and largest."""
_WHOLE = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """The rows of a source that one job reads: all of them, or those in `index`."""

    source: Source
    index: Tensor | None = None

    def __len__(self) -> int:
        return self.source.length if self.index is None else len(self.index)

    def rows(self, order: Tensor) -> Tensor:
        """Convert an order over this view ([n], 0..n-1) to rows of the source."""
        return order if self.index is None else self.index[order]

    def feed(self, batch_size: int) -> Iterator[Any]:
        """Yield all rows in order, in batches, as validation reads them."""
        return self.source.feed(self.rows(torch.arange(len(self))), batch_size)

    def take(self, start: int, stop: int) -> Any:
        """Return the batch of positions `start` to `stop` in the view, read to try something on it."""
        return self.pick(torch.arange(start, stop))

    def pick(self, order: Tensor) -> Any:
        """Return the batch of these positions in the view, read to try something on it."""
        with self.source.trying():
            return self.source.take(self.rows(order))

    def extremes(self) -> list[int]:
        """Return the positions of the rows with the smallest and the largest whole number of each tensor, such as an
        index of an embedding or a label, which may be out of range."""
        positions: list[int] = []
        for leaf in self.source.leaves if isinstance(self.source, TensorSource) else ():
            if leaf.dtype not in _WHOLE or leaf.layout != torch.strided or not 0 < leaf.numel() <= MOST_NUMBERS:
                continue
            numbers = (leaf if self.index is None else leaf[self.index.to(leaf.device)]).flatten(min(1, leaf.dim() - 1))
            least, most = (numbers, numbers) if leaf.dim() == 1 else (numbers.amin(1), numbers.amax(1))
            positions += [int(least.argmin()), int(most.argmax())]
        return list(dict.fromkeys(positions))

    def fingerprint(self) -> str:
        """Return a string that is equal for two runs that saw the same rows of the same data."""
        if self.index is None:
            return self.source.fingerprint()
        return f"{self.source.fingerprint()}-{hashlib.sha256(self.index.numpy().tobytes()).hexdigest()[:8]}"

    @property
    def key(self) -> tuple[int, ...]:
        """A key that is equal for views of the same rows, and different for most others."""
        return (id(self.source), len(self.index), int(self.index[0])) if self.index is not None else (id(self.source),)

    def same(self, other: View | None) -> bool:
        """Return whether the other view has exactly the same rows."""
        if other is None or self.source is not other.source:
            return False
        if self.index is None or other.index is None or self.index is other.index:
            return self.index is other.index
        return self.key == other.key and torch.equal(self.index, other.index)


class Pool:
    """Opens data for a device, once for each distinct data set and each distinct tensor."""

    def __init__(self, device: torch.device, known: Sequence[Source] = ()) -> None:
        """`known`: data that is there already, and is taken for data with the same numbers."""
        self.device, self._known = device, [source for source in known if isinstance(source, TensorSource)]
        self._sources: dict[Any, Source] = {}
        self._arrays: dict[Any, tuple[np.ndarray[Any, Any], Tensor]] = {}
        self._moved: dict[Any, tuple[Tensor, Tensor]] = {}
        self._kept: list[Any] = []

    def open(
        self,
        data: Any,
        collate: Callable[[list[Any]], Any] | None = None,
        batch_size: int = 1,
        drop_last: bool = False,
    ) -> View:
        """Return the view of this data. Raises a JobError, without the job's name, if it cannot be opened.

        Args:
            batch_size, drop_last: For an IterableDataset, whose batches are made here.
        """
        if gives_batches(data):
            return View(self._loader(data, collate, batch_size, drop_last))
        if isinstance(data, Rows):
            return self._narrow(self.open(data.data, collate), data.index)
        if isinstance(data, Subset):
            indices: Any = data.indices
            index = tensor_of(indices) if isinstance(indices, np.ndarray) else torch.as_tensor(indices)
            return self._narrow(self.open(data.dataset, collate), index.to(torch.int64))
        if isinstance(data, TensorDataset) and collate is None:
            data = data.tensors
        if is_tensors(data):
            if collate is not None:
                raise JobError("is tensors, so collate= would do nothing; remove it, or pass a Dataset")
            return View(self._tensors(data))
        return View(self._dataset(data, collate))

    def _loader(
        self, data: Any, collate: Callable[[list[Any]], Any] | None, batch_size: int, drop_last: bool
    ) -> Source:
        key = (id(data),) if isinstance(data, DataLoader) else (id(data), id(collate), batch_size, drop_last)
        if key not in self._sources:
            self._kept.append((data, collate))
            what = "" if isinstance(data, DataLoader) else f"the {type(data).__name__}"
            self._sources[key] = LoaderSource(as_loader(data, batch_size, drop_last, collate), self.device, what)
        return self._sources[key]

    def _narrow(self, view: View, index: Tensor) -> View:
        """Return a view of some rows of a view."""
        if view.source.batched:
            raise JobError("asks for rows of a DataLoader, which gives batches; take the rows of its dataset")
        if len(index) == 0:
            raise JobError("has no rows; pass at least one")
        low, high = int(index.min()), int(index.max())
        if low < 0 or high >= len(view):
            raise JobError(f"asks for rows {low} to {high} of {len(view)}; use 0 to {len(view) - 1}")
        return View(view.source, view.rows(index))

    def _tensors(self, data: Any, note: str = "") -> Source:
        leaves, spec = tensor_leaves(data, self._array)
        key = (str(spec), *(_identity(leaf) for leaf in leaves))
        if key not in self._sources:
            source = next((source for source in self._known if source.holds(leaves, spec)), None)
            moved = [] if source is not None else [self._move(leaf) for leaf in leaves]
            owned = all(a.device != b.device for a, b in zip(moved, leaves, strict=False))
            self._sources[key] = source or TensorSource(moved, spec, self.device, note, owned)
        return self._sources[key]

    def _array(self, array: np.ndarray[Any, Any]) -> Tensor:
        """Return the array as a tensor. An array that has to be copied is copied once for all jobs."""
        key = (array.__array_interface__["data"][0], array.shape, array.strides, array.dtype.str)
        if key not in self._arrays:
            self._arrays[key] = array, tensor_of(array)
        return self._arrays[key][1]

    def _move(self, leaf: Tensor) -> Tensor:
        """Return the tensor on the device, moved once for all jobs. The original is kept alive so that its id is not
        reused."""
        key = _identity(leaf)
        if key not in self._moved:
            self._moved[key] = leaf, leaf.to(self.device)
        return self._moved[key][1]

    def _dataset(self, data: Any, collate: Callable[[list[Any]], Any] | None) -> Source:
        check_dataset(data)
        key = (id(data), id(collate))
        if key not in self._sources:
            self._kept.append((data, collate))  # kept alive, so that no other object gets their ids
            tensors = materialise(data) if collate is None else None
            if tensors is None:
                self._sources[key] = DatasetSource(data, collate, self.device)
            else:
                self._sources[key] = self._tensors(tensors, "the Dataset was read once and held as tensors")
        return self._sources[key]


def _identity(leaf: Tensor) -> tuple[Any, ...]:
    memory = tuple((part.data_ptr(), part.stride()) for part in parts(leaf))
    return memory, tuple(leaf.shape), leaf.dtype, str(leaf.layout), str(leaf.device)


def batch_rows(batch: Any) -> int:
    """Return the number of rows of a batch: the first dimension of its first tensor."""
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.ndim:
            return len(leaf)
    return 1
