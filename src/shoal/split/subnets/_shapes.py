"""Rules for operators that move, cut, join, pool and reduce: what each says about its axes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from shoal.split.subnets._axes import Axis, find, fix, note, pieces, product, reshape, total, unify
from shoal.split.subnets._coupling import RULES, Coupling, rule
from shoal.split.subnets._record import Op
from shoal.split.subnets._rules import pointwise

__all__ = ["RULES"]
PICKED, SIDE, INSIDE_HEAD = "some of it is picked out", "it is an image's side", "it is inside an attention head"


def _argument_axes(c: Coupling, op: Op) -> tuple[list[Axis], int]:
    """Return the argument's axes and the dimension that the operator works on."""
    in_axes = c.of(op.args["self"])
    return in_axes, op.args.get("dim", 0) % max(1, len(in_axes))


def _give_view(c: Coupling, op: Op, out: Tensor, axes: Sequence[Axis], source: Sequence[int]) -> None:
    """Set the axes of a result. `source` names the argument's dimension that each axis is, or -1.

    A view of a parameter is tracked as one.
    """
    c.give(out, axes)
    if id(op.args["self"]) in c.origin:
        name, dims = c.origin[id(op.args["self"])]
        c.origin[id(out)] = (name, [-1 if d < 0 else dims[d] for d in source])


def _move(c: Coupling, op: Op, source: Sequence[int]) -> None:
    """Set a result whose dimensions are the argument's in this order; -1 for a new one."""
    in_axes, out = c.of(op.args["self"]), op.outs[0]
    axes = [Axis(n) if d < 0 else in_axes[d] for d, n in zip(source, out.shape, strict=True)]
    _give_view(c, op, out, axes, source)


def _give_piece(c: Coupling, op: Op, out: Tensor, dim: int, part: Axis | None) -> None:
    """Set a result that has a part of one of the argument's dimensions, or nothing of it. Other dimensions are
    unchanged."""
    in_axes, inside = c.of(op.args["self"]), [] if part is None else [part]
    source = [*range(dim), *(-1 for _ in inside), *range(dim + 1, len(in_axes))]
    _give_view(c, op, out, [*in_axes[:dim], *inside, *in_axes[dim + 1 :]], source)


@rule("view", "_unsafe_view", "reshape", "_reshape_alias", "view_copy")
def _view(c: Coupling, op: Op) -> None:
    in_axes, out = c.of(op.args["self"]), op.outs[0]
    axes = reshape(in_axes, list(out.shape))
    known = {id(find(axis)): d for d, axis in enumerate(in_axes) if find(axis).size > 1}
    _give_view(c, op, out, axes, [known.get(id(find(axis)), -1) for axis in axes])


@rule("permute")
def _permute(c: Coupling, op: Op) -> None:
    _move(c, op, [d % op.outs[0].dim() for d in op.args["dims"]])


@rule("transpose", "t")
def _transpose(c: Coupling, op: Op) -> None:
    order = list(range(op.outs[0].dim()))
    if len(order) > 1:
        a, b = op.args.get("dim0", 0) % len(order), op.args.get("dim1", 1) % len(order)
        order[a], order[b] = order[b], order[a]
    _move(c, op, order)


@rule("unsqueeze")
def _unsqueeze(c: Coupling, op: Op) -> None:
    count = op.outs[0].dim()
    dim = op.args["dim"] % count
    _move(c, op, [*range(dim), -1, *range(dim, count - 1)])


@rule("squeeze", "squeeze_")
def _squeeze(c: Coupling, op: Op) -> None:
    in_axes = c.of(op.args["self"])
    removed = _dims(op.args.get("dim"), len(in_axes))
    _move(c, op, [d for d, axis in enumerate(in_axes) if not (d in removed and find(axis).size == 1)])


@rule("expand")
def _expand(c: Coupling, op: Op) -> None:
    in_axes, sizes = c.of(op.args["self"]), op.outs[0].shape
    missing = len(sizes) - len(in_axes)
    same = [d if find(axis).size == sizes[missing + d] else -1 for d, axis in enumerate(in_axes)]
    _move(c, op, [*(-1 for _ in range(missing)), *same])


