"""Convolutions and pooling.

On a CPU a convolution runs once per member: it is its own kernel, long enough to hide the loop, and its bits do not
depend on the pack. On a GPU the members become groups of one convolution.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.engine.rules import op_context
from shoal.engine.rules._linear import widened
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

    def unfolded(value: Any) -> Any:
        return unfold(value, members) if batched and isinstance(value, Tensor) else value

    def run(x: Tensor, *rest: Any) -> Any:
        out = op(fold(x) if batched else x, *rest)
        return tuple(unfolded(value) for value in out) if isinstance(out, tuple) else unfolded(out)

    return run
