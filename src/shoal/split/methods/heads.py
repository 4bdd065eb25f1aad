"""Local heads: a small network at a cut that maps what crosses to the shape of the network's output.

With a head, the part before the cut has a loss of its own.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from shoal.errors import SplitError
from shoal.split.methods._cuts import Cut

MOST_FEATURES = 4096
"""A head reads at most this many features of a row directly; if there are more, it reads means over places."""


class Head(nn.Module):
    """Reads the activations at a cut, before or after a non-linearity."""

    def __init__(self, shape: tuple[int, ...], output: tuple[int, ...], width: int | None = None) -> None:
        super().__init__()
        self.output = output
        self.by_place = len(shape) > 1 and len(shape) == len(output) and shape[:-1] == output[:-1]
        self.pool, features = (nn.Identity(), shape[-1]) if self.by_place else _pool(shape)
        classes = output[-1] if self.by_place else math.prod(output)
        self.active = nn.ReLU()
        self.hidden = nn.Linear(features, width) if width is not None else None
        self.out = nn.Linear(width if width is not None else features, classes)

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.active(x)
        if not self.by_place:
            features = self.pool(features).flatten(1)
        if self.hidden is not None:
            features = self.active(self.hidden(features))
        features = self.out(features)
        return features if self.by_place else features.view(len(features), *self.output)


class WithHead(nn.Module):
    """A part with its head. Calling it returns the head's output."""

    def __init__(self, body: nn.Module, head: Head) -> None:
        super().__init__()
        self.body = body
        self.head = head

    def forward(self, *inputs: Any) -> Tensor:
        output: Tensor = self.head(self.body(*inputs))
        return output


def make_head(cut: Cut, output: tuple[int, ...], width: int | None) -> Head:
    """Make the head of a cut. Raises a SplitError if the network's output is not a tensor with rows."""
    if not output:
        raise SplitError("a head needs to know the shape of the output; the network must give one tensor with rows")
    if not cut.dtype.is_floating_point:
        raise SplitError(f"cut {cut.name!r}: {cut.dtype} crosses it; a head reads floating-point numbers")
    return Head(cut.shape, output, width).to(cut.dtype)


def _pooled(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Choose the size of each pooled dimension: at most 2 a side, or 8 for a sequence, so that all features fit."""
    side = int((MOST_FEATURES / shape[0]) ** (1 / (len(shape) - 1)))
    return tuple(min(size, max(1, min(side, 2 if len(shape) > 2 else 8))) for size in shape[1:])


def _pool(shape: tuple[int, ...]) -> tuple[nn.Module, int]:
    """Make a module that takes means over places, from [C, ...] to [C, at most 2 a side], and count its features."""
    if len(shape) < 2:
        return nn.Identity(), math.prod(shape)
    pools: dict[int, Any] = {2: nn.AdaptiveAvgPool1d, 3: nn.AdaptiveAvgPool2d, 4: nn.AdaptiveAvgPool3d}
    if len(shape) not in pools:
        raise SplitError(f"what crosses the cut has rows of {len(shape)} dimensions; a head reads 1 to 4")
    pooled = _pooled(shape)
    return pools[len(shape)](pooled), shape[0] * math.prod(pooled)
