"""Run operators one member at a time, with bits that depend on that member alone: for `deterministic=True`.

A kernel may compute differently depending on where a tensor starts, on the order of its dimensions in memory, and on
its total size. So each member's part is copied to its own memory, with the layout that it has when the job runs alone,
before an operator gets it; the same holds for its gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Layout = tuple[int, ...] | None
"""Strides; None: contiguous."""


def layout_of(meta: Tensor) -> Layout:
    """Return the strides of a dense tensor like this one; None (contiguous) if this one is not dense."""
    expected = 1
    for stride, size in sorted(zip(meta.stride(), meta.shape, strict=True)):
        if size != 1 and stride != expected:
            return None
        expected *= size
    return tuple(meta.stride())


def rows(x_M: Tensor, layout: Layout = None) -> list[Tensor]:
    """Return each member's part of a stacked tensor in its own memory, at the start of an allocation."""
    if torch.is_grad_enabled() and x_M.requires_grad:
        parts: tuple[Tensor, ...] = Apart.apply(x_M, layout)  # type: ignore[no-untyped-call]
        return list(parts)
    return [_copied(part, layout) for part in x_M.unbind(0)]


def together(parts: Sequence[Tensor]) -> Tensor:
    """Stack members' tensors. Each gets its gradient in its own memory."""
    if torch.is_grad_enabled() and any(part.requires_grad for part in parts):
        stacked: Tensor = Together.apply(*parts)  # type: ignore[no-untyped-call]
        return stacked
    return torch.stack(list(parts))


def _copied(part: Tensor, layout: Layout = None) -> Tensor:
    if layout is None:
        return part.clone(memory_format=torch.contiguous_format)
    return torch.empty_strided(part.shape, layout, dtype=part.dtype, device=part.device).copy_(part)


class Apart(torch.autograd.Function):
    """`unbind` with copies."""

    @staticmethod
    def forward(ctx: Any, x_M: Tensor, layout: Layout) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.dtype = x_M.shape, x_M.dtype
        return tuple(_copied(part, layout) for part in x_M.unbind(0))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, None]:
        any_grad = next((grad for grad in grads if grad is not None), None)
        if any_grad is None:
            return None, None
        return torch.stack([any_grad.new_zeros(ctx.shape[1:]) if grad is None else grad for grad in grads]), None


class Together(torch.autograd.Function):
    """`stack`, whose gradients are copies."""

    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, ...]:
        return tuple(_copied(part) for part in grads[0].unbind(0))


class Spread(torch.autograd.Function):
    """`expand` of all dimensions but the member axis.

    The gradient is summed in an order that depends only on its shape; torch would choose another order for a gradient
    that is itself expanded.
    """

    @staticmethod
    def forward(ctx: Any, x_M: Tensor, shape: tuple[int, ...]) -> Tensor:
        ctx.shape = x_M.shape
        return x_M.expand(x_M.shape[0], *shape)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        (grad,) = grads
        over = [dim for dim, size in enumerate(ctx.shape) if size == 1 != grad.shape[dim]]
        return (grad.contiguous().sum(over, keepdim=True) if over else grad), None


def spread(x_M: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Expand a stacked tensor's dimensions after the member axis to `shape`."""
    if tuple(x_M.shape[1:]) == shape:
        return x_M
    if torch.is_grad_enabled() and x_M.requires_grad:
        expanded: Tensor = Spread.apply(x_M, shape)  # type: ignore[no-untyped-call]
        return expanded
    return x_M.expand(x_M.shape[0], *shape)