@rule("cat")
def _cat(c: Coupling, op: Op) -> None:
    tensors = [t for t in op.args["tensors"] if t.numel() or t.dim() > 1]
    dim = op.args["dim"] % op.outs[0].dim()
    out = list(c.of(tensors[0]))
    for tensor in tensors[1:]:
        for d, axis in enumerate(c.of(tensor)):
            if d != dim:
                unify(axis, out[d])
    out[dim] = total([c.of(t)[dim] for t in tensors])
    c.give(op.outs[0], out)


@rule("stack")
def _stack(c: Coupling, op: Op) -> None:
    dim = op.args["dim"] % op.outs[0].dim()
    out = list(c.of(op.args["tensors"][0]))
    for tensor in op.args["tensors"][1:]:
        for a, b in zip(out, c.of(tensor), strict=True):
            unify(a, b)
    c.give(op.outs[0], [*out[:dim], Axis(op.outs[0].shape[dim], "tensors are stacked there"), *out[dim:]])


@rule("split", "split_with_sizes", "chunk", "unsafe_split", "unsafe_chunk", "unsafe_split_with_sizes")
def _split(c: Coupling, op: Op) -> None:
    in_axes, dim = _argument_axes(c, op)
    for out, part in zip(op.outs, pieces(in_axes[dim], [out.shape[dim] for out in op.outs]), strict=True):
        _give_piece(c, op, out, dim, part)


@rule("glu")
def _gated(c: Coupling, op: Op) -> None:
    in_axes, dim = _argument_axes(c, op)
    first, second = pieces(in_axes[dim], [op.outs[0].shape[dim]] * 2)
    unify(first, second)
    _give_piece(c, op, op.outs[0], dim, first)


@rule("slice")
def _slice(c: Coupling, op: Op) -> None:
    in_axes, dim = _argument_axes(c, op)
    size, left = in_axes[dim].size, op.outs[0].shape[dim]
    if left == size:
        _move(c, op, range(len(in_axes)))
        return
    if op.args["step"] != 1:
        fix(in_axes[dim], PICKED)
        part = Axis(left, PICKED)
    else:
        start = op.args["start"] or 0
        start = max(0, start + size if start < 0 else min(start, size))
        part = pieces(in_axes[dim], [start, left, size - start - left])[1]
    _give_piece(c, op, op.outs[0], dim, part)


@rule("select", "unbind")
def _select(c: Coupling, op: Op) -> None:
    in_axes, dim = _argument_axes(c, op)
    fix(in_axes[dim], PICKED)
    for out in op.outs:
        _give_piece(c, op, out, dim, None)


@rule("index", "index_select")
def _index(c: Coupling, op: Op) -> None:
    in_axes, dim = _argument_axes(c, op)
    at = [dim] if op.name == "index_select" else [d for d, i in enumerate(op.args["indices"]) if i is not None]
    for d in at:
        fix(in_axes[d], PICKED)
    other_axes = [axis for d, axis in enumerate(in_axes) if d not in at]
    fresh = [Axis(n, "an index has its size") for n in op.outs[0].shape[: op.outs[0].dim() - len(other_axes)]]
    first = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    c.give(op.outs[0], [*other_axes[:first], *fresh, *other_axes[first:]])


@rule("repeat")
def _repeat(c: Coupling, op: Op) -> None:
    in_axes, times = c.of(op.args["self"]), op.args["repeats"]
    padded = [*(Axis(1) for _ in range(len(times) - len(in_axes))), *in_axes]
    c.give(op.outs[0], [axis if n == 1 else product([Axis(n), axis]) for axis, n in zip(padded, times, strict=True)])


@rule("_softmax", "_log_softmax", "_safe_softmax")
def _softmax(c: Coupling, op: Op) -> None:
    in_axes, dim = _argument_axes(c, op)
    fix(in_axes[dim], "a softmax is taken over it")
    c.give(op.outs[0], in_axes)


