"""What operators that move, cut, join, pool and reduce say about axes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shoal.split.subnets._axes import Axis, find, fix, note, pieces, product, reshape, total, unify
from shoal.split.subnets._coupling import RULES, Coupling, rule
from shoal.split.subnets._record import Op
from shoal.split.subnets._rules import pointwise

__all__ = ["RULES"]


@rule("view", "_unsafe_view", "reshape", "_reshape_alias", "view_copy")
def _view(c: Coupling, op: Op) -> None:
    given = c.of(op.args["self"])
    c.give(op.outs[0], reshape(given, list(op.outs[0].shape)))
    if id(op.args["self"]) in c.origin:
        name, dims = c.origin[id(op.args["self"])]
        known = {id(find(axis)): d for axis, d in zip(given, dims, strict=True) if find(axis).size > 1}
        c.origin[id(op.outs[0])] = (name, [known.get(id(find(axis)), -1) for axis in c.of(op.outs[0])])


def moved(c: Coupling, op: Op, order: list[int]) -> None:
    """A result whose dimensions are the argument's in this order."""
    given = c.of(op.args["self"])
    c.give(op.outs[0], [given[d] for d in order])
    if id(op.args["self"]) in c.origin:
        name, dims = c.origin[id(op.args["self"])]
        c.origin[id(op.outs[0])] = (name, [dims[d] for d in order])


@rule("permute")
def _permute(c: Coupling, op: Op) -> None:
    moved(c, op, [d % op.outs[0].dim() for d in op.args["dims"]])


@rule("transpose", "t")
def _transpose(c: Coupling, op: Op) -> None:
    order = list(range(op.outs[0].dim()))
    if len(order) > 1:
        a, b = op.args.get("dim0", 0) % len(order), op.args.get("dim1", 1) % len(order)
        order[a], order[b] = order[b], order[a]
    moved(c, op, order)


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


@rule("split", "split_with_sizes", "chunk", "unsafe_split", "unsafe_chunk", "unsafe_split_with_sizes")
def _split(c: Coupling, op: Op) -> None:
    given = c.of(op.args["self"])
    dim = op.args["dim"] % len(given)
    parts = pieces(given[dim], [out.shape[dim] for out in op.outs])
    for out, part in zip(op.outs, parts, strict=True):
        c.give(out, [*given[:dim], part, *given[dim + 1 :]])
        _piece_of(c, op, out, dim)


def _piece_of(c: Coupling, op: Op, out: Tensor, dim: int) -> None:
    """A piece of a parameter along one dimension is still the parameter along the others."""
    if id(op.args["self"]) in c.origin:
        name, dims = c.origin[id(op.args["self"])]
        gone = [] if out.dim() < len(dims) else [-1]
        c.origin[id(out)] = (name, [*dims[:dim], *gone, *dims[dim + 1 :]])


@rule("glu")
def _gated(c: Coupling, op: Op) -> None:
    given = c.of(op.args["self"])
    dim = op.args["dim"] % len(given)
    half = op.outs[0].shape[dim]
    first, second = pieces(given[dim], [half, half])
    unify(first, second)
    c.give(op.outs[0], [*given[:dim], first, *given[dim + 1 :]])


@rule("slice")
def _slice(c: Coupling, op: Op) -> None:
    given = c.of(op.args["self"])
    dim = op.args["dim"] % len(given)
    size, left = given[dim].size, op.outs[0].shape[dim]
    if left == size:
        part = given[dim]
    elif op.args["step"] != 1:
        fix(given[dim], "some of it is picked out")
        part = Axis(left, "some of it is picked out")
    else:
        start = op.args["start"] or 0
        start = max(0, start + size if start < 0 else min(start, size))
        part = pieces(given[dim], [start, left, size - start - left])[1]
    c.give(op.outs[0], [*given[:dim], part, *given[dim + 1 :]])
    if left == size and id(op.args["self"]) in c.origin:
        c.origin[id(op.outs[0])] = c.origin[id(op.args["self"])]
    else:
        _piece_of(c, op, op.outs[0], dim)


@rule("select", "unbind")
def _select(c: Coupling, op: Op) -> None:
    given = c.of(op.args["self"])
    dim = op.args["dim"] % len(given)
    fix(given[dim], "some of it is picked out")
    for out in op.outs:
        c.give(out, [*given[:dim], *given[dim + 1 :]])
        _piece_of(c, op, out, dim)


@rule("index", "index_select")
def _index(c: Coupling, op: Op) -> None:
    given = c.of(op.args["self"])
    if op.name == "index_select":
        at = [op.args["dim"] % len(given)]
    else:
        at = [d for d, index in enumerate(op.args["indices"]) if index is not None]
    for d in at:
        fix(given[d], "some of it is picked out")
    rest = [axis for d, axis in enumerate(given) if d not in at]
    fresh = [Axis(n, "an index has its size") for n in op.outs[0].shape[: op.outs[0].dim() - len(rest)]]
    first = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    c.give(op.outs[0], [*rest[:first], *fresh, *rest[first:]])


@rule("stack")
def _stack(c: Coupling, op: Op) -> None:
    dim = op.args["dim"] % op.outs[0].dim()
    out = list(c.of(op.args["tensors"][0]))
    for tensor in op.args["tensors"][1:]:
        for a, b in zip(out, c.of(tensor), strict=True):
            unify(a, b)
    c.give(op.outs[0], [*out[:dim], Axis(op.outs[0].shape[dim], "tensors are stacked there"), *out[dim:]])


