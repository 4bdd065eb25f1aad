"""Losses: computed element by element for all members at once, then reduced over each member's own elements."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.engine.rules._linear import widened
from shoal.engine.rules._registry import in_full_precision, once_per_member, rule
from shoal.engine.rules.op_context import OpContext, Run, dims, fold, pad_dims, unfold
from shoal.engine.tracing.signature import PerMember

aten = torch.ops.aten

_NONE, _MEAN, _SUM = 0, 1, 2
FEW_CLASSES = 16

# op -> the position of its `reduction` argument
_ELEMENTWISE = {
    aten.mse_loss.default: 2, aten.l1_loss.default: 2, aten.smooth_l1_loss.default: 2, aten.huber_loss.default: 2,
    aten.soft_margin_loss.default: 2, aten.kl_div.default: 2, aten.binary_cross_entropy.default: 3,
    aten.binary_cross_entropy_with_logits.default: 4, aten.poisson_nll_loss.default: 5,
}  # fmt: skip


def _is_steady(ctx: OpContext) -> bool:
    """Differences and their squares, element against element."""
    plain = ctx.op in (aten.mse_loss.default, aten.l1_loss.default) and ctx.meta(0).shape == ctx.meta(1).shape
    return plain and in_full_precision(ctx)


@rule(*_ELEMENTWISE, steady=_is_steady)
def elementwise(ctx: OpContext) -> Run:
    place = _ELEMENTWISE[ctx.op]
    reduction = ctx.args[place]
    if ctx.varies or not (ctx.stacked(0) or ctx.stacked(1)):
        return once_per_member(ctx)
    members, op = ctx.members, ctx.call
    tensors = [(i, ctx.stacked(i), ctx.ndim(i)) for i in range(min(place, 4)) if hasattr(ctx.args[i], "meta")]
    wide = max(ndim for _, _, ndim in tensors)

    def run(*args: Any) -> Tensor:
        values = list(args)
        for i, stacked, ndim in tensors:
            values[i] = pad_dims(widened(values[i], stacked, members), ndim, wide)
        values[place] = _NONE
        loss = op(*values)
        return _reduced(loss.contiguous() if ctx.deterministic else loss, reduction)

    return run


def _reduced(values: Tensor, reduction: int) -> Tensor:
    """Over everything but the member axis."""
    if reduction == _NONE:
        return values
    over = dims(None, values.dim() - 1)
    if not over:
        return values
    return values.mean(over) if reduction == _MEAN else values.sum(over)


@rule(aten.cross_entropy_loss.default, aten.nll_loss_nd.default, steady=in_full_precision)
def cross_entropy(ctx: OpContext) -> Run:
    """Class indices: rows of all members in one call, then each member's own mean over its counted rows."""
    args = (*ctx.args, 0.0)[:6]
    logits, target, smoothing = ctx.meta(0), ctx.meta(1), args[5]
    if target.dtype.is_floating_point or logits.dim() < 2 or not ctx.stacked(0):
        return once_per_member(ctx)
    members, reduction, ignore = ctx.members, args[3], args[4]
    flags = (ctx.stacked(1), args[2] is not None and ctx.stacked(2))
    logs = ctx.op is aten.nll_loss_nd.default
    direct = ctx.device.type == "cpu" and logits.dim() == 2 and reduction in (_MEAN, _SUM) and smoothing == 0.0

    def run(x: Tensor, y: Tensor, weight: Tensor | None, *_: Any) -> Tensor:
        y = widened(y, flags[0], members)
        if direct and not logs and weight is None and not torch.is_autocast_enabled("cpu"):
            loss: Tensor = _CrossEntropy.apply(x, y, ignore, reduction)  # type: ignore[no-untyped-call]
            return loss
        table = x if logs else _log_softmax(x)
        counted = y != ignore
        index = torch.where(counted, y, 0).unsqueeze(2)
        class_weights = None if weight is None else widened(weight, flags[1], members)  # [M, C]
        share = counted.to(table.dtype) if class_weights is None else _weights(class_weights, index, counted)
        rows = -table.gather(2, index).squeeze(2) * share
        if smoothing == 0.0:
            return _averaged(rows, share, reduction)
        smooth = (
            table if class_weights is None else table * class_weights.reshape(members, 1, -1, *[1] * (table.dim() - 3))
        )
        spread = -smooth.sum(2) * counted
        classes = table.shape[2]
        plain, extra = _averaged(rows, share, reduction), _averaged(spread, share, reduction)
        return _mixed(plain, extra, smoothing, classes)

    if not ctx.deterministic and not flags[1] and reduction == _NONE and smoothing == 0.0 and not logs:
        return lambda x, y, weight, *_: unfold(
            F.cross_entropy(
                fold(x), fold(widened(y, flags[0], members)), weight, reduction="none", ignore_index=ignore
            ),
            members,
        )
    return run