@rule("mean", "sum", "amax", "amin", "max", "min", "var", "std", "var_mean", "argmax", "argmin", "logsumexp", "prod",
      "linalg_vector_norm", "any", "all", "norm", "median")  # fmt: skip
def _reduce(c: Coupling, op: Op) -> None:
    if "other" in op.args:
        pointwise(c, op)
        return
    in_axes = c.of(op.args["self"] if "self" in op.args else op.tensors[0])
    removed = _dims(op.args.get("dim"), len(in_axes))
    for d in removed:
        if op.call is not None and op.call.name in ("layer_norm", "rms_norm"):
            note(in_axes[d], "normalised")
        else:
            fix(in_axes[d], f"its {op.name} is taken")
    keep = bool(op.args.get("keepdim"))
    left = [Axis(1) if d in removed else axis for d, axis in enumerate(in_axes) if keep or d not in removed]
    for out in op.outs:
        c.give(out, left if out.dim() == len(left) else [Axis(n, "reduced") for n in out.shape])


def _dims(dims: Any, count: int) -> set[int]:
    """Return dimensions as operators take them: one, several, or all (None, or none named)."""
    if dims is None or dims == []:
        return set(range(count))
    return {d % count for d in (dims if isinstance(dims, list | tuple) else [dims])} if count else set()


@rule("max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d",
      "_adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d", "upsample_nearest1d", "upsample_nearest2d",
      "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d",
      "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "reflection_pad1d", "reflection_pad2d",
      "replication_pad1d", "replication_pad2d")  # fmt: skip
def _pool(c: Coupling, op: Op) -> None:
    """Pooling changes the sides of an image; rows and channels before them are unchanged."""
    in_axes = c.of(op.tensors[0])
    sides = 3 if "3d" in op.name else 1 if "1d" in op.name else 2
    for out in op.outs:
        _resize(c, in_axes, out, range(len(in_axes) - sides, len(in_axes)), SIDE)


@rule("constant_pad_nd")
def _pad(c: Coupling, op: Op) -> None:
    in_axes, sizes = c.of(op.args["self"]), op.outs[0].shape
    padded = [d for d, axis in enumerate(in_axes) if find(axis).size != sizes[d]]
    _resize(c, in_axes, op.outs[0], padded, "it is padded")


def _resize(c: Coupling, in_axes: Sequence[Axis], out: Tensor, dims: Iterable[int], reason: str) -> None:
    """Set a result of which some dimensions have other sizes than the argument's; those stay whole.

    Sizes that follow from the inputs' sizes still do.
    """
    axes = list(in_axes)
    for d in dims:
        fix(in_axes[d], reason)
        axes[d] = Axis(out.shape[d], reason)
        if reason == SIDE or "input" in find(in_axes[d]).notes:
            note(axes[d], "input")
    c.give(out, axes)


@rule("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
      "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
      "_scaled_dot_product_fused_attention_overrideable", "_scaled_dot_product_attention_math")  # fmt: skip
def _attention(c: Coupling, op: Op) -> None:
    q, k, v = (c.of(op.args[name]) for name in ("query", "key", "value"))
    for a, b in ((q[0], k[0]), (q[0], v[0]), (q[1], k[1]), (q[1], v[1]), (k[2], v[2]), (q[3], k[3])):
        unify(a, b)
    note(q[1], "batched")
    for axis in (q[2], k[2], q[3], v[3]):
        fix(axis, INSIDE_HEAD)
    mask = op.args.get("attn_mask") if op.args.get("attn_mask") is not None else op.args.get("attn_bias")
    if mask is not None:
        c.align([q[0], q[1], q[2], k[2]], c.of(mask))
    c.give(op.outs[0], [*q[:3], v[3]])
    for out in op.outs[1:]:
        c.give(out, [Axis(n, INSIDE_HEAD) for n in out.shape])
