"""Checkpoint files: a pickle of plain values, behind a header with its checksum.

    shoal checkpoint 2
    <sha256 of all that follows>
    {"bytes": 40311, "job": "..."}
    <the pickle>

A file that was cut short, zeroed or changed in any bit is refused before anything in it is used. Reading a file runs no
code but the few functions in `_READABLE`, which make tensors, arrays and dicts. Dicts, lists, tuples, numbers,
strings, bytes, arrays and tensors are restored exactly: type, order, bits, strides. A tensor that occurs twice is
restored as one tensor that occurs twice; other views of shared memory become separate tensors.
`torch.save` takes ten times as long, which would slow down short runs of many small networks.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.errors import DamagedError, NotStorable, describe
from shoal.storage import atomic

FORMAT = "2"
START = b"shoal checkpoint "
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


@dataclass(frozen=True, slots=True)
class Frozen:
    """A copy of a state, which can be written later and in another thread."""

    state: Any

    def seal(self, notes: dict[str, str]) -> list[bytes]:
        """Return the contents of the file, with these notes in its header."""
        payload = pickle.dumps(self.state, protocol=5)
        line = json.dumps({"bytes": len(payload), **notes}).encode() + b"\n"
        digest = hashlib.sha256(line)
        digest.update(payload)
        return [START + FORMAT.encode() + b"\n", digest.hexdigest().encode() + b"\n", line, payload]


def freeze(state: Any) -> Frozen:
    """Copy a state, or raise a NotStorable that names the entry which cannot be written."""
    try:
        return Frozen(_copy(state, (), {}))
    except RecursionError:
        raise NotStorable("it contains itself, or is nested too deeply") from None


def _copy(value: Any, path: tuple[Any, ...], tensors: dict[Any, _PickledCall]) -> Any:
    """Copy a value recursively; tensors that occur twice are copied once."""
    kind: Any = type(value)
    if kind in _PLAIN:
        return value
    if kind is dict or kind is OrderedDict:  # torch's state_dict() has an attribute with versions of modules
        copied = kind((_copy(k, (*path, "key"), tensors), _copy(v, (*path, k), tensors)) for k, v in value.items())
        if kind is OrderedDict:
            vars(copied).update(_copy(vars(value), (*path, "vars"), tensors))
        return copied
    if kind is list or kind is tuple:
        return kind([_copy(item, (*path, index), tensors) for index, item in enumerate(value)])
    if kind in (Tensor, nn.Parameter) and value.layout == torch.strided and not value.is_quantized:
        if value.is_meta:
            raise NotStorable(f"{_where(path)} is a tensor without memory")
        # All tensors of the state are alive, so equal addresses mean the same memory.
        address = value.data_ptr() if value.numel() else id(value)
        key = (address, value.dtype, value.shape, value.stride(), value.is_conj(), value.is_neg(), value.device)
        if key not in tensors:
            tensors[key] = _copy_tensor(value)
        return tensors[key]
    if isinstance(value, np.generic | np.ndarray) and value.dtype.kind in "biufc":
        shape = value.shape if isinstance(value, np.ndarray) else None
        return _PickledCall(make_array, value.tobytes(), value.dtype.str, shape)
    return _copy_by_saving(value, path)


def _copy_tensor(value: Tensor) -> _PickledCall:
    if value.is_conj() or value.is_neg():
        value = value.resolve_conj().resolve_neg()
    value = value.detach().to("cpu", copy=True)  # now its memory is one contiguous block
    flat = value.as_strided((value.numel(),), (1,)).view(torch.uint8)
    dtype = str(value.dtype).removeprefix("torch.")
    return _PickledCall(make_tensor, flat, dtype, tuple(value.shape), value.stride())


def _copy_by_saving(value: Any, path: tuple[Any, ...]) -> _PickledCall:
    """Copy a value of another type, if torch.load reads it without running code."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        make_saved(file.getvalue())
    except Exception:
        raise NotStorable(f"{_where(path)} is a {type(value).__name__}, which cannot be stored") from None
    return _PickledCall(make_saved, file.getvalue())


def _where(path: tuple[Any, ...]) -> str:
    return ".".join(str(part) for part in path) or "state"


class _PickledCall:
    """Pickles as a call of the function that makes the value again; tensors are passed as bytes."""

    def __init__(self, *call: Any) -> None:
        self._call = call

    def __reduce__(self) -> Any:
        function, *arguments = self._call
        return function, tuple(x.numpy().tobytes() if isinstance(x, Tensor) else x for x in arguments)


def make_tensor(data: bytes, dtype: str, shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    """Make a tensor with its own memory."""
    if not data:
        return torch.empty_strided(shape, stride, dtype=getattr(torch, dtype))
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).as_strided(shape, stride).clone()


def make_array(data: bytes, dtype: str, shape: tuple[int, ...] | None) -> Any:
    """Make a NumPy array, or a NumPy number if `shape` is None."""
    flat = np.frombuffer(data, dtype=dtype)
    return flat[0] if shape is None else flat.reshape(shape).copy()


def make_saved(data: bytes) -> Any:
    """Make a value of a rare type, such as a sparse tensor."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


_READABLE = {(f.__module__, f.__name__): f for f in (make_tensor, make_array, make_saved, OrderedDict, complex)}
"""The only functions that a checkpoint may call when it is read."""


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _READABLE:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint does")
        return _READABLE[module, name]


def save(path: Path, state: Any, notes: dict[str, str] | None = None) -> None:
    """Write a state to a file, atomically."""
    atomic.write(path, freeze(state).seal(notes or {}))


def load(path: Path) -> Any:
    """Return the state in a file, or raise a DamagedError if the file is not what was written."""
    return read(path)[0]


def read(path: Path) -> tuple[Any, dict[str, str]]:
    """Return the state in a file and its notes, or raise a DamagedError if the file is not what was written."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DamagedError(f"{str(path)!r} cannot be read ({error.strerror})") from None
    problem = fault(data)
    if problem:
        raise DamagedError(f"{str(path)!r} {problem}")
    _, _, line, payload = data.split(b"\n", 3)
    notes = json.loads(line)
    del notes["bytes"]
    try:
        return _Reader(io.BytesIO(payload)).load(), notes
    except Exception as error:  # it was not written by `seal`
        raise DamagedError(f"{str(path)!r} is not a checkpoint of Shoal: {describe(error)}") from None


def fault(data: bytes) -> str | None:
    """Return what is wrong with the contents of a file, or None if they are as written."""
    if not any(data):
        return "holds nothing but zeros" if data else "is empty"
    if not data.startswith(START[: len(data)]):
        return "is not a checkpoint of Shoal, or its beginning is damaged"
    start, digest, line, payload = (data.split(b"\n", 3) + [b""] * 3)[:4]
    if start != START + FORMAT.encode() and digest:
        return (
            f"was written by another version of Shoal (format {start.removeprefix(START).decode('ascii', 'replace')})"
        )
    if hashlib.sha256(line + b"\n" + payload).hexdigest().encode() == digest:
        return None
    try:
        length = len(data) - len(payload) + json.loads(line)["bytes"]
    except (ValueError, KeyError, TypeError):
        length = len(data)
    if len(data) < length:
        return f"is cut short: {len(data)} of its {length} bytes are left"
    return "is damaged: its contents do not match their checksum"
