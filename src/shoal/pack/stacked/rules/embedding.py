"""Look-ups: the members' tables become one long table."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.pack.stacked.rules._registry import once_per_member, rule
from shoal.pack.stacked.site import NotStackable, Run, Site

aten = torch.ops.aten


@rule(aten.embedding.default)
def embedding(site: Site) -> Run:
    weight_stacked = site.stacked(0)
    _, _, padding, by_frequency, sparse = site.args
    if sparse:
        raise NotStackable("an Embedding with sparse gradients")
    if by_frequency or not weight_stacked:
        return once_per_member(site)
    members, rows = site.members, site.meta(0).shape[0]
    ndim = site.ndim(1)
    offset = (torch.arange(members, device=site.device) * rows).view(-1, *[1] * ndim)

    def run(weight: Tensor, indices: Tensor, *_: Any) -> Tensor:
        outside = (indices < 0) | (indices >= rows)  # must raise as it does alone, not read the next member's table
        out = F.embedding(torch.where(outside, members * rows, indices + offset), weight.flatten(0, 1))
        if padding >= 0:  # that row is read but never trained
            blank = (indices == padding).unsqueeze(-1)
            out = torch.where(blank, out.detach(), out)
        return out

    return run


@rule(aten.embedding_renorm_.default)
def embedding_renorm(site: Site) -> Run:
    return once_per_member(site)
