"""Scaled dot-product attention: members are more rows of the batch."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.pack.stacked.rules._product import product
from shoal.pack.stacked.rules._registry import numbers_of, once_per_member, rule
from shoal.pack.stacked.rules.linear import batched, widened
from shoal.pack.stacked.site import NotStackable, Run, Site, fold, pad_dims, unfold
from shoal.randomness import Draw

aten = torch.ops.aten

_WHOLE = (torch.float32, torch.float64)


@rule(aten.scaled_dot_product_attention.default)
def attention(site: Site) -> Run:
    drops = any(p > 0 for p in numbers_of(site.args[4], max(site.members, 1)))
    if drops:
        return _with_dropout(site)
    if not site.members:
        return site.call
    ndim = site.ndim(0)
    if ndim < 3 or site.varies:
        return once_per_member(site)
    members, flags = site.members, [site.stacked(i) for i in range(3)]
    has_mask = site.args[3] is not None
    mask_stacked, mask_ndim = has_mask and site.stacked(3), site.ndim(3) if has_mask else 0

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


def _with_dropout(site: Site) -> Run:
    """Attention with dropout on its weights, as torch's own reference computes it, with the member's own draws."""
    q_meta, k_meta = site.meta(0), site.meta(1)
    if site.args[7] if len(site.args) > 7 else False:
        raise NotStackable("attention with dropout and grouped queries")
    members = site.members
    p = numbers_of(site.args[4], max(members, 1))
    shape = (*q_meta.shape[:-1], k_meta.shape[-2])
    draw = site.draw(Draw("dropout", shape, site.out.dtype, None, tuple((value,) for value in p)))
    has_mask = site.args[3] is not None
    lead = 1 if members else 0
    flags = [bool(members) and site.args[i] is not None and site.stacked(i) for i in range(4)]
    mask_ndim = site.ndim(3) if has_mask else 0
    ndim = q_meta.dim()

    def run(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, _p: Any, causal: bool, scale: float | None = None, *_: Any
    ) -> Tensor:
        if lead:
            q, k, v = (widened(x, flag, members) for x, flag in zip((q, k, v), flags[:3], strict=True))
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        if causal:
            mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        if mask is not None:
            mask = pad_dims(mask, mask_ndim, ndim) if flags[3] else mask
            if mask.dtype == torch.bool:
                mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask.logical_not(), -math.inf)
        known = mask is None or not mask.requires_grad
        if known and q.dtype in _WHOLE and not torch.is_autocast_enabled(q.device.type):
            out: Tensor = Attention.apply(q, k, v, mask, draw(), scale)  # type: ignore[no-untyped-call]
            return out
        weights = batched(q * math.sqrt(scale), k.mT * math.sqrt(scale))
        weights = weights if mask is None else weights + mask.to(weights.dtype)
        return batched(torch.softmax(weights, -1) * draw(), v)

    return run


class Attention(torch.autograd.Function):
    """Softmax of scaled products, some of it dropped, times the values; with few operators both ways."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kept: Tensor, scale: float) -> Tensor:
        queries, keys, values = (x.flatten(0, -3) for x in (q, k, v))
        weights = _times(queries, keys.mT).mul_(scale).view(*q.shape[:-1], k.shape[-2])
        share = torch.softmax(weights if mask is None else weights.add_(mask), -1)
        rest = share * kept
        ctx.save_for_backward(queries, keys, values, share, kept, rest)
        ctx.scale, ctx.shapes = scale, (q.shape, k.shape, v.shape)
        return _times(rest.flatten(0, -3), values).view(*q.shape[:-1], v.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        queries, keys, values, share, kept, rest = ctx.saved_tensors
        of_q, of_k, of_v, *_ = ctx.needs_input_grad
        shapes = ctx.shapes
        grad = grads[0].flatten(0, -3)
        of_weights = share
        if of_q or of_k:
            of_share = _times(grad, values.mT).view(share.shape) * kept
            of_weights = aten._softmax_backward_data(of_share, share, -1, share.dtype).mul_(ctx.scale).flatten(0, -3)
        return (
            _times(of_weights, keys).view(shapes[0]) if of_q else None,
            _times(of_weights.mT, queries).view(shapes[1]) if of_k else None,
            _times(rest.flatten(0, -3).mT, grad).view(shapes[2]) if of_v else None,
            None, None, None,
        )  # fmt: skip


def _times(a_NTK: Tensor, b_NKS: Tensor) -> Tensor:
    return product(a_NTK, b_NKS) if a_NTK.device.type == "cpu" else torch.bmm(a_NTK, b_NKS)
