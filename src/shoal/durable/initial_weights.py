"""The weights and buffers that a network begins with, as a hash and a few numbers.

The hash is of their bytes. The numbers, two for each tensor, see every element: where the hash differs and they do not,
it is rounding, such as another CPU's or another number of threads'. Networks of more than a gigabyte have the numbers
alone. Both together take less time than drawing the weights did.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shoal.data.source import as_bytes

MOST_BYTES = 1 << 30
"""Of a network whose bytes are hashed."""
_ROW = 4096


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
    """How close another tensor must be, its norm, and a sum that knows each element's place; integers exactly."""
    if not _readable(tensor):
        return [str(tensor.layout)]
    if not tensor.is_floating_point() and not tensor.is_complex():
        return [hashlib.sha256(as_bytes(tensor)).hexdigest()[:16]]
    flat = tensor.detach().cpu().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    near = {torch.float64: 1e-12, torch.float32: 2e-6}.get(flat.dtype, 1e-4)
    along, placed, squares = _waves(_ROW), list[Tensor](), 0.0
    for part in torch.split(flat, _ROW << 4):
        part = part.double()
        squares += float(part @ part)
        rows = len(part) // _ROW
        placed += [
            part[: rows * _ROW].view(rows, _ROW) @ along,
            (part[rows * _ROW :] @ along[: len(part) % _ROW])[None],
        ]
    sums = torch.cat(placed) if placed else torch.zeros(0, dtype=torch.float64)
    return [near, math.sqrt(squares), float(sums @ _waves(len(sums), 0.37))]


@lru_cache(maxsize=64)
def _waves(length: int, pace: float = 0.7310585) -> Tensor:
    return torch.cos(torch.arange(length, dtype=torch.float64) * pace)


def _close(old: list[Any], new: list[Any]) -> bool:
    if len(old) != 3 or len(new) != 3:
        return old == new
    near, size, place = map(float, old)
    if not all(map(math.isfinite, (size, place, *new[1:]))):
        return [str(x) for x in old] == [str(x) for x in new]
    return bool(near == new[0] and abs(new[1] - size) <= near * size and abs(new[2] - place) <= near * size)
