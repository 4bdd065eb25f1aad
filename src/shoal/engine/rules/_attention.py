"""Scaled dot-product attention: members are additional rows of the batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.engine.kernels import attention as kernels
from shoal.engine.rules._linear import batched, widened
from shoal.engine.rules._per_member import spread
from shoal.engine.rules._product import product
from shoal.engine.rules._registry import in_full_precision, numbers_of, once_per_member, rule
from shoal.engine.rules.op_context import NotStackable, OpContext, Run, fold, pad_dims, unfold
from shoal.engine.tracing.signature import PerMember
from shoal.utils.randomness import Draw, DrawSource

aten = torch.ops.aten

_WHOLE = (torch.float32, torch.float64)


@rule(aten.scaled_dot_product_attention.default, steady=True)
def attention(ctx: OpContext) -> Run:
    """Use torch's operator with the members' batches joined, and plain operators if there is dropout.

    With `deterministic` it always uses plain operators, since other members of the stack may have dropout.
    """
    drops = any(p > 0 for p in numbers_of(ctx.args[4], max(ctx.members, 1)))
    steady = ctx.deterministic and ctx.members > 0
    if steady and not in_full_precision(ctx):
        if drops:
            raise NotStackable("attention with dropout in half precision, with bits that must not depend on others")
        return once_per_member(ctx)
    if drops or steady:
        return _plain_attention(ctx, drops)
    if not ctx.members:
        return ctx.call
    ndim = ctx.ndim(0)
    same_leading = len({tuple(ctx.meta(i).shape[:-2]) for i in range(3)}) == 1 or ctx.args[7]
    if ndim < 3 or ctx.varies or not same_leading:
        return once_per_member(ctx)
    members, flags = ctx.members, [ctx.stacked(i) for i in range(3)]
    has_mask = ctx.args[3] is not None
    mask_stacked, mask_ndim = has_mask and ctx.stacked(3), ctx.ndim(3) if has_mask else 0

    def run(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: Any, causal: bool, *rest: Any, **named: Any
    ) -> Tensor:
        q, k, v = (fold(widened(x, flag, members)) for x, flag in zip((q, k, v), flags, strict=True))
        if mask is not None and (mask_stacked or mask_ndim == ndim):
            mask = pad_dims(widened(mask, mask_stacked, members), mask_ndim, ndim)
            mask = fold(mask.expand(members, q.shape[0] // members, *mask.shape[2:]))
        scale, gqa = (*rest, None, False)[:2]
        out = F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=bool(gqa))
        return unfold(out, members)

    return run


def _plain_attention(ctx: OpContext, drops: bool) -> Run:
    """Compute attention like torch's reference, with each member's own random draws for dropout."""
    members, grouped = ctx.members, bool(ctx.args[7])
    q_meta, k_meta, v_meta = (ctx.meta(i) for i in range(3))
    ndim = q_meta.dim()
    if not members and ndim < 3:
        raise NotStackable("attention with dropout on rows that are not in a batch")
    p = numbers_of(ctx.args[4], max(members, 1))
    shape = (*ctx.out.shape[:-1], k_meta.shape[-2])
    draw = ctx.draw(Draw("dropout", shape, ctx.out.dtype, None, tuple((v,) for v in p))) if drops else None
    flags = [bool(members) and ctx.args[i] is not None and ctx.stacked(i) for i in range(4)]
    mask_ndim = ctx.ndim(3) if ctx.args[3] is not None else 0
    scale = _scale(ctx)
    repeats = [1, *(q_meta.shape[-3] // meta.shape[-3] if grouped else 1 for meta in (k_meta, v_meta))]

    softmax = _softmax if ctx.args[3] is None else _masked_softmax
    kernel = _kernel(ctx, shape) if drops else None
    if kernel is not None:
        kernels.prepare(kernel, ctx.device)

    def expand_leading(x: Tensor, ndim_of_x: int, times: int) -> Tensor:
        """Expand all leading dimensions to those of the result; heads that queries share are repeated."""
        x = x.repeat_interleave(times, -3) if times > 1 else x
        x = pad_dims(x, ndim_of_x, len(shape)) if members else x
        wide = (*([members] if members else []), *shape[:-2], *x.shape[-2:])
        return x if x.shape == wide else x.expand(wide)

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, _p: Any, causal: bool, *_: Any) -> Tensor:
        if members:
            q, k, v = (widened(x, flag, members) for x, flag in zip((q, k, v), flags[:3], strict=True))
        constant_mask = mask is None or not mask.requires_grad
        source = draw.source() if kernel is not None and draw is not None and constant_mask else None
        if kernel is not None and source is not None and kernels.ready(kernel, ctx.device):
            if mask is not None:
                mask = pad_dims(mask, mask_ndim, len(shape)) if flags[3] else mask
                mask = _additive(mask, kernel.dtype).expand(*([members] if members else []), *shape)
            return _by_kernel(kernel, q, k, v, mask, source, scale, members)
        dims = (ndim, k_meta.dim(), v_meta.dim())
        q, k, v = (
            expand_leading(x, ndim_of_x, times) for x, ndim_of_x, times in zip((q, k, v), dims, repeats, strict=True)
        )
        if causal:
            mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        if mask is not None:
            mask = pad_dims(mask, mask_ndim, len(shape)) if flags[3] else mask
            mask = _additive(mask, q.dtype) if mask.dtype == torch.bool else mask
        dropout = None if draw is None else draw()
        if constant_mask and q.dtype in _WHOLE and not torch.is_autocast_enabled(q.device.type):
            out: Tensor = Attention.apply(q, k, v, mask, dropout, scale, softmax)  # type: ignore[no-untyped-call]
            return out
        if mask is not None and ctx.deterministic:
            mask = spread(mask, shape) if flags[3] else mask
        root = scale**0.5
        weights = batched(q * root, k.mT * root)
        weights = weights if mask is None else weights + mask.to(weights.dtype)
        share = softmax(weights)
        return batched(share if dropout is None else share * dropout, v)

    return run


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask as numbers to add, in which what a boolean mask leaves out is minus infinity."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), -math.inf)


def _kernel(ctx: OpContext, weights: tuple[int, ...]) -> kernels.Shape | None:
    """Return the shape of the kernels that compute this attention with dropout, or None if there are none.

    Args:
        weights: The shape of one member's products of queries and keys.
    """
    q, k, v = (ctx.meta(i) for i in range(3))
    plain = len({tuple(x.shape[:-2]) for x in (q, k, v)}) == 1 and q.dim() in (3, 4)
    if not plain or v.shape[-1] != q.shape[-1] or isinstance(ctx.args[6], PerMember):
        return None
    has_mask = ctx.args[3] is not None
    shape = kernels.Shape(ctx.out.dtype, q.shape[-1], q.shape[-2], k.shape[-2], bool(ctx.args[5]), has_mask)
    return shape if kernels.suits(ctx.device, shape, math.prod(weights)) else None


def _by_kernel(
    kernel: kernels.Shape, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, source: DrawSource, scale: float,
    members: int,
) -> Tensor:  # fmt: skip
    """Call the kernels on [M, B, H, T, D]."""

    def five_dims(x: Tensor) -> Tensor:
        x = x if members else x.unsqueeze(0)
        return x if x.dim() == 5 else x.unsqueeze(1)

    shape = q.shape
    q, k, v = (five_dims(x.to(kernel.dtype)) for x in (q, k, v))
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    wide = None if mask is None else five_dims(mask)
    out: Tensor = kernels.DroppedAttention.apply(q, k, v, wide, source, kernel.causal, scale)  # type: ignore[no-untyped-call]
    return out.view(shape)


def _softmax(weights: Tensor) -> Tensor:
    return torch.softmax(weights, -1)


def _masked_softmax(weights: Tensor) -> Tensor:
    """Return the softmax, with zeros instead of NaN for rows in which everything is masked, as in torch."""
    share: Tensor = aten._safe_softmax(weights, -1)
    return share


def _scale(ctx: OpContext) -> Any:
    """Return the factor of the products: a number, or a column of one number per member."""
    scale, width = ctx.args[6], ctx.meta(0).shape[-1]
    if isinstance(scale, PerMember):
        return ctx.column(scale, len(ctx.out.shape), ctx.out.dtype)
    return 1 / math.sqrt(width) if scale is None else scale


class Attention(torch.autograd.Function):
    """Softmax of scaled products with dropout, times the values, with few operators in both passes."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: Tensor | None, scale: Any,
        softmax: Callable[[Tensor], Tensor],
    ) -> Tensor:  # fmt: skip
        queries, keys, values = (x.flatten(0, -3) for x in (q, k, v))
        weights = product(queries, keys.mT).view(*q.shape[:-1], k.shape[-2]).mul_(scale)
        share = softmax(weights if mask is None else weights.add_(mask))
        dropped = share if dropout is None else share * dropout
        ctx.save_for_backward(queries, keys, values, share, dropout, dropped)
        ctx.scale, ctx.shapes = scale, (q.shape, k.shape, v.shape)
        return product(dropped.flatten(0, -3), values).view(*q.shape[:-1], v.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        queries, keys, values, share, dropout, dropped = ctx.saved_tensors
        of_q, of_k, of_v, *_ = ctx.needs_input_grad
        shapes = ctx.shapes
        grad = grads[0].flatten(0, -3)
        of_weights = share
        if of_q or of_k:
            of_share = product(grad, values.mT).view(share.shape)
            of_share = of_share if dropout is None else of_share * dropout
            of_weights = aten._softmax_backward_data(of_share, share, -1, share.dtype).mul_(ctx.scale).flatten(0, -3)
        return (
            product(of_weights, keys).view(shapes[0]) if of_q else None,
            product(of_weights.mT, queries).view(shapes[1]) if of_k else None,
            product(dropped.flatten(0, -3).mT, grad).view(shapes[2]) if of_v else None,
            None, None, None, None,
        )  # fmt: skip
