"""Random operators: every member draws from its own random stream, as it would alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.engine.rules._registry import numbers_of, rule
from shoal.engine.rules.op_context import NotStackable, OpContext, Run
from shoal.engine.tracing.signature import PerMember
from shoal.utils.randomness import Draw

aten = torch.ops.aten

_ALPHA = 1.7580993408473766  # the constant of SELU that alpha dropout uses


def _rates(ctx: OpContext) -> tuple[tuple[float], ...]:
    """Return the dropout rates: one for each member, or a single one if they are equal."""
    value = ctx.args[1]
    return tuple((p,) for p in value.values) if isinstance(value, PerMember) else ((value,),)


def _dense(meta: Tensor) -> tuple[int, ...]:
    """Return the strides of a new tensor like this one, which may be a view with gaps or an expanded tensor."""
    return tuple(torch.empty_like(meta).stride())


def _with_member_axis(ctx: OpContext, x: Tensor) -> Tensor:
    """Give a shared tensor a member axis, before it is combined with members' own noise."""
    return x if not ctx.members or ctx.stacked(0) else x.unsqueeze(0)


@rule(
    aten.dropout.default,
    aten.dropout_.default,
    aten.feature_dropout.default,
    aten.feature_dropout_.default,
    steady=True,
)
def dropout(ctx: OpContext) -> Run:
    rates, training = _rates(ctx), ctx.args[2]
    if not training or all(p == 0 for (p,) in rates):
        return lambda x, *_: x
    meta = ctx.meta(0)
    in_place = ctx.op._schema.is_mutable
    if "feature" in ctx.name:
        shape: tuple[int, ...] = (*meta.shape[:2], *[1] * (meta.dim() - 2))
        draw = ctx.draw(Draw("dropout", shape, meta.dtype, None, rates))
    else:
        draw = ctx.draw(Draw("dropout", tuple(meta.shape), meta.dtype, _dense(meta), rates))
    if in_place:
        return lambda x, *_: x.mul_(draw())
    return lambda x, *_: _with_member_axis(ctx, x) * draw()


@rule(aten.alpha_dropout.default, aten.feature_alpha_dropout.default, steady=True)
def alpha_dropout(ctx: OpContext) -> Run:
    rates, training = _rates(ctx), ctx.args[2]
    if not training or all(p == 0 for (p,) in rates):
        return lambda x, *_: x
    meta = ctx.meta(0)
    feature = "feature" in ctx.name
    shape = (*meta.shape[:2], *[1] * (meta.dim() - 2)) if feature else tuple(meta.shape)
    stride = None if feature else _dense(meta)
    draw = ctx.draw(Draw("dropout", shape, meta.dtype, stride, rates))  # with rate 0 or 1 it draws nothing, as in torch
    a = tuple(0.0 if p == 1 else ((_ALPHA**2 * p + 1) * (1 - p)) ** -0.5 for (p,) in rates)
    columns = [
        _numbers(ctx, values, meta)
        for values in (a, tuple(_ALPHA * x for x in a), tuple(_ALPHA * x * p for x, (p,) in zip(a, rates, strict=True)))
    ]
    scale, slope, shift = columns

    def run(x: Tensor, *_: Any) -> Tensor:
        noise = (draw() != 0).to(meta.dtype)
        b = (noise - 1) * slope + shift
        out: Tensor = _with_member_axis(ctx, x) * (noise * scale) + b
        return out

    return run


def _numbers(ctx: OpContext, values: tuple[float, ...], meta: Tensor) -> Any:
    """Return the values as a column, or as a single number if there is one."""
    return values[0] if len(values) == 1 else ctx.column(PerMember(values), meta.dim(), meta.dtype)


def _random_tensor(ctx: OpContext, kind: str, numbers: tuple[float, ...]) -> Run:
    """Stack an operator that returns a tensor of random numbers, with the shape and layout that it has alone."""
    out = ctx.out
    if "generator" in ctx.op._schema.overload_name and ctx.args[1] is not None:
        raise NotStackable(f"{ctx.name} draws from a generator of its own")
    draw = ctx.draw(Draw(kind, tuple(out.shape), out.dtype, tuple(out.stride()), (numbers,)))
    return lambda *_: draw()


@rule(aten.rand.default, aten.rand_like.default, steady=True)
def rand(ctx: OpContext) -> Run:
    return _random_tensor(ctx, "uniform", (0.0, 1.0))


@rule(aten.randn.default, aten.randn_like.default, steady=True)
def randn(ctx: OpContext) -> Run:
    return _random_tensor(ctx, "normal", (0.0, 1.0))


@rule(aten.randint.default, aten.randint.low, aten.randint_like.default, aten.randint_like.low_dtype, steady=True)
def randint(ctx: OpContext) -> Run:
    names = [argument.name for argument in ctx.op._schema.arguments]
    low = ctx.args[names.index("low")] if "low" in names else 0
    return _random_tensor(ctx, "integer", (low, ctx.args[names.index("high")]))


@rule(aten.randperm.default, steady=True)
def randperm(ctx: OpContext) -> Run:
    return _random_tensor(ctx, "permutation", ())


_FILLS = {
    aten.uniform_.default: "uniform",
    aten.normal_.default: "normal",
    aten.exponential_.default: "exponential",
    aten.bernoulli_.float: "bernoulli",
}


@rule(*_FILLS, steady=True)
def fill(ctx: OpContext) -> Run:
    given, generator = ctx.args[1:-1], ctx.args[-1]
    if generator is not None:
        raise NotStackable(f"{ctx.name} with a generator of its own")
    columns = [numbers_of(value, ctx.members) for value in given]
    numbers = tuple(zip(*columns, strict=True)) if ctx.varies else (tuple(given),)
    meta = ctx.meta(0)
    draw = ctx.draw(Draw(_FILLS[ctx.op], tuple(meta.shape), meta.dtype, tuple(meta.stride()), numbers))
    return lambda x, *_: x.copy_(draw())


@rule(aten.bernoulli.default, steady=True)
def bernoulli(ctx: OpContext) -> Run:
    """Refuse `torch.bernoulli` of a tensor of probabilities. For one member on a CPU, torch compares uniform draws with
    them."""
    raise NotStackable("torch.bernoulli of a tensor of probabilities")
