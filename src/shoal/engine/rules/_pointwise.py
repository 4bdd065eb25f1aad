"""Elementwise operators: align the member axis and call the operator itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from shoal.engine.rules._per_member import spread
from shoal.engine.rules._registry import in_full_precision, mutates, once_per_member, rule
from shoal.engine.rules.op_context import OpContext, Run, pad_dims
from shoal.engine.tracing.signature import PerMember

aten = torch.ops.aten

_LANES = 64
"""If a member's number of elements is a multiple of this, a vectorised CPU loop over the pack has no remainder within a
member."""

# IEEE arithmetic, with the same bits in the vectorised part of a loop and in its remainder.
_EXACT = frozenset(
    [
        "add",
        "sub",
        "mul",
        "div",
        "neg",
        "relu",
        "threshold",
        "where",
        "abs",
        "maximum",
        "minimum",
        "clamp",
        "clamp_min",
        "clamp_max",
        "sqrt",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "logical_not",
        "logical_and",
        "logical_or",
        "logical_xor",
        "bitwise_not",
        "bitwise_and",
        "bitwise_or",
        "masked_fill",
        "sign",
        "square",
        "leaky_relu",
        "hardtanh",
        "relu6",
        "hardswish",
        "hardsigmoid",
        "isnan",
        "isinf",
        "isfinite",
        "floor",
        "ceil",
        "round",
        "trunc",
        "reciprocal",
        "addcmul",
        "addcdiv",
        "lerp",
        "copysign",
        "rsub",
        "_to_copy",
        "to",
        "clone",
        "fill",
        "zero",
        "copy",
        "positive",
        "remainder",
        "fmod",
    ]
)
_HALF = (torch.bfloat16, torch.float16)
# These take a tensor of one number per member instead of a number, with the same arithmetic in the tensor's dtype.
_TAKES_COLUMN = frozenset((aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor))


def _is_steady(ctx: OpContext) -> bool:
    """Return whether this is IEEE arithmetic, or a function on whole vectors without numbers that differ between
    members."""
    if not in_full_precision(ctx):
        return False
    return (_exact(ctx) and not _fuses(ctx)) or (ctx.out.numel() % _LANES == 0 and not ctx.could_vary)


@rule("pointwise", steady=_is_steady)
def pointwise(ctx: OpContext) -> Run:
    """Stack any operator that torch tags as elementwise, in place or not."""
    out = ctx.out
    if ctx.varies and not (_takes_columns(ctx) and out.dtype in (torch.float32, torch.float64)):
        return once_per_member(ctx)
    if _rounds_late(ctx):
        return once_per_member(ctx)
    if ctx.device.type == "cpu" and out.numel() % _LANES and not _exact(ctx):
        return once_per_member(ctx)  # the remainder of the loop would give the last member other bits
    plans = [_plan(ctx, index, value) for index, value in enumerate(ctx.args)]
    op = ctx.call

    def run(*args: Any) -> Any:
        return op(*[value if plan is None else plan(value) for plan, value in zip(plans, args, strict=True)])

    return run


def aligned(op: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply `op` elementwise to a pack, with bits that do not depend on a member's position in it.

    On a CPU the remainder of a vectorised loop has other bits than the rest; with padding, every member begins a new
    vector.
    """
    size = x[0].numel()
    if x.device.type != "cpu" or size % _LANES == 0:
        return op(x)
    return op(F.pad(x.flatten(1), (0, -size % _LANES)))[:, :size].view(x.shape)


def _takes_columns(ctx: OpContext) -> bool:
    """Return whether a tensor can be passed for every number that differs (it cannot for `alpha`, for example)."""
    types = [str(argument.type) for argument in ctx.op._schema.arguments]
    varying = [kind for kind, value in zip(types, ctx.args, strict=True) if isinstance(value, PerMember)]
    return ctx.op in _TAKES_COLUMN and all("Tensor" in kind for kind in varying)


def _plan(ctx: OpContext, index: int, value: Any) -> Any:
    """Return a function that aligns one argument; None if it is passed as it is."""
    if isinstance(value, PerMember):
        column = ctx.column(value, ctx.out.dim(), ctx.out.dtype)
        return lambda _: column
    if not isinstance(value, Node):
        return None
    ndim, out_ndim, stacked = ctx.ndim(index), ctx.out.dim(), ctx.carries(value)
    dtype = _common_dtype(ctx) if ndim == 0 and _promotes(ctx, index) else None
    if dtype == ctx.meta(index).dtype:
        dtype = None
    out_ndim = out_ndim if stacked else ndim
    shape = tuple(ctx.out.shape)
    spreads = ctx.deterministic and stacked and tuple(ctx.meta(index).shape) != shape
    if dtype is None and ndim == out_ndim and not spreads:
        return None

    def align(x: Tensor) -> Tensor:
        x = pad_dims(x if dtype is None else x.to(dtype), ndim, out_ndim)
        return spread(x, shape) if spreads else x

    return align


