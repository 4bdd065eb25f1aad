"""Summarize a network's initial weights and buffers in a few numbers per tensor, so that a resumed run can compare
them.

Every element contributes. Small differences are rounding, as from another CPU or another number of threads.
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
"""The relative difference that still counts as rounding, by dtype; 1e-4 for other floating-point types."""
_ROW = 1 << 14
_WAVES = np.cos(0.7310585 * np.arange(_ROW))


def describe_weights(model: nn.Module) -> dict[str, list[Any]]:
    """Return a few numbers for each of a network's tensors, by name."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {name: _numbers(tensor) for name, tensor in tensors if not is_lazy(tensor)}


def compare_weights(old: Mapping[str, list[Any]], new: Mapping[str, list[Any]]) -> str:
    """Return "same", "rounding" (only the last digits differ), or "other"."""
    if str(old) == str(new):  # texts are compared, because NaN != NaN
        return "same"
    close = old.keys() == new.keys() and all(_close(numbers, new[name]) for name, numbers in old.items())
    return "rounding" if close else "other"


def _numbers(tensor: Tensor) -> list[Any]:
    """Return the norm, a sum weighted by position, and the allowed relative difference; for integers a hash."""
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        return [str(tensor.layout)]
    if not tensor.is_floating_point() and not tensor.is_complex():
        return [hashlib.sha256(as_bytes(tensor)).hexdigest()[:16]]
    flat = tensor.detach().cpu().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    tolerance = _NEAR.get(flat.dtype, 1e-4)
    values = (flat if flat.dtype in _NEAR else flat.float()).numpy()
    squares = weighted_sum = 0.0
    for number, start in enumerate(range(0, len(values), _ROW)):
        row = values[start : start + _ROW].astype(np.float64)
        squares += float(row @ row)
        weighted_sum += float(row @ _WAVES[: len(row)]) * math.cos(0.37 * number)
    return [float(f"{value:.13g}") for value in (math.sqrt(squares), weighted_sum)] + [tolerance]


def _close(old: list[Any], new: list[Any]) -> bool:
    if len(old) != 3 or len(new) != 3 or not all(map(math.isfinite, (*old, *new))):
        return str(old) == str(new)
    norm, weighted_sum, tolerance = old
    return bool(
        tolerance == new[2]
        and abs(new[0] - norm) <= tolerance * norm
        and abs(new[1] - weighted_sum) <= tolerance * norm
    )
