"""Look-ups: the members' tables become one long table."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.engine.rules._registry import in_full_precision, once_per_member, rule
from shoal.engine.rules.op_context import NotStackable, Run, Site

aten = torch.ops.aten

ALONE = (aten.embedding_renorm_.default,)
"""Operators whose rule also serves a member that runs alone."""


@rule(aten.embedding.default, steady=in_full_precision)
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
    """On a GPU for all members at once, and for one alone too: torch's kernel there scales a row once or twice where a
    batch has its index twice, as the timing of its blocks will have it."""
    if site.device.type == "cpu" or (site.members and not site.stacked(0)):
        return once_per_member(site) if site.members else site.call
    has_index = site.stacked(1)

    def run(weight: Tensor, indices: Tensor, max_norm: float, norm_type: float) -> Tensor:
        wide = weight if site.members else weight.unsqueeze(0)  # [M, R, D]
        index = indices.reshape(wide.shape[0], -1) if has_index else indices.reshape(1, -1).expand(wide.shape[0], -1)
        norm = torch.linalg.vector_norm(wide, norm_type, dim=2)
        read = torch.zeros_like(norm, dtype=torch.bool).scatter(1, index, True)
        factor = torch.where(read & (norm > max_norm), max_norm / (norm + 1e-7), 1.0)
        return weight.mul_(factor.to(weight.dtype).view(*weight.shape[:-1], 1))

    return run
