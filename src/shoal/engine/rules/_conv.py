"""Convolutions and pooling.

On a CPU a convolution runs once per member: each kernel is long enough to hide the loop, and its bits do not depend on
the pack. On a GPU, patches of the images become the rows of one batched product; if that is not possible, members
become groups of one convolution.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.engine.kernels import pooling
from shoal.engine.kernels.elements import DTYPES
from shoal.engine.kernels.patches import Window, add_patches, patches, prepare, suits
from shoal.engine.optim.compile_fence import is_traced
from shoal.engine.rules import op_context
from shoal.engine.rules._linear import cast, widened
from shoal.engine.rules._registry import once_per_member, rule
from shoal.engine.rules.op_context import OpContext, Run, fold, unfold

aten = torch.ops.aten

_CONV = {
    **dict.fromkeys((aten.conv1d.default, aten.conv1d.padding, aten.conv_transpose1d.default), 1),
    **dict.fromkeys((aten.conv2d.default, aten.conv2d.padding, aten.conv_transpose2d.input), 2),
    **dict.fromkeys((aten.conv3d.default, aten.conv3d.padding, aten.conv_transpose3d.input), 3),
}
"""The number of spatial dimensions of each convolution operator."""


@rule(*_CONV)
def convolution(ctx: OpContext) -> Run:
    spatial = _CONV[ctx.op]
    if _shares_filter(ctx, spatial):
        return _run_as_one_batch(ctx)
    if op_context.one_by_one(ctx) or ctx.ndim(0) != spatial + 2 or not ctx.stacked(1):
        return once_per_member(ctx)
    members, has_x, op = ctx.members, ctx.stacked(0), ctx.call
    has_b = ctx.args[2] is not None and ctx.stacked(2)
    group_at = 6
    groups = ctx.args[group_at]
    window = _window(ctx)
    if window is not None and ctx.device.type == "cuda":
        channels, *image = ctx.meta(0).shape[1:]
        prepare(ctx.out.dtype, (channels, *(image if len(image) == 2 else (1, *image))), window)

    def run(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        x = widened(x, has_x, members)
        if window is not None:
            bias = None if bias is None else widened(bias, has_b, members)
            out = _convolved(x, weight, bias, window)
            if out is not None:
                return out
        grouped = x.transpose(0, 1).flatten(1, 2)  # [B, M*C, ...]
        bias = None if bias is None else widened(bias, has_b, members).flatten()
        arguments = (*rest[: group_at - 3], groups * members, *rest[group_at - 2 :])
        out = op(grouped, weight.flatten(0, 1), bias, *arguments)
        stacked: Tensor = out.unflatten(1, (members, out.shape[1] // members)).transpose(0, 1)  # [M, B, O, ...]
        return stacked

    return run


def _shares_filter(ctx: OpContext, spatial: int) -> bool:
    """Return whether all members have the same filter, on a GPU; on a CPU a member's bits would depend on the
    others."""
    differ = any(ctx.args[i] is not None and ctx.stacked(i) for i in (1, 2))
    return ctx.device.type != "cpu" and not ctx.varies and not differ and ctx.ndim(0) == spatial + 2


def _run_as_one_batch(ctx: OpContext) -> Run:
    """Run the operator with the members' images as one batch."""
    op, members = ctx.call, ctx.members
    return lambda x, *rest: unfold(op(fold(x), *rest), members)


