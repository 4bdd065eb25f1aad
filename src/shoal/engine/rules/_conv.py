"""Convolutions and pooling.

On CPU a convolution runs once per member: it is its own kernel, long enough to hide the loop, and its bits do not
depend on the pack; a first layer, whose outputs see few numbers each, is one product. On a GPU the members become
groups of one convolution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.engine.rules import op_context
from shoal.engine.rules._linear import widened
from shoal.engine.rules._product import SIDE, Linear
from shoal.engine.rules._registry import once_per_member, rule
from shoal.engine.rules.op_context import OpContext, Run, fold, unfold

aten = torch.ops.aten

_CONV = {
    **dict.fromkeys((aten.conv1d.default, aten.conv1d.padding, aten.conv_transpose1d.default), 1),
    **dict.fromkeys((aten.conv2d.default, aten.conv2d.padding, aten.conv_transpose2d.input), 2),
    **dict.fromkeys((aten.conv3d.default, aten.conv3d.padding, aten.conv_transpose3d.input), 3),
}
"""Spatial dimensions of every convolution."""


@rule(*_CONV)
def convolution(ctx: OpContext) -> Run:
    spatial = _CONV[ctx.op]
    if op_context.one_by_one(ctx) and _few_inputs(ctx):
        return _as_product(ctx)
    if op_context.one_by_one(ctx) or ctx.ndim(0) != spatial + 2 or not ctx.stacked(1):
        return once_per_member(ctx)
    members, has_x, op = ctx.members, ctx.stacked(0), ctx.call
    has_b = ctx.args[2] is not None and ctx.stacked(2)
    group_at = 6
    groups = ctx.args[group_at]

    def run(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        x = widened(x, has_x, members)
        wide = x.transpose(0, 1).flatten(1, 2)  # [B, M*C, ...]
        bias = None if bias is None else widened(bias, has_b, members).flatten()
        arguments = (*rest[: group_at - 3], groups * members, *rest[group_at - 2 :])
        out = op(wide, weight.flatten(0, 1), bias, *arguments)
        apart: Tensor = out.unflatten(1, (members, out.shape[1] // members)).transpose(0, 1)  # [M, B, O, ...]
        return apart

    return run


_FEW = 32
"""Numbers that one output sees, up to which a CPU is faster when it lays them out and multiplies: first layers."""


def _few_inputs(ctx: OpContext) -> bool:
    if ctx.op is not aten.conv2d.default or ctx.ndim(0) != 4 or ctx.varies or not ctx.stacked(1):
        return False
    *_, dilation, groups = ctx.args
    return math.prod(ctx.meta(1).shape[1:]) <= _FEW and groups == 1 and all(n == 1 for n in dilation)


def _as_product(ctx: OpContext) -> Run:
    """A convolution as one product over the members, where its input needs no gradient, in full precision."""
    members, has_x, one_by_one = ctx.members, ctx.stacked(0), once_per_member(ctx)
    has_b = ctx.args[2] is not None and ctx.stacked(2)
    stride, padding = (_pair(ctx.args[place]) for place in (3, 4))
    channels, height, width = ctx.meta(1).shape[1:]
    inputs = channels * height * width
    more = -inputs % SIDE

    def run(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        if x.requires_grad or torch.is_autocast_enabled(x.device.type):
            out: Tensor = one_by_one(x, weight, bias, *rest)
            return out
        seen = F.pad(x, (padding[1], padding[1], padding[0], padding[0])) if any(padding) else x
        windows = seen.unfold(-2, height, stride[0]).unfold(-2, width, stride[1])  # [(M,) B, C, Y, X, height, width]
        windows = windows.movedim(-5, -3)
        laid_out = x.new_zeros(*windows.shape[:-3], inputs + more)
        laid_out[..., :inputs].view(windows.shape).copy_(windows)
        rows = widened(laid_out.flatten(-4, -2), has_x, members)
        bias = None if bias is None else widened(bias, has_b, members)
        out = Linear.apply(rows, F.pad(weight.flatten(2), (0, more)), bias)  # type: ignore[no-untyped-call]
        return out.view(members, *windows.shape[-6:-3], -1).movedim(-1, 2)

    return run


def _pair(value: Sequence[int]) -> tuple[int, int]:
    first, *more = value
    return first, (more or [first])[0]


def _rowwise(*names: str) -> list[Any]:
    return [
        getattr(getattr(aten, name), overload)
        for name in names
        for overload in getattr(aten, name).overloads()
        if "out" not in overload
    ]


_ROWWISE = {
    2: "max_pool1d avg_pool1d adaptive_avg_pool1d upsample_nearest1d upsample_linear1d max_pool1d_with_indices "
    "adaptive_max_pool1d _upsample_nearest_exact1d",
    3: "max_pool2d avg_pool2d adaptive_avg_pool2d upsample_nearest2d upsample_bilinear2d upsample_bicubic2d "
    "max_pool2d_with_indices adaptive_max_pool2d pixel_shuffle pixel_unshuffle _upsample_nearest_exact2d "
    "channel_shuffle im2col",
    4: "max_pool3d avg_pool3d adaptive_avg_pool3d upsample_nearest3d upsample_trilinear3d max_pool3d_with_indices "
    "adaptive_max_pool3d",
}
"""Operators that treat every leading row alike, by how many dimensions belong to one sample."""
_SAMPLE_DIMS = {op: dims for dims, names in _ROWWISE.items() for op in _rowwise(*names.split())}


def _only_picks(ctx: OpContext) -> bool:
    """Largest numbers, and those that are only put elsewhere."""
    return ctx.name.split(".")[0].startswith(("max_pool", "adaptive_max_pool", "pixel_", "channel_shuffle"))


@rule(*_SAMPLE_DIMS, steady=_only_picks)
def rowwise(ctx: OpContext) -> Run:
    """Members are more rows of the batch."""
    sample = _SAMPLE_DIMS[ctx.op]
    if ctx.varies or ctx.ndim(0) not in (sample, sample + 1):
        return once_per_member(ctx)
    op, members, batched = ctx.call, ctx.members, ctx.ndim(0) == sample + 1
    if ctx.op is aten.max_pool2d.default and ctx.device.type == "cpu" and batched and ctx.meta(0).shape[1] >= _MANY:
        return lambda x, *rest: unfold(MaxPool2d.apply(fold(x), *rest), members)  # type: ignore[no-untyped-call]

    def unfolded(value: Any) -> Any:
        return unfold(value, members) if batched and isinstance(value, Tensor) else value

    def run(x: Tensor, *rest: Any) -> Any:
        out = op(fold(x) if batched else x, *rest)
        return tuple(unfolded(value) for value in out) if isinstance(out, tuple) else unfolded(out)

    return run


_MANY = 8
"""Channels from which on a CPU is faster when it pools them side by side."""


class MaxPool2d(torch.autograd.Function):
    """Forward with channels last, which is vectorised, backward with channels first, which is the faster one there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *settings: Any) -> Tensor:
        out, where = aten.max_pool2d_with_indices(x.contiguous(memory_format=torch.channels_last), *settings)
        ctx.save_for_backward(x, where.contiguous())
        ctx.settings = settings
        return out.contiguous()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x, where = ctx.saved_tensors
        grad = aten.max_pool2d_with_indices_backward(grads[0].contiguous(), x, *ctx.settings, where)
        return grad, *[None] * len(ctx.settings)