def _rounds_late(ctx: OpContext) -> bool:
    """Return whether half precision on a CPU is combined with a scalar tensor of higher precision, where torch rounds
    only the result."""
    if ctx.device.type != "cpu":
        return False
    has_wide_scalar = any(t.dim() == 0 and t.dtype not in _HALF for t in _promoted(ctx))
    return has_wide_scalar and _common_dtype(ctx) in _HALF


def _promotes(ctx: OpContext, index: int) -> bool:
    """Return whether this argument takes part in type promotion. Masks do not."""
    return ctx.op._schema.arguments[index].name not in ("condition", "mask")


def _promoted(ctx: OpContext) -> list[Tensor]:
    """Return the arguments that take part in type promotion."""
    return [
        ctx.meta(i)
        for i, value in enumerate(ctx.args)
        if isinstance(value, Node) and isinstance(value.meta.get("val"), Tensor) and _promotes(ctx, i)
    ]


def _common_dtype(ctx: OpContext) -> torch.dtype:
    """Return the dtype in which the operator computes for one member.

    A tensor without dimensions has less influence on type promotion than others. With a member axis it would count like
    them, so it is cast beforehand to the dtype that results for one member.
    """
    tensors = _promoted(ctx)
    if mutates(ctx.node):
        return tensors[0].dtype
    dim_dtypes, scalar_dtypes = ({t.dtype for t in tensors if bool(t.dim()) == has_dims} for has_dims in (True, False))
    promoted = [reduce(torch.promote_types, dtypes) for dtypes in (dim_dtypes, scalar_dtypes) if dtypes]
    if len(promoted) == 1:
        return promoted[0]
    return torch.result_type(torch.empty(1, dtype=promoted[0]), torch.empty((), dtype=promoted[1]))


def _fuses(ctx: OpContext) -> bool:
    """Return whether the operator adds a product, which a compiler may round once in one part of a loop and twice in
    another."""
    names = [argument.name for argument in ctx.op._schema.arguments]
    scaled = "alpha" in names and ctx.args[names.index("alpha")] != 1
    return scaled or ctx.name.split(".")[0].rstrip("_") in ("addcmul", "addcdiv", "lerp")


def _exact(ctx: OpContext) -> bool:
    """Return whether the operator is IEEE arithmetic, see `_EXACT`."""
    name = ctx.name.split(".")[0]
    return name.rstrip("_") in _EXACT or name in _EXACT


@rule(aten.copy_.default, aten.fill_.Scalar, aten.zero_.default, aten.masked_fill_.Scalar, steady=in_full_precision)
def in_place(ctx: OpContext) -> Run:
    return pointwise(ctx)


@rule(aten.fill.Tensor, aten.fill_.Tensor, aten.masked_fill.Tensor, aten.masked_fill_.Tensor)
def filled(ctx: OpContext) -> Run:
    """Fill with a tensor of one number. Torch takes only a tensor without dimensions, so members with their own numbers
    run one by one."""
    value_index = len(ctx.args) - 1
    return once_per_member(ctx) if ctx.stacked(value_index) else pointwise(ctx)


def _cast_like(x: Tensor, other: Tensor) -> Tensor:
    return x.to(other.dtype)


@rule(
    aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten._to_copy.default, aten.clone.default,
    aten.contiguous.default, aten.detach.default, aten.detach_.default, aten.alias.default,
    aten.lift_fresh_copy.default, aten.lift_fresh.default, aten.zeros_like.default, aten.ones_like.default,
    aten.empty_like.default, aten.full_like.default,
    steady=True,
)  # fmt: skip
def same_shape(ctx: OpContext) -> Run:
    """Stack operators with one tensor in and one of the same shape out. A memory format is dropped, since it does not
    apply with one more dimension."""
    if ctx.varies:
        return once_per_member(ctx)
    names = [argument.name for argument in ctx.op._schema.arguments]
    if "memory_format" in names:
        format_index = names.index("memory_format")
        if ctx.args[format_index] not in (None, torch.contiguous_format, torch.preserve_format):
            plain = torch.contiguous_format if ctx.op is aten.contiguous.default else None
            call = ctx.call
            return lambda *args: call(*args[:format_index], plain, *args[format_index + 1 :])
    return ctx.call


@rule(aten.type_as.default, steady=True)
def type_as(ctx: OpContext) -> Run:
    if ctx.stacked(0):
        return _cast_like
    return lambda x, other: _cast_like(x, other).expand(len(other), *x.shape).clone()  # targets that members share


@rule(aten.prelu.default, steady=in_full_precision)
def prelu(ctx: OpContext) -> Run:
    """Stack PReLU, whose slope belongs to dimension 1 (the channels) of the input."""
    if not ctx.stacked(0) or not ctx.stacked(1):
        return once_per_member(ctx)
    ndim, count, dtype = ctx.ndim(0), ctx.meta(1).numel(), ctx.out.dtype

    def run(x: Tensor, slope: Tensor) -> Tensor:
        x, slope = x.to(dtype), slope.to(dtype)
        shape = [slope.shape[0], *[1] * ndim]
        if count > 1:
            shape[2 if ndim > 1 else 1] = count
        slope = slope.reshape(shape)
        slope = spread(slope, tuple(x.shape[1:])) if ctx.deterministic else slope
        return torch.where(x > 0, x, slope * x)

    return run
