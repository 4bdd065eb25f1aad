"""A member's state as plain data: a tree that JSON can hold, and its tensors beside it.

Dicts with any keys, lists, tuples, None, bool, int, float, complex, str, bytes, numpy's numbers and arrays, and tensors
of every dtype come back as they were: type, order, bits, and the strides of a tensor whose memory has no holes. A
tensor that occurs twice comes back as one tensor that occurs twice; other views into one memory come back apart. A
few more types go through torch.save, where torch.load(weights_only=True) reads them. The rest is NotStorable.
"""

from __future__ import annotations

import io
import math
import struct
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.errors import NotStorable

NUMPY = {torch.float32, torch.float64, torch.int64, torch.uint8}
"""Those that numpy has as they are, and that are common."""

Path = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor as it goes into a file: a copy of its bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    data: bytes


def encode(state: Any) -> tuple[Any, list[Leaf]]:
    """A tree for `json.dumps`, and the tensors it speaks of; NotStorable, with the place, where there is none."""
    encoder = _Encoder()
    try:
        return encoder.node(state, ()), encoder.leaves
    except RecursionError:
        raise NotStorable("it contains itself, or is nested too deeply") from None


def decode(tree: Any, leaves: list[Tensor]) -> Any:
    """What was encoded. `leaves` are flat, one for each of the leaves, and become part of it."""
    return _Decoder(leaves).node(tree)


class _Encoder:
    def __init__(self) -> None:
        self.leaves: list[Leaf] = []
        self.seen: dict[Any, dict[str, Any]] = {}

    def node(self, value: Any, path: Path) -> Any:
        kind = type(value)
        if value is None or kind is str or kind is bool or kind is int:
            return value
        if kind is float:
            return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
        if kind is dict:
            return self._dict(value, path)
        if kind is list:
            return [self.node(item, (*path, place)) for place, item in enumerate(value)]
        if kind is tuple:
            return {"tuple": [self.node(item, (*path, place)) for place, item in enumerate(value)]}
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        return self._rare(value, path)

    def _dict(self, value: dict[Any, Any], path: Path) -> dict[str, Any]:
        if all(type(key) is str for key in value):
            return {"dict": {key: self.node(item, (*path, key)) for key, item in value.items()}}
        return {"items": self._items(value, path)}

    def _items(self, value: dict[Any, Any], path: Path) -> list[Any]:
        return [[self.node(key, (*path, "key")), self.node(item, (*path, key))] for key, item in value.items()]

    def _rare(self, value: Any, path: Path) -> dict[str, Any]:
        kind = type(value)
        if kind is OrderedDict:  # torch's state_dict(), with the versions of the modules in an attribute
            return {"ordered": self._items(value, path), "vars": self.node(dict(vars(value)), (*path, "vars"))}
        if kind is bytes:
            return {"bytes": self._leaf(path, torch.uint8, (len(value),), value)}
        if kind is complex:
            return {"complex": struct.pack(">dd", value.real, value.imag).hex()}
        if isinstance(value, np.generic) and value.dtype.kind in "biufc":
            return {"number": value.tobytes().hex(), "dtype": value.dtype.str}
        if kind is np.ndarray and value.dtype.kind in "biufc":
            leaf = self._leaf(path, torch.uint8, (value.nbytes,), value.tobytes())
            return {"array": leaf, "dtype": value.dtype.str, "shape": list(value.shape)}
        return self._saved(value, path)

    def _tensor(self, value: Tensor, path: Path) -> dict[str, Any]:
        if type(value) not in (Tensor, nn.Parameter) or value.layout != torch.strided or value.is_quantized:
            return self._saved(value, path)
        if value.is_meta:
            raise NotStorable(f"{_where(path)} is a tensor without memory")
        # All tensors of the state are alive, so that equal addresses mean the same memory.
        address = value.data_ptr() if value.numel() else id(value)
        key = (address, value.dtype, value.shape, value.stride(), value.is_conj(), value.is_neg(), value.device)
        if key not in self.seen:
            self.seen[key] = self._new_tensor(value, path)
        return self.seen[key]

    def _new_tensor(self, value: Tensor, path: Path) -> dict[str, Any]:
        dtype = value.dtype
        value = value.detach().resolve_conj().resolve_neg().cpu()
        shape, stride = tuple(value.shape), value.stride()
        out: dict[str, Any] = {}
        if value.numel() and stride != plain(shape) and dense(shape, stride):
            out = {"stride": list(stride)}
            value = value.as_strided((value.numel(),), (1,))
        if value.dtype not in NUMPY:
            value = value.contiguous().view(-1).view(torch.uint8)
        return {"tensor": self._leaf(path, dtype, shape, value.numpy().tobytes()), **out}

    def _saved(self, value: Any, path: Path) -> dict[str, Any]:
        """Whatever torch.load reads without running code."""
        file = io.BytesIO()
        try:
            torch.save(value, file)
            torch.load(io.BytesIO(file.getvalue()), map_location="cpu", weights_only=True)
        except Exception:
            raise NotStorable(f"{_where(path)} is a {type(value).__name__}, which cannot be stored") from None
        data = file.getvalue()
        return {"saved": self._leaf(path, torch.uint8, (len(data),), data)}

    def _leaf(self, path: Path, dtype: torch.dtype, shape: tuple[int, ...], data: bytes) -> int:
        self.leaves.append(Leaf(_where(path), dtype, shape, data))
        return len(self.leaves) - 1


