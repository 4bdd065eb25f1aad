"""Losses: computed element by element for all members at once, then reduced over each member's elements."""

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

# operator -> the index of its `reduction` argument
_ELEMENTWISE = {
    aten.mse_loss.default: 2, aten.l1_loss.default: 2, aten.smooth_l1_loss.default: 2, aten.huber_loss.default: 2,
    aten.soft_margin_loss.default: 2, aten.kl_div.default: 2, aten.binary_cross_entropy.default: 3,
    aten.binary_cross_entropy_with_logits.default: 4, aten.poisson_nll_loss.default: 5,
}  # fmt: skip


def _is_steady(ctx: OpContext) -> bool:
    """Return whether this is a plain difference, or its square, of tensors of one shape."""
    plain = ctx.op in (aten.mse_loss.default, aten.l1_loss.default) and ctx.meta(0).shape == ctx.meta(1).shape
    return plain and in_full_precision(ctx)


@rule(*_ELEMENTWISE, steady=_is_steady)
def elementwise(ctx: OpContext) -> Run:
    """Stack a loss that is computed element by element."""
    reduction_index = _ELEMENTWISE[ctx.op]
    reduction = ctx.args[reduction_index]
    if ctx.varies or not (ctx.stacked(0) or ctx.stacked(1)):
        return once_per_member(ctx)
    members, op = ctx.members, ctx.call
    tensors = [(i, ctx.stacked(i), ctx.ndim(i)) for i in range(min(reduction_index, 4)) if hasattr(ctx.args[i], "meta")]
    most_dims = max(ndim for _, _, ndim in tensors)

    def run(*args: Any) -> Tensor:
        values = list(args)
        for i, stacked, ndim in tensors:
            values[i] = pad_dims(widened(values[i], stacked, members), ndim, most_dims)
        values[reduction_index] = _NONE
        loss = op(*values)
        return _reduced(loss.contiguous() if ctx.deterministic else loss, reduction)

    return run


def _reduced(values: Tensor, reduction: int) -> Tensor:
    """Reduce over all dimensions but the member axis."""
    if reduction == _NONE:
        return values
    over = dims(None, values.dim() - 1)
    if not over:
        return values
    return values.mean(over) if reduction == _MEAN else values.sum(over)


@rule(aten.cross_entropy_loss.default, aten.nll_loss_nd.default, steady=in_full_precision)
def cross_entropy(ctx: OpContext) -> Run:
    """Stack a cross entropy with class indices: all members' rows in one call, then each member's mean over its counted
    rows."""
    args = (*ctx.args, 0.0)[:6]
    logits, target, smoothing = ctx.meta(0), ctx.meta(1), args[5]
    if target.dtype.is_floating_point or logits.dim() < 2 or not ctx.stacked(0):
        return once_per_member(ctx)
    members, reduction, ignore = ctx.members, args[3], args[4]
    flags = (ctx.stacked(1), args[2] is not None and ctx.stacked(2))
    takes_log_probs = ctx.op is aten.nll_loss_nd.default
    direct = ctx.device.type == "cpu" and logits.dim() == 2 and reduction in (_MEAN, _SUM) and smoothing == 0.0

    def run(x: Tensor, y: Tensor, weight: Tensor | None, *_: Any) -> Tensor:
        y = widened(y, flags[0], members)
        if direct and not takes_log_probs and weight is None and not torch.is_autocast_enabled("cpu"):
            loss: Tensor = _CrossEntropy.apply(x, y, ignore, reduction)  # type: ignore[no-untyped-call]
            return loss
        log_probs = x if takes_log_probs else _log_softmax(x)
        counted = y != ignore
        index = torch.where(counted, y, 0).unsqueeze(2)
        class_weights = None if weight is None else widened(weight, flags[1], members)  # [M, C]
        weights = counted.to(log_probs.dtype) if class_weights is None else _weights(class_weights, index, counted)
        rows = -log_probs.gather(2, index).squeeze(2) * weights
        if smoothing == 0.0:
            return _averaged(rows, weights, reduction)
        smooth = (
            log_probs
            if class_weights is None
            else log_probs * class_weights.reshape(members, 1, -1, *[1] * (log_probs.dim() - 3))
        )
        over_classes = -smooth.sum(2) * counted
        classes = log_probs.shape[2]
        plain, extra = _averaged(rows, weights, reduction), _averaged(over_classes, weights, reduction)
        return _smoothed(plain, extra, smoothing, classes)

    if not ctx.deterministic and not flags[1] and reduction == _NONE and smoothing == 0.0 and not takes_log_probs:
        return lambda x, y, weight, *_: unfold(
            F.cross_entropy(
                fold(x), fold(widened(y, flags[0], members)), weight, reduction="none", ignore_index=ignore
            ),
            members,
        )
    return run


