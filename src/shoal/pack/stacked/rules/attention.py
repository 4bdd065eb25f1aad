"""Scaled dot-product attention: members are more rows of the batch."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.pack.stacked.rules._registry import numbers_of, once_per_member, rule
from shoal.pack.stacked.rules.linear import batched, widened
from shoal.pack.stacked.site import NotStackable, Run, Site, fold, pad_dims, unfold
from shoal.randomness import Draw

aten = torch.ops.aten


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
        root = math.sqrt(1 / math.sqrt(q.shape[-1]) if scale is None else scale)
        if causal:
            mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        weights = batched(q * root, k.mT * root)
        if mask is not None:
            mask = pad_dims(mask, mask_ndim, ndim) if flags[3] else mask
            if mask.dtype == torch.bool:
                mask = torch.zeros_like(mask, dtype=weights.dtype).masked_fill_(mask.logical_not(), -math.inf)
            weights = weights + mask
        return batched(torch.softmax(weights, -1) * draw(), v)

    return run