class _CrossEntropy(torch.autograd.Function):
    """The mean or sum over each member's rows [M, B, C], bit for bit as by the operators in `cross_entropy`, of which a
    small network's step would spend a quarter of its time in calls."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, ignore: int, reduction: int) -> Tensor:
        axis = 1 if _across(x) else 2
        table = F.log_softmax(x.transpose(1, 2).contiguous() if axis == 1 else x, axis)
        counted = y != ignore
        index = torch.where(counted, y, 0).unsqueeze(axis)
        share = counted.to(x.dtype)
        total = (-table.gather(axis, index).squeeze(axis) * share).sum(1)
        count = share.sum(1) if reduction == _MEAN else None
        ctx.axis = axis
        ctx.save_for_backward(table, index, share, count)
        return total if count is None else total / count

    @staticmethod
    @once_differentiable  # a step that differentiates twice has its first backward pass in the graph
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        table, index, share, count = ctx.saved_tensors
        each = grads[0] if count is None else grads[0] / count
        rows = (each.unsqueeze(1) * share).neg().unsqueeze(ctx.axis)
        of_table = torch.zeros_like(table).scatter_add_(ctx.axis, index, rows)
        of_x = aten._log_softmax_backward_data(of_table, table, ctx.axis, table.dtype)
        return of_x.transpose(1, 2) if ctx.axis == 1 else of_x, None, None, None


def _across(x: Tensor) -> bool:
    """Whether classes are better not the last dimension: with fewer of them than a vector of the CPU holds, torch is
    much slower along the last dimension than along another one, a copy included."""
    return x.dim() == 3 and x.shape[2] < FEW_CLASSES and x.device.type == "cpu"


def _log_softmax(x: Tensor) -> Tensor:
    """Over the classes [M, B, C, ...]."""
    if not _across(x):
        return F.log_softmax(x, 2)
    return F.log_softmax(x.transpose(1, 2).contiguous(), 1).transpose(1, 2)


def _mixed(plain: Tensor, extra: Tensor, smoothing: float | PerMember, classes: int) -> Tensor:
    """So much of the loss against the target, and the rest against every class."""
    if not isinstance(smoothing, PerMember):
        mixed: Tensor = (1.0 - smoothing) * plain + extra * (smoothing / classes)
        return mixed

    def column(values: list[Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=plain.device).view(-1, *[1] * (plain.dim() - 1))

    keep = column([1.0 - value for value in smoothing.values], plain.dtype)
    rest = column([value / classes for value in smoothing.values], plain.dtype)
    none = column([value == 0.0 for value in smoothing.values], torch.bool)
    return torch.where(none, plain, keep * plain + extra * rest)


def _weights(class_weights: Tensor, index: Tensor, counted: Tensor) -> Tensor:
    """The class weight of every row's target; 0 where the row does not count."""
    rows = class_weights.gather(1, index.reshape(index.shape[0], -1)).reshape(counted.shape)
    return rows * counted


def _averaged(rows: Tensor, share: Tensor, reduction: int) -> Tensor:
    if reduction == _NONE:
        return rows
    over = list(range(1, rows.dim()))
    total = rows.sum(over)
    return total if reduction == _SUM else total / share.sum(over)
