"""Where batches come from. A source is opened once for each device and shared by all that read it."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.errors import JobError
from shoal.utils.numpy_values import tensor_of

COMPARED_BYTES = 64 << 20
"""Of a tensor that is compared with one on another device: how much of it is moved there at a time."""


class Source(ABC):
    """Rows that can be taken by index, on one device."""

    length: int
    device: torch.device
    streamed: bool = False
    """Whether batches are read during training, so that readers should stay at the same position."""
    batched: bool = False
    """Whether it gives whole batches in its own order. Its rows are then batches, and it is read with `read`."""
    steady: bool = True
    """Whether a row is the same when it is read again."""
    note: str = ""
    """What a user may want to know about how this data is read."""
    trying: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Called for the context in which batches are read that nothing trains on."""

    @abstractmethod
    def take(self, rows: Tensor, *, seed: int = 0, epoch: int = 0) -> Any:
        """Return the batch of these rows. `seed` and `epoch` matter for Datasets that draw random numbers."""

    @abstractmethod
    def feed(self, rows: Tensor, batch_size: int, *, seed: int = 0, epoch: int = 0) -> Iterator[Any]:
        """Yield one epoch's batches, in this order of rows."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a string that is equal for two runs with the same data."""

    def num_nan(self) -> int:
        """Return how many values are NaN, as far as known without reading a stream."""
        return 0

    def release(self) -> None:  # noqa: B027  # most hold nothing open
        """End readings that have no reader any more."""

    def close(self) -> None:  # noqa: B027  # most hold nothing open
        """End what reading has started; it can be read again."""


class TensorSource(Source):
    """A pytree of tensors with the same first dimension, on the device."""

    def __init__(
        self, leaves: list[Tensor], spec: pytree.TreeSpec, device: torch.device, note: str = "", owned: bool = False
    ) -> None:
        """`owned`: whether the tensors are copies of the user's, which no other code changes."""
        self.leaves = leaves
        self.owned = owned
        self.spec = spec
        self.device = device
        self.length = len(leaves[0])
        self.note = note
        self._fingerprint: str | None = None

    def take(self, rows: Tensor, *, seed: int = 0, epoch: int = 0) -> Any:
        """Return the batch of these rows: [B] gives tensors [B, ...]; [M, B], with rows for each member, gives [M, B,
        ...]."""
        return pytree.tree_unflatten(self.take_leaves(rows), self.spec)

    def take_leaves(self, rows: Tensor) -> list[Tensor]:
        """Return the tensors of that batch as a list."""
        rows = rows.to(self.device)
        taken = [leaf.index_select(0, rows.reshape(-1)) for leaf in self.leaves]
        return [leaf.view(*rows.shape, *leaf.shape[1:]) for leaf in taken] if rows.ndim > 1 else taken

    def feed(self, rows: Tensor, batch_size: int, *, seed: int = 0, epoch: int = 0) -> Iterator[Any]:
        flat = self.spec == _flat_tuple(len(self.leaves))  # by far the most common case, and unflattening takes time
        for chunk in torch.split(rows.to(self.device), batch_size):
            taken = [leaf.index_select(0, chunk) for leaf in self.leaves]
            yield tuple(taken) if flat else pytree.tree_unflatten(taken, self.spec)

    def holds(self, leaves: Sequence[Tensor], spec: pytree.TreeSpec) -> bool:
        """Whether it has the numbers of these tensors, bit for bit."""
        kinds = [[(leaf.shape, leaf.dtype, leaf.layout) for leaf in each] for each in (leaves, self.leaves)]
        if spec != self.spec or kinds[0] != kinds[1]:
            return False
        own_parts, other_parts = ([part for leaf in each for part in parts(leaf)] for each in (self.leaves, leaves))
        return all(_same_bits(a, b) for a, b in zip(other_parts, own_parts, strict=True))

    def whole(self) -> Any:
        """Return all rows, without a copy."""
        return pytree.tree_unflatten(self.leaves, self.spec)

    def fingerprint(self) -> str:
        if self._fingerprint is None:
            digest = hashlib.sha256(str(self.spec).encode())
            for leaf in self.leaves:
                digest.update(f"{list(leaf.shape)}{leaf.dtype}".encode())
                for part in parts(leaf):
                    digest.update(_sample(part))
            self._fingerprint = digest.hexdigest()[:16]
        return self._fingerprint

    def num_nan(self) -> int:
        values = [part for leaf in self.leaves for part in parts(leaf)]
        return sum(_num_nan(value) for value in values if value.is_floating_point() or value.is_complex())