def _window(ctx: OpContext) -> Window | None:
    """Return how the filter moves if the convolution can be a product of patches; else None."""
    if ctx.varies or ctx.out.dtype not in DTYPES:
        return None
    if ctx.op not in (aten.conv1d.default, aten.conv2d.default, aten.conv2d.padding, aten.conv1d.padding):
        return None
    size = tuple(ctx.meta(1).shape[2:])
    _, _, _, stride, padding, dilation, groups = ctx.args
    if groups != 1:
        return None
    stride, dilation = (_per_dim(value, len(size)) for value in (stride, dilation))
    if isinstance(padding, str):
        spans = [gap * (side - 1) for side, gap in zip(size, dilation, strict=True)]
        if padding == "same" and any(span % 2 for span in spans):  # asymmetric padding
            return None
        padding = [span // 2 if padding == "same" else 0 for span in spans]
    values = [size, stride, _per_dim(padding, len(size)), dilation]
    if len(size) == 1:  # treated as an image of one row
        values = [(fill, *value) for fill, value in zip((1, 1, 0, 1), values, strict=True)]
    return Window.of([number for pair in values for number in pair])


def _per_dim(value: Any, count: int) -> tuple[int, ...]:
    """Return a number for every dimension; a single number stands for all of them."""
    numbers = (value,) if isinstance(value, int) else tuple(value)
    return numbers * count if len(numbers) == 1 else numbers


def _convolved(x: Tensor, weight: Tensor, bias: Tensor | None, window: Window) -> Tensor | None:
    """Convolve [M, B, C, ...] with [M, O, C, ...] as a product; None if there is no kernel for these."""
    lines = x.dim() == 4
    if lines:
        x, weight = x.unsqueeze(3), weight.unsqueeze(3)
    if not suits(x, window):
        return None
    out: Tensor = Convolution.apply(*cast(x, weight, bias), window)  # type: ignore[no-untyped-call]
    return out.squeeze(3) if lines else out


class Convolution(torch.autograd.Function):
    """The convolutions of all members as one product. Patches are taken again in the backward pass, since they are many
    times larger than the images."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, window: Window) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.window = window
        out = torch.bmm(_rows(x, window), _matrix(weight, bias, window).mT)  # [M, B * places, O]
        places = window.places((x.shape[3], x.shape[4]))
        return out.view(*x.shape[:2], *places, out.shape[2]).permute(0, 1, 4, 2, 3)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        of_x, of_weight, of_bias, _ = ctx.needs_input_grad
        grad = grads[0].movedim(2, -1).flatten(1, 3)
        x_grad = weight_grad = bias_grad = None
        if of_x:
            rows = torch.bmm(grad, _matrix(weight, bias, ctx.window))
            x_grad = add_patches(rows, ctx.window.numbers, list(x.shape))
        if of_weight or of_bias:
            weight_and_bias = torch.bmm(grad.mT, _rows(x, ctx.window))
            count = weight[0, 0].numel()
            by_tap = weight_and_bias[..., :count].reshape(*weight.shape[:2], *weight.shape[3:], weight.shape[2])
            weight_grad = by_tap.movedim(-1, 2).contiguous()
            bias_grad = weight_and_bias[..., count] if of_bias else None
        return x_grad, weight_grad, bias_grad, None


def _rows(x: Tensor, window: Window) -> Tensor:
    """Return the patches, taken once if all members share the images."""
    shared = x.stride(0) == 0 and x.shape[0] > 1
    rows: Tensor = patches(x[:1] if shared else x, window.numbers, True)
    return rows.expand(x.shape[0], -1, -1) if shared else rows


def _matrix(weight: Tensor, bias: Tensor | None, window: Window) -> Tensor:
    """Return [M, O, columns]: the weights in the order of a patch, followed by the bias."""
    flat = weight.movedim(2, -1).flatten(2)
    spare = window.columns(weight.shape[2]) - flat.shape[2]
    if bias is None:
        return F.pad(flat, (0, spare))
    return torch.cat([flat, F.pad(bias.unsqueeze(-1), (0, spare - 1))], dim=2)


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
"""Operators that treat every leading row alike, by the number of dimensions of one sample."""
_SAMPLE_DIMS = {op: dims for dims, names in _ROWWISE.items() for op in _rowwise(*names.split())}


def _only_picks(ctx: OpContext) -> bool:
    """Return whether the operator only selects or moves numbers."""
    return ctx.name.split(".")[0].startswith(("max_pool", "adaptive_max_pool", "pixel_", "channel_shuffle"))


@rule(*_SAMPLE_DIMS, steady=_only_picks)
def rowwise(ctx: OpContext) -> Run:
    """Run the operator with members as additional rows of the batch."""
    sample = _SAMPLE_DIMS[ctx.op]
    if ctx.varies or ctx.ndim(0) not in (sample, sample + 1):
        return once_per_member(ctx)
    op, members, batched = ctx.call, ctx.members, ctx.ndim(0) == sample + 1
    tiles = _pooling_tiles(ctx) if batched else None
    if tiles is not None and ctx.device.type == "cuda":
        pooling.prepare(ctx.out.dtype, ctx.meta(0).shape[1:], tiles)

    def unfolded(value: Any) -> Any:
        return unfold(value, members) if batched and isinstance(value, Tensor) else value

    def run(x: Tensor, *rest: Any) -> Any:
        if tiles is not None and not is_traced() and pooling.suits(images := fold(x), tiles):
            return unfold(pooling.MaxPool.apply(images, tiles), members)  # type: ignore[no-untyped-call]
        out = op(fold(x) if batched else x, *rest)
        return tuple(unfolded(value) for value in out) if isinstance(out, tuple) else unfolded(out)

    return run


def _pooling_tiles(ctx: OpContext) -> tuple[int, int] | None:
    """Return the window size of a max pooling whose windows neither overlap nor leave gaps; else None."""
    if ctx.op is not aten.max_pool2d.default:
        return None
    _, size, stride, padding, dilation, ceil = ctx.args
    height, width = _per_dim(size, 2)
    plain = _per_dim(padding, 2) == (0, 0) and _per_dim(dilation, 2) == (1, 1) and not ceil
    return (height, width) if plain and (not stride or _per_dim(stride, 2) == (height, width)) else None
