"""The weights and buffers that a network begins with, as a hash and a few numbers.

The hash is of their bytes. The numbers, two for each tensor, see every element: where the hash differs and they do not,
it is rounding, such as another CPU's or another number of threads'. Networks of more than a gigabyte have the numbers
alone. Both together take less time than drawing the weights did.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shoal.data.source import as_bytes

MOST_BYTES = 1 << 30
"""Of a network whose bytes are hashed."""
_NEAR = {torch.float64: 1e-12, torch.float32: 2e-6}
"""How far apart two tensors may be by rounding, of their norm; other floating-point numbers: 1e-4."""
_ROW = 1 << 14
_WAVES = np.cos(0.7310585 * np.arange(_ROW))


def describe_weights(model: nn.Module) -> dict[str, Any]:
    """A network's tensors as plain data: `hash`, and by their names `numbers`."""
    tensors = {name: t for name, t in (*model.named_parameters(), *model.named_buffers()) if not is_lazy(t)}
    total = sum(t.nbytes for t in tensors.values() if t.layout == torch.strided)
    numbers = {name: _numbers(tensor) for name, tensor in tensors.items()}
    if total > MOST_BYTES:
        return {"hash": None, "numbers": numbers}
    seen = hashlib.sha256()
    for name, tensor in tensors.items():
        seen.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
        if _readable(tensor):
            seen.update(memoryview(as_bytes(tensor)))
    return {"hash": seen.hexdigest()[:16], "numbers": numbers}


def compare_weights(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """ "same", "rounding" where they differ in their last digits alone, or "other"."""
    if old["hash"] == new["hash"] and (old["hash"] is not None or old["numbers"] == new["numbers"]):
        return "same"
    if old["numbers"].keys() != new["numbers"].keys():
        return "other"
    close = all(_close(numbers, new["numbers"][name]) for name, numbers in old["numbers"].items())
    return "rounding" if close else "other"


def _readable(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_quantized


def _numbers(tensor: Tensor) -> list[Any]:
    """Its norm, a sum that knows each element's place, and how close to the norm another one's must be; of integers, a
    hash."""
    if not _readable(tensor):
        return [str(tensor.layout)]
    if not tensor.is_floating_point() and not tensor.is_complex():
        return [hashlib.sha256(as_bytes(tensor)).hexdigest()[:16]]
    flat = tensor.detach().cpu().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    near = _NEAR.get(flat.dtype, 1e-4)
    values = (flat if flat.dtype in _NEAR else flat.float()).numpy()
    squares = place = 0.0
    for number, start in enumerate(range(0, len(values), _ROW)):
        row = values[start : start + _ROW].astype(np.float64)
        squares += float(row @ row)
        place += float(row @ _WAVES[: len(row)]) * math.cos(0.37 * number)
    return [float(f"{value:.13g}") for value in (math.sqrt(squares), place)] + [near]


def _close(old: list[Any], new: list[Any]) -> bool:
    if len(old) != 3 or len(new) != 3:
        return old == new
    size, place, near = map(float, old)
    if not all(map(math.isfinite, (size, place, *new))):
        return [str(value) for value in old] == [str(value) for value in new]
    return bool(near == new[2] and abs(new[0] - size) <= near * size and abs(new[1] - place) <= near * size)
