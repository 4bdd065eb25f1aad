"""Normalisation layers. Every member has its own statistics, affine parameters and running averages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.engine.kernels import channel_sums
from shoal.engine.kernels import layer_norm as row_norm
from shoal.engine.optim.compile_fence import is_traced
from shoal.engine.rules import op_context
from shoal.engine.rules._linear import widened
from shoal.engine.rules._registry import numbers_of, once_per_member, rule
from shoal.engine.rules.op_context import OpContext, Run, fold, meta_of, pad_dims, unfold

aten = torch.ops.aten


@rule(aten.layer_norm.default)
def layer_norm(ctx: OpContext) -> Run:
    """Normalise the rows of all members in one call, then apply each member's scale and shift."""
    if ctx.varies or not ctx.stacked(0):
        return once_per_member(ctx)
    ndim, flags = ctx.ndim(0), [value is not None and ctx.stacked(i) for i, value in enumerate(ctx.args)]
    members, dtype = ctx.members, ctx.out.dtype
    if ctx.device.type == "cuda":
        _prepare_layer_norm(ctx)

    def rows_of(value: Tensor | None, index: int, size: int) -> Tensor | None:
        return None if value is None else widened(value, flags[index], members).reshape(members, size)

    def run(x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float, *_: Any) -> Tensor:
        size = math.prod(shape)
        if not is_traced() and row_norm.suits(x, size, weight, bias, eps):
            rows = x.reshape(members, -1, size).contiguous()
            affine = rows_of(weight, 2, size), rows_of(bias, 3, size)
            out = row_norm.LayerNorm.apply(rows, *affine, eps, x.dtype == dtype)  # type: ignore[no-untyped-call]
            normalised: Tensor = out.view(x.shape)
            return normalised
        out = F.layer_norm(_to_float(x), shape, None, None, eps)
        if weight is not None:
            out = out * (pad_dims(weight, len(shape), ndim) if flags[2] else weight)
        if bias is not None:
            out = out + (pad_dims(bias, len(shape), ndim) if flags[3] else bias)
        return out

    return run


def _prepare_layer_norm(ctx: OpContext) -> None:
    """Start to compile the kernels for the dtypes of the trace; where the result has full precision, so have the
    arguments, see `_registry.in_own_dtype`."""
    _, shape, weight, bias, eps, *_ = ctx.args
    dtype = ctx.out.dtype
    affine = [None if value is None else torch.promote_types(meta_of(value).dtype, dtype) for value in (weight, bias)]
    row_norm.prepare(dtype, math.prod(shape), affine[0], affine[1], eps)


