"""Values with a member axis: a step's logs, rows, sums of gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def as_column(value: Any, rows: int) -> Tensor:
    """A step's log as one number per row of the stack."""
    if isinstance(value, Tensor) and value.dim():
        return value.detach().reshape(rows, -1).mean(1) if value.dim() > 1 else value.detach()
    return torch.full((rows,), float(value), dtype=torch.float64)


def row_of(value: Tensor | None, slot: int) -> Tensor | None:
    """A copy of one member's row."""
    return None if value is None else value[slot].clone()


def added(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """The sum of two gradients, either of which may be missing."""
    if a is None or b is None:
        return a if b is None else b
    return a + b
