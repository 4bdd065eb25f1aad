"""The weights and buffers that a network begins with, as a few numbers for each tensor.

The numbers see every element. Where they differ a little it is rounding, such as another CPU's or another number of
threads'.
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

_NEAR = {torch.float64: 1e-12, torch.float32: 2e-6}
"""How far apart two tensors may be by rounding, of their norm; other floating-point numbers: 1e-4."""
_ROW = 1 << 14
_WAVES = np.cos(0.7310585 * np.arange(_ROW))


def describe_weights(model: nn.Module) -> dict[str, list[Any]]:
    """A network's tensors as plain data, by their names."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {name: _numbers(tensor) for name, tensor in tensors if not is_lazy(tensor)}


def compare_weights(old: Mapping[str, list[Any]], new: Mapping[str, list[Any]]) -> str:
    """ "same", "rounding" where they differ in their last digits alone, or "other"."""
    if str(old) == str(new):  # as text: NaN is not itself otherwise
        return "same"
    close = old.keys() == new.keys() and all(_close(numbers, new[name]) for name, numbers in old.items())
    return "rounding" if close else "other"


def _numbers(tensor: Tensor) -> list[Any]:
    """Its norm, a sum that knows each element's place, and how close to the norm another one's must be; of integers, a
    hash."""
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
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
    if len(old) != 3 or len(new) != 3 or not all(map(math.isfinite, (*old, *new))):
        return str(old) == str(new)
    size, place, near = old
    return bool(near == new[2] and abs(new[0] - size) <= near * size and abs(new[1] - place) <= near * size)