@rule(aten.rms_norm.default)
def rms_norm(ctx: OpContext) -> Run:
    if ctx.varies or not ctx.stacked(0):
        return once_per_member(ctx)
    ndim, has_w = ctx.ndim(0), ctx.args[2] is not None and ctx.stacked(2)

    def run(x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> Tensor:
        out = F.rms_norm(_to_float(x), shape, None, eps)
        if weight is None:
            return out
        return out * (pad_dims(weight, len(shape), ndim) if has_w else weight)

    return run


@rule(aten.group_norm.default)
def group_norm(ctx: OpContext) -> Run:
    if ctx.varies or not ctx.stacked(0):
        return once_per_member(ctx)
    members, ndim = ctx.members, ctx.ndim(0)
    flags = [value is not None and ctx.stacked(i) for i, value in enumerate(ctx.args)]

    def run(x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, *_: Any) -> Tensor:
        out = unfold(F.group_norm(fold(_to_float(x)), groups, None, None, eps), members)
        if weight is not None:
            out = out * _channel(weight, flags[2], ndim)
        if bias is not None:
            out = out + _channel(bias, flags[3], ndim)
        return out

    return run


def _to_float(x: Tensor) -> Tensor:
    """Convert half precision to float32, so that the result is rounded once, as inside the operator;
    `_registry.in_own_dtype` converts it back."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _channel(value: Tensor, stacked: bool, ndim: int) -> Tensor:
    """Reshape [M, C] or [C] to broadcast against [M, B, C, ...]."""
    return value.reshape(value.shape[0] if stacked else 1, 1, -1, *[1] * (ndim - 2))


@rule(aten.batch_norm.default, aten.instance_norm.default, steady=True)
def batch_norm(ctx: OpContext) -> Run:
    """On a CPU, call the operator once per member; on a GPU, compute statistics over [M, C] at once, in operators that
    can be fused."""
    if op_context.one_by_one(ctx) or ctx.op is aten.instance_norm.default or not ctx.stacked(0) or ctx.ndim(0) < 2:
        return once_per_member_in_place(ctx)
    members, ndim = ctx.members, ctx.ndim(0)
    momentum = torch.tensor(numbers_of(ctx.args[6], members), dtype=torch.float64, device=ctx.device).view(-1, 1)
    eps = torch.tensor(numbers_of(ctx.args[7], members), dtype=torch.float64, device=ctx.device).view(
        -1, 1, 1, *[1] * (ndim - 2)
    )
    flags = [value is not None and ctx.stacked(i) for i, value in enumerate(ctx.args)]
    axes = [1, *range(3, ndim + 1)]
    dtype = ctx.out.dtype

    channel_sums.prepare(dtype, ctx.meta(0).shape[1])

    def update_running(mean: Tensor | None, var: Tensor | None, m: Tensor, v: Tensor, count: int) -> None:
        """Update the running averages."""
        if mean is not None and var is not None:
            with torch.no_grad():
                mean.lerp_(m.detach().reshape(mean.shape).to(mean.dtype), momentum.to(mean.dtype))
                unbiased = v.detach().reshape(var.shape) * (count / (count - 1))
                var.lerp_(unbiased.to(var.dtype), momentum.to(var.dtype))

    def run(x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *_: Any) -> Tensor:
        from_batch = training or mean is None
        count = x[0, :, 0].numel()
        if from_batch and not is_traced() and channel_sums.suits(x):
            weight = None if weight is None else widened(weight, flags[1], members)
            bias = None if bias is None else widened(bias, flags[2], members)
            out, m, v = BatchNorm.apply(x, weight, bias, eps.view(-1, 1))  # type: ignore[no-untyped-call]
            update_running(mean, var, m, v, count)
            normalised: Tensor = out
            return normalised
        x_float = _to_float(x)
        if from_batch:
            v, m = torch.var_mean(x_float, axes, correction=0, keepdim=True)
            update_running(mean, var, m, v, count)
        else:
            m, v = _channel(mean, flags[3], ndim), _channel(var, flags[4], ndim)
        out = (x_float - m) * torch.rsqrt(v + eps.to(v.dtype))
        if weight is not None:
            out = out * _channel(weight, flags[1], ndim)
        if bias is not None:
            out = out + _channel(bias, flags[2], ndim)
        in_own_dtype: Tensor = out.to(dtype)
        return in_own_dtype

    return run


class BatchNorm(torch.autograd.Function):
    """Batch norm of [M, B, C, ...] by the batch's statistics, with channels last in memory.

    It needs three passes over the input forward, and two backward. It returns the result, and mean and variance [M, C].
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: Tensor) -> tuple[Tensor, ...]:
        rows = channel_sums.rows_of(x)
        count = rows.shape[1]
        mean = channel_sums.channel_sums(rows, None, None)[0] / count
        off, squares = channel_sums.channel_sums(rows, None, mean).unbind(0)
        var = squares / count - (off / count).square()
        scale = torch.rsqrt(var + eps.to(var.dtype))
        ctx.save_for_backward(x, weight, bias, eps, mean, scale)
        ctx.mark_non_differentiable(mean, var)
        out = (_to_float(x) - _channel(mean, True, x.dim() - 1)) * _channel(scale, True, x.dim() - 1)
        if weight is not None:
            out = out * _channel(weight, True, x.dim() - 1)
        if bias is not None:
            out = out + _channel(bias, True, x.dim() - 1)
        return out.to(x.dtype), mean, var

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x, weight, bias, eps, mean, scale = ctx.saved_tensors
        if torch.is_grad_enabled():  # double backward
            return _gradients_by_autograd(x, weight, bias, eps, grads[0], ctx.needs_input_grad)
        grad = grads[0].to(x.dtype).movedim(2, -1).contiguous().movedim(-1, 2)
        rows, rows_of_grad = channel_sums.rows_of(x), channel_sums.rows_of(grad)
        grad_sum, centered_sum = channel_sums.channel_sums(rows, rows_of_grad, mean).unbind(0)
        count, ndim = rows.shape[1], x.dim() - 1
        factor = scale if weight is None else scale * weight
        slope = centered_sum * scale.square() / count
        centered = _to_float(x) - _channel(mean, True, ndim)
        inner = _to_float(grad) - _channel(grad_sum / count, True, ndim) - centered * _channel(slope, True, ndim)
        return (
            (inner * _channel(factor, True, ndim)).to(x.dtype),
            None if weight is None else (centered_sum * scale).to(weight.dtype),
            None if bias is None else grad_sum.to(bias.dtype),
            None,
        )


def _gradients_by_autograd(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: Tensor, grad: Tensor, needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Return gradients that can be differentiated again."""
    ndim = x.dim() - 1
    v, m = torch.var_mean(_to_float(x), [1, *range(3, ndim + 1)], correction=0, keepdim=True)
    out = (_to_float(x) - m) * torch.rsqrt(v + _channel(eps.to(v.dtype), True, ndim))
    out = out if weight is None else out * _channel(weight, True, ndim)
    out = out if bias is None else out + _channel(bias, True, ndim)
    inputs = [t for t, need in zip((x, weight, bias), needed, strict=False) if need and t is not None]
    grads = iter(torch.autograd.grad(out, inputs, grad.to(out.dtype), create_graph=True))
    return (*(next(grads) if need else None for need in needed[:3]), None)


def once_per_member_in_place(ctx: OpContext) -> Run:
    """Call the operator once per member. It writes the running averages although its schema does not say so."""
    members, op = ctx.members, ctx.call
    flags = [value is not None and ctx.stacked(i) for i, value in enumerate(ctx.args)]
    columns = [numbers_of(value, members) if i > 4 else None for i, value in enumerate(ctx.args)]

    def run(*args: Any) -> Tensor:
        per_member_args = [
            widened(value, flags[i], members).unbind(0)
            if isinstance(value, Tensor)
            else columns[i] or (value,) * members
            for i, value in enumerate(args)
        ]
        return torch.stack([op(*[column[m] for column in per_member_args]) for m in range(members)])

    return run
