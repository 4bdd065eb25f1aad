"""A fence for the compiler: what goes through `hold` is computed once and stored, not recomputed where it is used.

Inductor fuses a [M] column into the loops that read it. That is right for a learning rate, but for a bias correction it
computes a float64 power for every element instead of every member. It cannot look into a custom operator, so a step's
coefficients pass through one, all together: two tiny kernels a step. Eager code needs no fence.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode


@torch.library.custom_op("shoal::hold", mutates_args=())
def _hold(columns: Tensor) -> Tensor:
    return columns.clone()


@_hold.register_fake
def _(columns: Tensor) -> Tensor:
    return torch.empty_like(columns)


def is_traced() -> bool:
    """Return whether the current code is being traced by torch.compile or make_fx."""
    return torch.compiler.is_compiling() or get_proxy_mode() is not None


def fence(value: Tensor) -> Tensor:
    """Return the tensor, fenced if traced."""
    fenced: Tensor = _hold(value) if is_traced() else value
    return fenced


def hold(columns: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the [M] columns (numbers in `dtype`, or booleans), fenced if traced."""
    if not columns or not is_traced():
        return columns
    stored = _hold(torch.stack([column.to(dtype) for column in columns.values()])).unbind(0)
    return {
        name: values != 0 if columns[name].dtype == torch.bool else values
        for name, values in zip(columns, stored, strict=True)
    }
