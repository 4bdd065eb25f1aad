"""Matrix products become one batched product over the members. Embeddings become a lookup in one long table."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.engine.kernels import row_sums
from shoal.engine.rules._product import Linear, Product, RowBias
from shoal.engine.rules._registry import general, in_full_precision, once_per_member, rule
from shoal.engine.rules.op_context import NotStackable, OpContext, Run, pad_dims

aten = torch.ops.aten

ALONE = (aten.embedding_renorm_.default,)
"""Operators whose rule is also used for a member that runs alone."""


def widened(x: Tensor, stacked: bool, members: int) -> Tensor:
    """Give a shared tensor a member axis, without a copy."""
    return x if stacked else x.unsqueeze(0).expand(members, *x.shape)


def as_rows(x: Tensor) -> Tensor:
    """Reshape [M, ..., K] to [M, rows, K]. The number of rows is computed, since `reshape` cannot infer it for empty
    tensors."""
    return x.reshape(x.shape[0], math.prod(x.shape[1:-1]), x.shape[-1])


@rule(aten.linear.default, steady=in_full_precision)
def linear(ctx: OpContext) -> Run:
    """Stack `F.linear` as one batched product."""
    members, (has_x, has_w) = ctx.members, (ctx.stacked(0), ctx.stacked(1))
    has_b = ctx.args[2] is not None and ctx.stacked(2)
    leading = tuple(ctx.out.shape[:-1])
    shares_weights = _all_shared(ctx, 1, 2)
    if ctx.device.type == "cuda" and ctx.args[2] is not None:
        row_sums.prepare(ctx.out.dtype, members * math.prod(leading), ctx.out.shape[-1])

    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if shares_weights:
            return F.linear(x, weight, bias)
        x = widened(x, has_x, members)
        rows = x if len(leading) == 1 else as_rows(x)
        bias = None if bias is None else widened(bias, has_b, members)
        out = affine(rows, widened(weight, has_w, members), bias)
        return out if len(leading) == 1 else out.view(members, *leading, out.shape[-1])

    return run


def _all_shared(ctx: OpContext, *indices: int) -> bool:
    """Return whether these arguments are shared, so that members' inputs can be more rows of one product.

    It is False on a CPU, where a member's bits would depend on the other members.
    """
    return ctx.device.type != "cpu" and not any(ctx.args[i] is not None and ctx.stacked(i) for i in indices)


def cast(first: Tensor, *others: Tensor | None) -> list[Tensor | None]:
    """Apply the casts of autocast, which a custom autograd Function does not get."""
    tensors, kind = (first, *others), first.device.type
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)
    return [None if x is None else x if x.dtype == torch.float64 else x.to(dtype) for x in tensors]


def bmm(x: Tensor, y: Tensor) -> Tensor:
    """Compute `torch.bmm` of stacked matrices; on a CPU with bits that do not depend on the pack."""
    if x.device.type != "cpu":
        return torch.bmm(x, y)
    out: Tensor = Product.apply(*cast(x, y))  # type: ignore[no-untyped-call]
    return out


def affine(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply [M, B, I] by [M, O, I] and add a bias [M, O]; on a CPU with bits that do not depend on the pack."""
    out: Tensor = Linear.apply(*cast(x, weight, bias))  # type: ignore[no-untyped-call]
    return out


def batched(x: Tensor, y: Tensor) -> Tensor:
    """Compute `x @ y` of stacked tensors with the same leading dimensions, with the bits of `bmm`."""
    return bmm(x.flatten(0, -3), y.flatten(0, -3)).view(*x.shape[:-1], y.shape[-1])


@rule(aten.addmm.default)
def addmm(ctx: OpContext) -> Run:
    if ctx.varies or any(value != 1 for value in ctx.args[3:]):
        return general(ctx)
    members, flags = ctx.members, [ctx.stacked(i) for i in range(3)]
    shares_weights = _all_shared(ctx, 0, 2) and ctx.ndim(0) == 1

    def run(bias: Tensor, x: Tensor, y: Tensor, *_: Any) -> Tensor:
        if shares_weights:
            return torch.addmm(bias, x.flatten(0, 1), y).view(*x.shape[:2], -1)
        ndim = bias.dim() - flags[0]
        bias, x, y = (widened(value, flag, members) for value, flag in zip((bias, x, y), flags, strict=True))
        bias, x, y = cast(bias, x, y)  # type: ignore[assignment]  # none of them is None
        product = bmm(x, y)
        if ndim != 1:
            return product + pad_dims(bias, ndim, 2)
        out: Tensor = RowBias.apply(product, bias)  # type: ignore[no-untyped-call]
        return out

    return run