@rule("unsqueeze")
def _unsqueeze(c: Coupling, op: Op) -> None:
    given = c.of(op.args["self"])
    dim = op.args["dim"] % op.outs[0].dim()
    c.give(op.outs[0], [*given[:dim], Axis(1), *given[dim:]])
    if id(op.args["self"]) in c.origin:
        name, dims = c.origin[id(op.args["self"])]
        c.origin[id(op.outs[0])] = (name, [*dims[:dim], -1, *dims[dim:]])


@rule("squeeze", "squeeze_")
def _squeeze(c: Coupling, op: Op) -> None:
    given, asked = c.of(op.args["self"]), op.args.get("dim", list(range(len(c.of(op.args["self"])))))
    gone = {d % len(given) for d in (asked if isinstance(asked, list | tuple) else [asked]) if given}
    c.give(op.outs[0], [axis for d, axis in enumerate(given) if not (d in gone and find(axis).size == 1)])


@rule("expand")
def _expand(c: Coupling, op: Op) -> None:
    given, sizes = c.of(op.args["self"]), op.outs[0].shape
    missing = len(sizes) - len(given)
    axes = [Axis(n) if find(axis).size != n else axis for axis, n in zip(given, sizes[missing:], strict=True)]
    c.give(op.outs[0], [*(Axis(n) for n in sizes[:missing]), *axes])
    if id(op.args["self"]) in c.origin:
        name, dims = c.origin[id(op.args["self"])]
        c.origin[id(op.outs[0])] = (name, [-1] * missing + dims)


@rule("repeat")
def _repeat(c: Coupling, op: Op) -> None:
    given, times = c.of(op.args["self"]), op.args["repeats"]
    padded = [*(Axis(1) for _ in range(len(times) - len(given))), *given]
    c.give(op.outs[0], [axis if n == 1 else product([Axis(n), axis]) for axis, n in zip(padded, times, strict=True)])


@rule("_softmax", "_log_softmax", "_safe_softmax")
def _softmax(c: Coupling, op: Op) -> None:
    given = c.of(op.args["self"])
    fix(given[op.args["dim"] % len(given)], "a softmax is taken over it")
    c.give(op.outs[0], given)


@rule("mean", "sum", "amax", "amin", "max", "min", "var", "std", "var_mean", "argmax", "argmin", "logsumexp", "prod",
      "linalg_vector_norm", "any", "all", "norm", "median")  # fmt: skip
def _reduce(c: Coupling, op: Op) -> None:
    if "other" in op.args:
        pointwise(c, op)
        return
    given, asked = c.of(op.args["self"] if "self" in op.args else op.tensors[0]), op.args.get("dim")
    gone = set(range(len(given))) if asked is None or asked == [] else _dims(asked, len(given))
    for d in gone:
        if op.call is not None and op.call.name in ("layer_norm", "rms_norm"):
            note(given[d], "normalised")
        else:
            fix(given[d], f"its {op.name} is taken")
    keep = bool(op.args.get("keepdim"))
    left = [Axis(1) if d in gone else axis for d, axis in enumerate(given) if keep or d not in gone]
    for out in op.outs:
        c.give(out, left if out.dim() == len(left) else [Axis(n, "reduced") for n in out.shape])


def _dims(asked: Any, count: int) -> set[int]:
    return {d % count for d in (asked if isinstance(asked, list | tuple) else [asked])} if count else set()


@rule("max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d",
      "_adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d", "upsample_nearest1d", "upsample_nearest2d",
      "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d",
      "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "reflection_pad1d", "reflection_pad2d",
      "replication_pad1d", "replication_pad2d")  # fmt: skip
def _pool(c: Coupling, op: Op) -> None:
    """Works on an image's sides alone; what comes before them (rows, channels) is untouched."""
    given = c.of(op.tensors[0])
    sides = 3 if "3d" in op.name else 1 if "1d" in op.name else 2
    for axis in given[-sides:]:
        fix(axis, "it is an image's side")
    for out in op.outs:
        fresh = [Axis(n, "it is an image's side") for n in out.shape[-sides:]]
        for axis in fresh:
            note(axis, "input")
        c.give(out, [*given[:-sides], *fresh])


@rule("constant_pad_nd")
def _pad(c: Coupling, op: Op) -> None:
    given, sizes = c.of(op.args["self"]), op.outs[0].shape
    out = []
    for axis, n in zip(given, sizes, strict=True):
        if find(axis).size != n:
            fix(axis, "it is padded")
        out.append(axis if find(axis).size == n else Axis(n, "it is padded"))
        if out[-1] is not axis and "input" in find(axis).notes:
            note(out[-1], "input")
    c.give(op.outs[0], out)


@rule("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
      "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
      "_scaled_dot_product_fused_attention_overrideable", "_scaled_dot_product_attention_math")  # fmt: skip
def _attention(c: Coupling, op: Op) -> None:
    q, k, v = (c.of(op.args[name]) for name in ("query", "key", "value"))
    for a, b in ((q[0], k[0]), (q[0], v[0]), (q[1], k[1]), (q[1], v[1]), (k[2], v[2]), (q[3], k[3])):
        unify(a, b)
    note(q[1], "batched")
    for axis in (q[2], k[2], q[3], v[3]):
        fix(axis, "it is inside an attention head")
    mask = op.args.get("attn_mask") if op.args.get("attn_mask") is not None else op.args.get("attn_bias")
    if mask is not None:
        c.align([q[0], q[1], q[2], k[2]], c.of(mask))
    c.give(op.outs[0], [*q[:3], v[3]])
    for out in op.outs[1:]:
        c.give(out, [Axis(n, "it is inside an attention head") for n in out.shape])
