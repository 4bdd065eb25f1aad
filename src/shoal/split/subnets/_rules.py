"""Rules for operators that compute: what each says about its axes. An operator without a rule fixes all of them."""

from __future__ import annotations

from torch import Tensor

from shoal.split.subnets._axes import Axis, find, fix, note, product, unify
from shoal.split.subnets._coupling import Coupling, Sum, rule
from shoal.split.subnets._record import Op


def unknown(c: Coupling, op: Op) -> None:
    reason = f"nothing is known of how {op.name} couples it"
    if c.record.recurrent.intersection(op.modules):
        reason = "a recurrent layer stays whole"
    for tensor in op.tensors:
        for axis in c.of(tensor):
            fix(axis, reason)
    for tensor in op.outs:
        c.give(tensor, [Axis(n, reason) for n in tensor.shape])


@rule(
    "clone", "detach", "alias", "contiguous", "_to_copy", "copy_", "empty_like", "zeros_like", "ones_like", "rand_like",
    "randn_like", "full_like", "bernoulli", "bernoulli_", "native_dropout", "_fused_dropout", "_prelu_kernel", "fill_",
    "zero_", "uniform_", "normal_", "lift_fresh", "lift_fresh_copy", "_assert_async", "exponential_",
)  # fmt: skip
def pointwise(c: Coupling, op: Op) -> None:
    in_axes = [c.of(t) for t in op.tensors]
    for tensor in op.outs:
        out = [Axis(n) for n in tensor.shape]
        c.give(tensor, out)
        for axes in in_axes:
            c.align(c.of(tensor), axes)
        if op.name in ("clone", "detach", "alias", "contiguous", "_to_copy") and id(op.tensors[0]) in c.origin:
            c.origin[id(tensor)] = c.origin[id(op.tensors[0])]
    inner = [axes for axes, t in zip(in_axes, op.tensors, strict=True) if id(t) not in c.origin and len(axes) > 1]
    if op.name.startswith("add") and len(inner) == 2:
        for a, b in zip(reversed(inner[0]), reversed(inner[1]), strict=False):
            if find(a) is find(b):
                note(a, "residual")


@rule(
    "empty", "zeros", "ones", "full", "rand", "randn", "new_empty", "new_zeros", "new_ones", "new_full", "scalar_tensor"
)
def _fresh(c: Coupling, op: Op) -> None:
    for tensor in op.outs:
        c.give(tensor, [Axis(n) for n in tensor.shape])


@rule("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot")
def _product(c: Coupling, op: Op) -> None:
    add = op.args.get("self") if op.name.startswith(("add", "badd")) else None
    a, b = op.tensors[-2:]
    left, right = c.of(a), c.of(b)
    inner = max(right_dim := len(right) - 2, 0)
    out = [*left[:-1], *(right[inner + 1 :] if right_dim >= 0 else [])]
    for x, y in zip(left[:-2], right[:-2], strict=False):
        unify(x, y)
        note(x, "batched")
    unify(left[-1], right[inner])
    c.give(op.outs[0], out)
    if add is not None:
        c.align(out, c.of(add))
    _reads(c, op, [(a, len(left) - 1), (b, inner)])


def _reads(c: Coupling, op: Op, operands: list[tuple[Tensor, int]]) -> None:
    """Note that an axis is summed over with the weights of a parameter. A sum between two activations stays whole."""
    weights = [(t, dim) for t, dim in operands if id(t) in c.origin]
    axis = c.of(operands[0][0])[operands[0][1]]
    if len(weights) != 1:
        for tensor, _ in operands:
            for inner in c.of(tensor)[-2:]:
                fix(inner, "two activations are multiplied along it, as inside an attention head")
        return
    name, dims = c.origin[id(weights[0][0])]
    if dims[weights[0][1]] < 0:
        fix(axis, f"{name} is reshaped before it is used")
        return
    c.sums.append(Sum(axis, name, dims[weights[0][1]], op))


@rule("convolution")
def _convolution(c: Coupling, op: Op) -> None:
    in_axes, weight, bias = c.of(op.args["input"]), c.of(op.args["weight"]), op.args["bias"]
    name, dims = c.origin.get(id(op.args["weight"]), ("", []))
    if not name:
        unknown(c, op)
        return
    groups, transposed = op.args["groups"], op.args["transposed"]
    in_dim, out_dim = (0, 1) if transposed else (1, 0)
    for axis in (*weight[2:], *in_axes[2:]):
        fix(axis, "it is a kernel's or an image's side")
    if groups > 1:
        inside = "channels of one convolution group belong together"
        fix(weight[in_dim], inside) if not transposed else fix(weight[out_dim], inside)
        shared = Axis(groups)
        sizes = in_axes[1].size // groups, op.outs[0].shape[1] // groups
        unify(in_axes[1], product([shared, Axis(sizes[0], inside)]))
        channels = product([shared, Axis(sizes[1], inside)])
        unify(weight[0], product([shared, Axis(sizes[0], inside)]) if transposed else channels)
    else:
        unify(in_axes[1], weight[in_dim])
        channels = weight[out_dim]
        c.sums.append(Sum(in_axes[1], name, dims[in_dim], op))
    note(channels, "channel")
    if bias is not None:
        unify(c.of(bias)[0], channels)
    sides = [Axis(n, "it is an image's side") for n in op.outs[0].shape[2:]]
    for side in sides:
        note(side, "input")
    c.give(op.outs[0], [in_axes[0], channels, *sides])


@rule("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "cudnn_batch_norm",
      "_batch_norm_with_update", "_batch_norm_no_update", "_native_batch_norm_legit_functional")  # fmt: skip
def _batch_norm(c: Coupling, op: Op) -> None:
    in_axes = c.of(op.args["input"])
    for tensor in op.tensors[1:]:
        if tensor.dim() == 1:
            unify(c.of(tensor)[0], in_axes[1])
    c.give(op.outs[0], in_axes)
    for tensor in op.outs[1:]:
        c.give(tensor, [in_axes[1]] if tuple(tensor.shape) == (in_axes[1].size,) else [Axis(n) for n in tensor.shape])


@rule("native_layer_norm", "_fused_rms_norm")
def _layer_norm(c: Coupling, op: Op) -> None:
    in_axes = c.of(op.args["input"])
    inner = in_axes[len(in_axes) - len(op.args["normalized_shape"]) :]
    for axis in inner:
        note(axis, "normalised")
    for tensor in op.tensors[1:]:
        c.align(inner, c.of(tensor))
    c.give(op.outs[0], in_axes)
    for tensor in op.outs[1:]:
        c.give(tensor, [*in_axes[: len(in_axes) - len(inner)], *(Axis(1) for _ in inner)][: tensor.dim()])


@rule("native_group_norm")
def _group_norm(c: Coupling, op: Op) -> None:
    in_axes = c.of(op.args["input"])
    groups, inside = op.args["group"], "channels of one normalisation group belong together"
    if groups == 1:
        note(in_axes[1], "normalised")
    else:
        unify(in_axes[1], product([Axis(groups), Axis(in_axes[1].size // groups, inside)]))
    for tensor in op.tensors[1:]:
        unify(c.of(tensor)[0], in_axes[1])
    c.give(op.outs[0], in_axes)
    for tensor in op.outs[1:]:
        c.give(tensor, [Axis(n, inside) for n in tensor.shape])


@rule("embedding")
def _embedding(c: Coupling, op: Op) -> None:
    rows, width = c.of(op.args["weight"])
    fix(rows, "inputs choose its rows")
    c.give(op.outs[0], [*c.of(op.args["indices"]), width])