@rule(aten.matmul.default, aten.mm.default, aten.bmm.default, steady=in_full_precision)
def matmul(ctx: OpContext) -> Run:
    a, b = ctx.ndim(0), ctx.ndim(1)
    if a == 0 or b == 0:
        return once_per_member(ctx)
    members, (has_a, has_b) = ctx.members, (ctx.stacked(0), ctx.stacked(1))
    out_shape = tuple(ctx.out.shape)
    shares_weights = _all_shared(ctx, 1) and a > 1 and b == 2

    def run(x: Tensor, y: Tensor) -> Tensor:
        if shares_weights:
            return torch.matmul(x, y)
        x, y = widened(x, has_a, members), widened(y, has_b, members)
        x = x.unsqueeze(1) if a == 1 else x
        y = y.unsqueeze(-1) if b == 1 else y
        if max(b, 2) == 2:  # one matrix for all leading dimensions: fold them into rows
            out = bmm(as_rows(x), y)
        else:
            width = max(a, b, 2)
            x, y = pad_dims(x, max(a, 2), width), pad_dims(y, max(b, 2), width)
            if x.device.type == "cpu":
                leading = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])  # type: ignore[no-untyped-call]
                x, y = x.expand(*leading, *x.shape[-2:]), y.expand(*leading, *y.shape[-2:])
                out = bmm(x.flatten(0, -3), y.flatten(0, -3))
            else:
                out = torch.matmul(x, y)
        return out.reshape(members, *out_shape)

    return run


@rule(aten.einsum.default)
def einsum(ctx: OpContext) -> Run:
    """Add a letter for the member axis in front of every stacked operand and of the result."""
    equation, operands = ctx.args[0], ctx.args[1]
    letter = next(c for c in "zyxwvutsrqponmlkjihgfedcbaZYXWVUTSRQPONMLKJIHGFEDCBA" if c not in equation)
    left, arrow, right = equation.replace(" ", "").partition("->")
    flags = [ctx.carries(operand) for operand in operands]
    terms = [letter + term if flag else term for term, flag in zip(left.split(","), flags, strict=True)]
    if not arrow:
        labels = sorted(c for c in set(left) - set(",.") if left.replace("...", "").count(c) == 1)
        right = ("..." if "..." in left else "") + "".join(labels)
    stacked_equation = f"{','.join(terms)}->{letter}{right}"
    return lambda _equation, values, *rest: torch.einsum(stacked_equation, *values)


@rule(aten.embedding.default, steady=in_full_precision)
def embedding(ctx: OpContext) -> Run:
    weight_stacked = ctx.stacked(0)
    _, _, padding, by_frequency, sparse = ctx.args
    if sparse:
        raise NotStackable("an Embedding with sparse gradients")
    if by_frequency:
        return once_per_member(ctx)
    if not weight_stacked:  # all members share the table
        return lambda weight, indices, *_: F.embedding(indices, weight, padding if padding >= 0 else None)
    members, rows = ctx.members, ctx.meta(0).shape[0]
    ndim = ctx.ndim(1)
    offset = (torch.arange(members, device=ctx.device) * rows).view(-1, *[1] * ndim)

    def run(weight: Tensor, indices: Tensor, *_: Any) -> Tensor:
        # must raise as for a member alone, not read the next member's table
        outside = (indices < 0) | (indices >= rows)
        out = F.embedding(torch.where(outside, members * rows, indices + offset), weight.flatten(0, 1))
        if padding >= 0:  # that row gets no gradient
            blank = (indices == padding).unsqueeze(-1)
            out = torch.where(blank, out.detach(), out)
        return out

    return run


@rule(aten.embedding_renorm_.default)
def embedding_renorm(ctx: OpContext) -> Run:
    """On a GPU, renormalise all members' rows at once; also for a member alone.

    Torch's kernel scales a row once or twice if its index is in a batch twice, depending on the timing of its blocks.
    """
    if ctx.device.type == "cpu" or (ctx.members and not ctx.stacked(0)):
        return once_per_member(ctx) if ctx.members else ctx.call
    has_index = ctx.stacked(1)

    def run(weight: Tensor, indices: Tensor, max_norm: float, norm_type: float) -> Tensor:
        weight_MRD = weight if ctx.members else weight.unsqueeze(0)  # [M, R, D]
        index = (
            indices.reshape(weight_MRD.shape[0], -1)
            if has_index
            else indices.reshape(1, -1).expand(weight_MRD.shape[0], -1)
        )
        norm = torch.linalg.vector_norm(weight_MRD, norm_type, dim=2)
        used_rows = torch.zeros_like(norm, dtype=torch.bool).scatter(1, index, True)
        factor = torch.where(used_rows & (norm > max_norm), max_norm / (norm + 1e-7), 1.0)
        return weight.mul_(factor.to(weight.dtype).view(*weight.shape[:-1], 1))

    return run