def _num_nan(values: Tensor) -> int:
    """Return how many values are NaN. One pass over them is enough if their sum is not NaN."""
    has_sum = values.dtype.itemsize > 1 and values.dtype != torch.complex32
    if has_sum and not bool(values.sum().isnan()):
        return 0
    return int(values.isnan().sum())


def cloned(batch: Any) -> Any:
    """Return a copy of a batch, for a reader that may write to it."""
    return pytree.tree_map_only(Tensor, Tensor.clone, batch)


def parts(leaf: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors that hold a tensor's values: itself, or the parts of a sparse one."""
    if leaf.layout == torch.sparse_coo:
        return leaf._indices(), leaf._values()
    if leaf.layout in (torch.sparse_csr, torch.sparse_bsr):
        return leaf.crow_indices(), leaf.col_indices(), leaf.values()
    if leaf.layout in (torch.sparse_csc, torch.sparse_bsc):
        return leaf.ccol_indices(), leaf.row_indices(), leaf.values()
    return (leaf,)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same bits. Where they are on different devices, a part is moved at a time."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.device == b.device and a.data_ptr() == b.data_ptr() and a.stride() == b.stride():
        return True
    rows = max(1, COMPARED_BYTES * len(a) // max(1, a.nbytes))
    pairs = zip(torch.split(a, rows), torch.split(b, rows), strict=True)
    return all(_bits(x.to(b.device)).equal(_bits(y)) for x, y in pairs)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def _flat_tuple(length: int) -> pytree.TreeSpec:
    return pytree.tree_structure((0,) * length)


def _sample(leaf: Tensor, limit: int = 1 << 22) -> bytes:
    """Return the tensor's bytes, or those of evenly spread rows if it is large."""
    if not leaf.dim() or not leaf.numel():
        return as_bytes(leaf)
    row = max(1, leaf[:1].numel())
    stride = max(1, -(-leaf.numel() // limit))
    return as_bytes(leaf[::stride][: max(1, limit // row)])


def as_bytes(tensor: Tensor) -> bytes:
    """Return a tensor's values as bytes, in order."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def content_hash(tensor: Tensor) -> str:
    """Return a hash of a tensor's values; empty if it has no plain memory."""
    strided = tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_quantized
    return hashlib.sha256(as_bytes(tensor)).hexdigest() if strided else ""


def is_tensors(data: Any) -> bool:
    """Return whether data is tensors or arrays in tuples and dicts, not a Dataset. A list may contain nothing else."""
    if isinstance(data, (Tensor, np.ndarray, dict, tuple)):
        return True
    return isinstance(data, list) and bool(data) and all(isinstance(x, (Tensor, np.ndarray)) for x in data)


def tensor_leaves(
    data: Any, convert: Callable[[np.ndarray[Any, Any]], Tensor] = tensor_of
) -> tuple[list[Tensor], pytree.TreeSpec]:
    """Return the tensors of a pytree, with numpy arrays converted. Raises a JobError if they are not one data set."""
    leaves, spec = pytree.tree_flatten(data)
    if not leaves:
        raise JobError("is empty; pass at least one tensor")
    tensors = []
    for leaf in leaves:
        if isinstance(leaf, np.ndarray):
            leaf = convert(leaf)
        if not isinstance(leaf, Tensor):
            is_frame = hasattr(leaf, "to_numpy")
            advice = "what its to_numpy() gives" if is_frame else "tensors or arrays, or a map-style Dataset"
            raise JobError(f"holds a {type(leaf).__name__}; pass {advice}")
        if leaf.ndim == 0:
            raise JobError("holds a tensor without dimensions; its first dimension must be the rows")
        tensors.append(leaf.detach())
    lengths = [len(t) for t in tensors]
    if len(set(lengths)) > 1:
        shapes = ", ".join(str(list(t.shape)) for t in tensors)
        raise JobError(f"has tensors of different length ({shapes}); their first dimensions must agree")
    if lengths[0] == 0:
        raise JobError("has no rows; pass at least one")
    return tensors, spec