class _CrossEntropy(torch.autograd.Function):
    """The mean or sum over each member's rows [M, B, C].

    It has the same bits as the operators in `cross_entropy`, with fewer calls: they would take a quarter of a small
    network's step.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, ignore: int, reduction: int) -> Tensor:
        axis = 1 if _classes_first(x) else 2
        log_probs = F.log_softmax(x.transpose(1, 2).contiguous() if axis == 1 else x, axis)
        counted = y != ignore
        index = torch.where(counted, y, 0).unsqueeze(axis)
        share = counted.to(x.dtype)
        total = (-log_probs.gather(axis, index).squeeze(axis) * share).sum(1)
        count = share.sum(1) if reduction == _MEAN else None
        ctx.axis = axis
        ctx.save_for_backward(log_probs, index, share, count)
        return total if count is None else total / count

    @staticmethod
    @once_differentiable  # for double backward the first backward pass is in the graph
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        log_probs, index, share, count = ctx.saved_tensors
        of_total = grads[0] if count is None else grads[0] / count
        rows = (of_total.unsqueeze(1) * share).neg().unsqueeze(ctx.axis)
        of_log_probs = torch.zeros_like(log_probs).scatter_add_(ctx.axis, index, rows)
        of_x = aten._log_softmax_backward_data(of_log_probs, log_probs, ctx.axis, log_probs.dtype)
        return of_x.transpose(1, 2) if ctx.axis == 1 else of_x, None, None, None


def _classes_first(x: Tensor) -> bool:
    """Return whether to move the classes away from the last dimension.

    With fewer classes than a CPU vector holds, torch is much slower along the last dimension than along another one,
    even with the copy.
    """
    return x.dim() == 3 and x.shape[2] < FEW_CLASSES and x.device.type == "cpu"


def _log_softmax(x: Tensor) -> Tensor:
    """Return log_softmax over the classes of [M, B, C, ...]."""
    if not _classes_first(x):
        return F.log_softmax(x, 2)
    return F.log_softmax(x.transpose(1, 2).contiguous(), 1).transpose(1, 2)


def _smoothed(target_loss: Tensor, class_losses: Tensor, smoothing: float | PerMember, classes: int) -> Tensor:
    """Return the label-smoothed loss, from the loss against the target and the loss summed over all classes."""
    if not isinstance(smoothing, PerMember):
        mixed: Tensor = (1.0 - smoothing) * target_loss + class_losses * (smoothing / classes)
        return mixed

    def column(values: list[Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=target_loss.device).view(-1, *[1] * (target_loss.dim() - 1))

    target_share = column([1.0 - value for value in smoothing.values], target_loss.dtype)
    class_share = column([value / classes for value in smoothing.values], target_loss.dtype)
    unsmoothed = column([value == 0.0 for value in smoothing.values], torch.bool)
    return torch.where(unsmoothed, target_loss, target_share * target_loss + class_losses * class_share)


def _weights(class_weights: Tensor, index: Tensor, counted: Tensor) -> Tensor:
    """Return the class weight of every row's target; 0 if the row does not count."""
    rows = class_weights.gather(1, index.reshape(index.shape[0], -1)).reshape(counted.shape)
    return rows * counted


def _averaged(rows: Tensor, share: Tensor, reduction: int) -> Tensor:
    """Reduce the rows of each member; the mean is weighted by `share`."""
    if reduction == _NONE:
        return rows
    over = list(range(1, rows.dim()))
    total = rows.sum(over)
    return total if reduction == _SUM else total / share.sum(over)
