"""Views, reductions and the rest of the operators that name dimensions: the same operator, one dimension further."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from shoal.engine.rules._linear import widened
from shoal.engine.rules._per_member import spread
from shoal.engine.rules._registry import general, in_full_precision, mutates, once_per_member, rule
from shoal.engine.rules.op_context import NotStackable, OpContext, Run, dims, pad_dims

aten = torch.ops.aten


def _overloads(names: str) -> list[Any]:
    """All functional overloads of these operators whose dimensions are numbers (not names)."""
    ops = []
    for name in names.split():
        packet = getattr(aten, name)
        for overload in packet.overloads():
            op = getattr(packet, overload)
            types = [str(argument.type) for argument in op._schema.arguments]
            if "out" not in overload and not op._schema.is_mutable and not any("str" in t for t in types):
                ops.append(op)
    return ops


# Operators with a `dim`, `dims`, `dim0`... argument, whose first argument is the tensor.
_BY_DIM = _overloads(
    "transpose select slice narrow unbind split split_with_sizes chunk movedim swapaxes permute "
    "sum mean amax amin max min argmax argmin prod var std var_mean std_mean logsumexp all any nansum median "
    "softmax log_softmax _softmax _log_softmax cumsum cumprod logcumsumexp sort argsort topk kthvalue "
    "linalg_vector_norm norm flip roll flatten unflatten glu diagonal unfold tensor_split count_nonzero mode aminmax"
)
_DIM_NAMES = ("dim", "dims", "dim0", "dim1", "axis0", "axis1", "source", "destination", "start_dim", "end_dim", "dim2")
_ALL_IF_MISSING = frozenset(
    (
        "sum",
        "mean",
        "amax",
        "amin",
        "prod",
        "var",
        "std",
        "var_mean",
        "std_mean",
        "all",
        "any",
        "nansum",
        "logsumexp",
        "linalg_vector_norm",
        "count_nonzero",
    )
)


_MOVES = frozenset((
    "transpose", "select", "slice", "narrow", "unbind", "split", "split_with_sizes", "chunk", "movedim", "swapaxes",
    "permute", "flip", "roll", "flatten", "unflatten", "diagonal", "tensor_split", "squeeze", "amax", "amin", "max",
    "min", "argmax", "argmin", "all", "any", "sort", "argsort", "topk",
))  # fmt: skip
"""Those that compute nothing: they move numbers, or pick some of them."""
_BY_ROW = frozenset(("sum", "mean", "softmax", "log_softmax"))
"""Those that go through a member's own elements in an order that its own shape says."""


def _is_steady(ctx: OpContext) -> bool:
    packet = ctx.name.split(".")[0]
    return packet in _MOVES or (packet in _BY_ROW and in_full_precision(ctx))


@rule(*_BY_DIM, aten.squeeze.dim, aten.squeeze.dims, steady=_is_steady)
def by_dim(ctx: OpContext) -> Run:
    """Dimensions count from the member's own first one; a reduction over everything spares the member axis."""
    packet = ctx.name.split(".")[0]
    names = [argument.name for argument in ctx.op._schema.arguments]
    places = [i for i, name in enumerate(names) if name in _DIM_NAMES]
    ndim = ctx.ndim(0)
    if packet == "roll" and ndim == 0:
        return lambda x, *_: x  # vmap would roll the members
    if ctx.varies or ndim == 0 or (packet == "roll" and not ctx.args[2]) or (packet == "norm" and not places):
        return general(ctx)
    if not places:
        return _over_everything(ctx, packet)
    if packet in ("all", "any", "prod", "argmax", "argmin", "cumsum", "count_nonzero") and ctx.args[places[0]] is None:
        return general(ctx)
    args = list(ctx.args)
    for place in places:
        args[place] = _moved(args[place], ctx.op._schema.arguments[place], ndim, packet)
        if args[place] is None:
            return general(ctx)
    if packet == "select" and _all_are_selected(ctx):
        return _part(ctx, args[1])
    rest = args[1:]
    op = ctx.call
    if ctx.deterministic and packet in _BY_ROW:
        return lambda x, *_: op(x.contiguous(), *rest)
    return lambda x, *_: op(x, *rest)