class _Decoder:
    def __init__(self, leaves: list[Tensor]) -> None:
        self.leaves = leaves
        self.shaped: dict[int, Tensor] = {}

    def node(self, tree: Any) -> Any:
        if isinstance(tree, list):
            return [self.node(item) for item in tree]
        if not isinstance(tree, dict):
            return tree
        kind, content = next(iter(tree.items()))
        return _KINDS[kind](self, content, tree)

    def _dict(self, content: dict[str, Any], tree: dict[str, Any]) -> dict[str, Any]:
        return {key: self.node(item) for key, item in content.items()}

    def _items(self, content: list[Any], tree: dict[str, Any]) -> dict[Any, Any]:
        return {self.node(key): self.node(item) for key, item in content}

    def _ordered(self, content: list[Any], tree: dict[str, Any]) -> OrderedDict[Any, Any]:
        out = OrderedDict(self._items(content, tree))
        vars(out).update(self.node(tree["vars"]))
        return out

    def _tuple(self, content: list[Any], tree: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(self.node(item) for item in content)

    def _float(self, content: str, tree: dict[str, Any]) -> float:
        value: float = struct.unpack(">d", bytes.fromhex(content))[0]
        return value

    def _complex(self, content: str, tree: dict[str, Any]) -> complex:
        return complex(*struct.unpack(">dd", bytes.fromhex(content)))

    def _number(self, content: str, tree: dict[str, Any]) -> Any:
        return np.frombuffer(bytes.fromhex(content), dtype=tree["dtype"])[0]

    def _bytes(self, content: int, tree: dict[str, Any]) -> bytes:
        return self.leaves[content].numpy().tobytes()

    def _array(self, content: int, tree: dict[str, Any]) -> Any:
        return np.frombuffer(self._bytes(content, tree), dtype=tree["dtype"]).reshape(tree["shape"]).copy()

    def _saved(self, content: int, tree: dict[str, Any]) -> Any:
        return torch.load(io.BytesIO(self._bytes(content, tree)), map_location="cpu", weights_only=True)

    def _tensor(self, content: int, tree: dict[str, Any]) -> Tensor:
        if content not in self.shaped:
            leaf = self.leaves[content]
            self.shaped[content] = leaf.as_strided(leaf.shape, tree["stride"]) if "stride" in tree else leaf
        return self.shaped[content]


_KINDS: dict[str, Callable[[_Decoder, Any, dict[str, Any]], Any]] = {
    "dict": _Decoder._dict,
    "items": _Decoder._items,
    "ordered": _Decoder._ordered,
    "tuple": _Decoder._tuple,
    "float": _Decoder._float,
    "complex": _Decoder._complex,
    "number": _Decoder._number,
    "bytes": _Decoder._bytes,
    "array": _Decoder._array,
    "saved": _Decoder._saved,
    "tensor": _Decoder._tensor,
}


def plain(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    out, step = [], 1
    for size in reversed(shape):
        out.append(step)
        step *= max(size, 1)
    return tuple(reversed(out))


def dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether a tensor fills its memory without holes or overlaps, its dimensions in whatever order."""
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(shape, stride, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True


def _where(path: Path) -> str:
    return ".".join(str(part) for part in path) or "state"
