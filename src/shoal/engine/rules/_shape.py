"""Views, reductions and other operators that name dimensions: the same operator, with dimensions counted one
further."""

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
    """Return all functional overloads of these operators whose dimensions are numbers, not names."""
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
"""Operators that compute nothing: they move numbers or select some of them."""
_BY_ROW = frozenset(("sum", "mean", "softmax", "log_softmax"))
"""Operators that go through a member's elements in an order that depends only on the member's shape."""


def _is_steady(ctx: OpContext) -> bool:
    packet = ctx.name.split(".")[0]
    return packet in _MOVES or (packet in _BY_ROW and in_full_precision(ctx))


@rule(*_BY_DIM, aten.squeeze.dim, aten.squeeze.dims, steady=_is_steady)
def by_dim(ctx: OpContext) -> Run:
    """Stack an operator with a `dim` argument. A reduction over everything keeps the member axis."""
    packet = ctx.name.split(".")[0]
    names = [argument.name for argument in ctx.op._schema.arguments]
    dim_indices = [i for i, name in enumerate(names) if name in _DIM_NAMES]
    ndim = ctx.ndim(0)
    if packet == "roll" and ndim == 0:
        return lambda x, *_: x  # vmap would roll over the member axis
    if ctx.varies or ndim == 0 or (packet == "roll" and not ctx.args[2]) or (packet == "norm" and not dim_indices):
        return general(ctx)
    if not dim_indices:
        return _over_everything(ctx, packet)
    if (
        packet in ("all", "any", "prod", "argmax", "argmin", "cumsum", "count_nonzero")
        and ctx.args[dim_indices[0]] is None
    ):
        return general(ctx)
    args = list(ctx.args)
    for dim_index in dim_indices:
        args[dim_index] = _shift_dims(args[dim_index], ctx.op._schema.arguments[dim_index], ndim, packet)
        if args[dim_index] is None:
            return general(ctx)
    if packet == "select" and _all_are_selected(ctx):
        return _select_by_unbind(ctx, args[1])
    other_args = args[1:]
    op = ctx.call
    if ctx.deterministic and packet in _BY_ROW:
        return lambda x, *_: op(x.contiguous(), *other_args)
    return lambda x, *_: op(x, *other_args)


def _all_are_selected(ctx: OpContext) -> bool:
    """Return whether each index along this dimension is taken once by a `select`, as attention does with its
    projections."""
    source, dim, size = ctx.args[0], ctx.args[1] % ctx.ndim(0), ctx.meta(0).shape[ctx.args[1]]
    picks = [node for node in source.users if node.target is aten.select.int]
    dims = {node.args[1] % ctx.ndim(0) for node in picks}
    taken = sorted(node.args[2] % size for node in picks)
    return dims == {dim} and taken == list(range(size)) and size > 1 and not any(map(mutates, ctx.node.graph.nodes))


_PARTS: weakref.WeakKeyDictionary[Node, tuple[Tensor, dict[int, Tensor]]] = weakref.WeakKeyDictionary()
"""For a tensor that is being split: the tensor, and its parts that have not been used yet."""


def _select_by_unbind(ctx: OpContext, dim: int) -> Run:
    """Replace all `select`s of one tensor by one `unbind`.

    Its gradient is assembled once, instead of padding each part's gradient with zeros to the full size and adding them.
    """
    source: Node = ctx.args[0]
    index = ctx.args[2] % ctx.meta(0).shape[ctx.args[1]]

    def run(x: Tensor, *_: Any) -> Tensor:
        split_tensor, parts = _PARTS.pop(source, (None, {}))
        if split_tensor is not x or index not in parts:
            parts = dict(enumerate(x.unbind(dim)))
        part = parts.pop(index)
        if parts:
            _PARTS[source] = (x, parts)
        return part

    return run


def _shift_dims(value: Any, argument: Any, ndim: int, packet: str) -> Any:
    """Convert a `dim` argument to the stacked tensor's dimensions; None if the operator needs the general path."""
    if value is None or (isinstance(value, list | tuple) and len(value) == 0):
        return dims(None, ndim) if packet in _ALL_IF_MISSING else None
    if isinstance(value, int):
        return value % ndim + 1
    shifted = dims(value, ndim)
    return [0, *shifted] if packet == "permute" else shifted


_REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "amax": torch.amax,
    "amin": torch.amin,
}


def _over_everything(ctx: OpContext, packet: str) -> Run:
    """Stack `sum()`, `mean()`, `max()` without `dim`: they reduce over all of a member's elements."""
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
        return lambda x, *_: reduce(x, over)  # equal elements share the gradient as in max(); with vmap one gets it all
    return once_per_member(ctx) if packet in ("median", "nanmedian", "aminmax") else general(ctx)


def _keeps_numbers(ctx: OpContext) -> bool:
    """Return True for all but `repeat` and `tile`, whose gradient torch sums in an order of its choice."""
    return ctx.name.split(".")[0] not in ("repeat", "tile")


@rule(
    *_overloads("view reshape _unsafe_view expand view_as reshape_as expand_as broadcast_to repeat tile"),
    steady=_keeps_numbers,
)
def reshaped(ctx: OpContext) -> Run:
    """Stack views and expansions: the result's shape is known, and the member axis is put in front."""
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
    """Stack `cat` and `stack`."""
    values, members = ctx.args[0], ctx.members
    flags = [ctx.carries(value) for value in values]
    ndim = ctx.out.dim()
    dim = (ctx.args[1] if len(ctx.args) > 1 else 0) % ndim + 1
    join = torch.cat if ctx.op is aten.cat.default else torch.stack
    keep, dtype = list(range(len(values))), ctx.out.dtype
    if ctx.op is aten.cat.default:  # cat ignores empty tensors of shape (0,)
        keep = [i for i in keep if tuple(values[i].meta["val"].shape) != (0,)]
        if not keep:
            return once_per_member(ctx)
    return lambda tensors, *_: join([widened(tensors[i], flags[i], members) for i in keep], dim).to(dtype)


@rule(aten.pad.default, aten.constant_pad_nd.default, steady=True)
def padded(ctx: OpContext) -> Run:
    """Stack padding. It counts from the last dimension; only modes that depend on the number of dimensions take the
    general path."""
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
    """Stack `as_strided`, which indexes the tensor's memory, so a member's part must have the layout that it has
    alone."""
    whole = ctx.meta(0).is_contiguous() and ctx.meta(0).storage_offset() == 0
    if ctx.op is not aten.as_strided.default or not whole or any(map(mutates, ctx.node.graph.nodes)):
        raise NotStackable(f"{ctx.name} of a tensor that is not contiguous or is changed in place")
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
    """Run these once per member: with vmap their gradient is wrong, or one member's number is used for all."""
    return once_per_member(ctx)


@rule(aten.one_hot.default, steady=True)
def one_hot(ctx: OpContext) -> Run:
    return lambda x, classes=-1: torch.nn.functional.one_hot(x, classes)


@rule(aten.triu.default, aten.tril.default, steady=True)
def triangle(ctx: OpContext) -> Run:
    op = ctx.call
    return lambda x, *rest: op(x, *rest)