def _all_are_selected(ctx: OpContext) -> bool:
    """Whether every place along this dimension is taken once by a `select`, as attention does with its projections."""
    source, dim, size = ctx.args[0], ctx.args[1] % ctx.ndim(0), ctx.meta(0).shape[ctx.args[1]]
    picks = [node for node in source.users if node.target is aten.select.int]
    dims = {node.args[1] % ctx.ndim(0) for node in picks}
    taken = sorted(node.args[2] % size for node in picks)
    return dims == {dim} and taken == list(range(size)) and size > 1 and not any(map(mutates, ctx.node.graph.nodes))


_PARTS: weakref.WeakKeyDictionary[Node, tuple[Tensor, dict[int, Tensor]]] = weakref.WeakKeyDictionary()
"""Of a tensor that is taken apart: itself, and those of its parts that have not been asked for yet."""


def _part(ctx: OpContext, dim: int) -> Run:
    """One `unbind` for all: the gradients of its parts are put together once, instead of filled up with zeros, each
    to the size of the whole, and added."""
    source: Node = ctx.args[0]
    place = ctx.args[2] % ctx.meta(0).shape[ctx.args[1]]

    def run(x: Tensor, *_: Any) -> Tensor:
        whole, parts = _PARTS.pop(source, (None, {}))
        if whole is not x or place not in parts:
            parts = dict(enumerate(x.unbind(dim)))
        part = parts.pop(place)
        if parts:
            _PARTS[source] = (x, parts)
        return part

    return run


def _moved(value: Any, argument: Any, ndim: int, packet: str) -> Any:
    if value is None or (isinstance(value, list | tuple) and len(value) == 0):
        return dims(None, ndim) if packet in _ALL_IF_MISSING else None
    if isinstance(value, int):
        return value % ndim + 1
    moved = dims(value, ndim)
    return [0, *moved] if packet == "permute" else moved


_REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "amax": torch.amax,
    "amin": torch.amin,
}


def _over_everything(ctx: OpContext, packet: str) -> Run:
    """sum(), mean(), max(): over all of a member's own elements."""
    ndim, args = ctx.ndim(0), ctx.args
    over = list(range(1, ndim + 1))
    if packet in ("sum", "mean"):
        dtype = args[1] if len(args) > 1 else None
        reduce = _REDUCTIONS[packet]
        if ctx.deterministic:
            return lambda x, *_: reduce(x.contiguous(), over, dtype=dtype)
        return lambda x, *_: reduce(x, over, dtype=dtype)
    if packet in ("max", "min"):
        reduce = _REDUCTIONS["a" + packet]
        return lambda x, *_: reduce(x, over)  # equal elements share the gradient, as in max(); vmap's goes to one
    return once_per_member(ctx) if packet in ("median", "nanmedian", "aminmax") else general(ctx)


def _keeps_numbers(ctx: OpContext) -> bool:
    """Everything but `repeat` and `tile`, whose gradient is a sum in an order of torch's choice."""
    return ctx.name.split(".")[0] not in ("repeat", "tile")


@rule(
    *_overloads("view reshape _unsafe_view expand view_as reshape_as expand_as broadcast_to repeat tile"),
    steady=_keeps_numbers,
)
def reshaped(ctx: OpContext) -> Run:
    """The result's own shape is known; put the members in front."""
    packet = ctx.name.split(".")[0]
    shape, members, ndim = tuple(ctx.out.shape), ctx.members, ctx.ndim(0)
    if packet == "view" and ctx.op is not aten.view.default:
        return general(ctx)  # view as another dtype
    if not ctx.stacked(0):
        return general(ctx)
    if packet in ("expand", "expand_as", "broadcast_to"):
        if ctx.deterministic:
            return lambda x, *_: spread(pad_dims(x, ndim, len(shape)), shape)
        return lambda x, *_: pad_dims(x, ndim, len(shape)).expand(members, *shape)
    if packet in ("repeat", "tile"):
        if packet == "tile" or len(ctx.args[1]) < ndim:
            return general(ctx)
        return lambda x, repeats: pad_dims(x, ndim, len(repeats)).repeat(1, *repeats)
    return lambda x, *_: x.reshape(members, *shape)


@rule(aten.unsqueeze.default, steady=True)
def unsqueeze(ctx: OpContext) -> Run:
    dim = ctx.args[1] % (ctx.ndim(0) + 1) + 1
    return lambda x, _: x.unsqueeze(dim)


@rule(aten.t.default, aten.numpy_T.default, aten.mT.default, aten.adjoint.default, steady=True)
def transposed(ctx: OpContext) -> Run:
    ndim = ctx.ndim(0)
    if ndim < 2:
        return lambda x: x
    if ctx.op is aten.adjoint.default:
        return lambda x: x.mH
    if ndim == 2 or ctx.op is aten.mT.default:
        return lambda x: x.mT
    return general(ctx)


@rule(aten.squeeze.default, steady=True)
def squeeze(ctx: OpContext) -> Run:
    shape, members = tuple(ctx.out.shape), ctx.members
    return lambda x: x.reshape(members, *shape)


@rule(aten.cat.default, aten.stack.default, steady=True)
def joined(ctx: OpContext) -> Run:
    values, members = ctx.args[0], ctx.members
    flags = [ctx.carries(value) for value in values]
    ndim = ctx.out.dim()
    dim = (ctx.args[1] if len(ctx.args) > 1 else 0) % ndim + 1
    join = torch.cat if ctx.op is aten.cat.default else torch.stack
    keep, dtype = list(range(len(values))), ctx.out.dtype
    if ctx.op is aten.cat.default:  # it takes an empty tensor without dimensions of its own, and leaves it out
        keep = [i for i in keep if tuple(values[i].meta["val"].shape) != (0,)]
        if not keep:
            return once_per_member(ctx)
    return lambda tensors, *_: join([widened(tensors[i], flags[i], members) for i in keep], dim).to(dtype)


@rule(aten.pad.default, aten.constant_pad_nd.default, steady=True)
def padded(ctx: OpContext) -> Run:
    """Padding counts from the last dimension; only modes that look at the number of dimensions need care."""
    mode = ctx.args[2] if ctx.op is aten.pad.default and len(ctx.args) > 2 else "constant"
    if ctx.varies or mode != "constant":
        return general(ctx)
    op = ctx.call
    return lambda *args: op(*args)


@rule(aten.gather.default, aten.index_select.default, aten.take_along_dim.default, steady=True)
def gathered(ctx: OpContext) -> Run:
    if ctx.op is not aten.gather.default or ctx.ndim(0) == 0 or ctx.args[3]:
        return general(ctx)
    dim, members = ctx.args[1] % ctx.ndim(0) + 1, ctx.members
    flags = (ctx.stacked(0), ctx.stacked(2))
    return lambda x, _, index, *__: torch.gather(widened(x, flags[0], members), dim, widened(index, flags[1], members))


@rule(aten.as_strided.default, aten.as_strided_scatter.default, steady=True)
def strided(ctx: OpContext) -> Run:
    """Counts in the memory behind a tensor, so a member's part of it must lie as it does alone."""
    whole = ctx.meta(0).is_contiguous() and ctx.meta(0).storage_offset() == 0
    if ctx.op is not aten.as_strided.default or not whole or any(map(mutates, ctx.node.graph.nodes)):
        raise NotStackable(f"{ctx.name} of a tensor that lies in memory as it happens to")
    members, (_, shape, strides, offset) = ctx.members, ctx.args

    def run(x: Tensor, *_: Any) -> Tensor:
        x = x.contiguous()
        return x.as_strided((members, *shape), (x.stride(0), *strides), x.storage_offset() + (offset or 0))

    return run


@rule(
    aten.select_scatter.default, aten.slice_scatter.default, aten.diagonal_scatter.default,
    aten.index_fill.int_Tensor, aten.index_fill_.int_Tensor,
)  # fmt: skip
def scattered(ctx: OpContext) -> Run:
    """Under vmap the gradient of these goes astray, or the number of one member goes to all."""
    return once_per_member(ctx)


@rule(aten.one_hot.default, steady=True)
def one_hot(ctx: OpContext) -> Run:
    return lambda x, classes=-1: torch.nn.functional.one_hot(x, classes)


@rule(aten.triu.default, aten.tril.default, steady=True)
def triangle(ctx: OpContext) -> Run:
    op = ctx.call
    return lambda x, *rest: op(x, *rest)
