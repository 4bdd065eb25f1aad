"""Find the rule of an operator: its own, the one for all elementwise operators, or the general path."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from shoal.engine.rules.op_context import NotStackable, OpContext, Rule, Run, per_member
from shoal.engine.tracing.signature import PerMember

Steady = Callable[[OpContext], bool]
"""Returns whether a rule gives a member the same bits whatever the other members are, on a CPU with one thread."""

_RULES: dict[Any, Rule] = {}
_STEADY: dict[Any, Steady] = {}


def rule(*ops: Any, steady: bool | Steady = False) -> Callable[[Rule], Rule]:
    """Register a rule for these operators.

    Args:
        steady: Whether no bit of a member's results and gradients depends on the other members of the stack, nor on
            whether a number differs there. With `deterministic=True` an operator without such a rule runs once for
            every member.
    """

    def register(function: Rule) -> Rule:
        for op in ops:
            assert op not in _RULES, f"two rules for {op}"
            _RULES[op] = function
            _STEADY[op] = steady if callable(steady) else lambda ctx, steady=steady: steady  # type: ignore[misc]
        return function

    return register


def is_steady(ctx: OpContext) -> bool:
    """Return whether the rule of this operator is steady here."""
    key = ctx.op if ctx.op in _RULES else "pointwise" if torch.Tag.pointwise in ctx.op.tags else None
    return key is not None and _STEADY[key](ctx)


WHOLE = (torch.float32, torch.float64)
"""Dtypes whose arithmetic has the same bits in the vectorised part of a loop and in its remainder."""


def in_full_precision(ctx: OpContext) -> bool:
    """Return whether all tensors here are integers, booleans or floats of full precision."""
    leaves = [*pytree.tree_leaves(ctx.args, is_leaf=_is_node), ctx.node]
    values = [value for leaf in leaves if _is_node(leaf) for value in pytree.tree_leaves(leaf.meta.get("val"))]
    tensors = [value for value in values if isinstance(value, Tensor)]
    return all(t.dtype in WHOLE or not (t.is_floating_point() or t.is_complex()) for t in tensors)


def find(ctx: OpContext) -> Run:
    """Return this operator with a member axis.

    Raises:
        NotStackable: If no exact way is known.
    """
    return in_own_dtype(ctx, _find(ctx))


def refuse_side_writes(op: Any) -> None:
    """Raise NotStackable if an operator without its own rule changes more than its first argument.

    These are observers and running statistics, whose changes would be lost or could have another size than a row of the
    stack.
    """
    written = side_writes(op)
    if written and op not in _RULES:
        raise NotStackable(f"{str(op).removeprefix('aten.')} changes its argument {written[0]!r} in place")


def side_writes(op: Any) -> list[str]:
    """Return the names of the arguments beyond the first that an operator changes in place, without `out=`.

    Running statistics of normalisations count too: older operators change them although their schema does not say so.
    """
    return [
        argument.name
        for i, argument in enumerate(op._schema.arguments)
        if not argument.is_out
        and (
            (i and argument.alias_info is not None and argument.alias_info.is_write)
            or (argument.name in _STATISTICS and "backward" not in str(op) and "functional" not in str(op))
        )
    ]


_STATISTICS = ("running_mean", "running_var")


def _find(ctx: OpContext) -> Run:
    if not any(isinstance(value, Tensor) for value in pytree.tree_leaves(ctx.node.meta.get("val"))):
        raise NotStackable(f"{ctx.name} gives no tensor")
    if any(argument.is_out for argument in ctx.op._schema.arguments) and not all(
        ctx.stacked(i) for i, argument in enumerate(ctx.op._schema.arguments) if argument.is_out
    ):
        raise NotStackable(f"{ctx.name} writes into a tensor that members would share (out=)")
    rule_of_op = _RULES.get(ctx.op)
    if rule_of_op is None and torch.Tag.nondeterministic_seeded in ctx.op.tags:
        raise NotStackable(f"{ctx.name} draws random numbers in a way that has no stream per member")
    if ctx.deterministic and ctx.members and not is_steady(ctx):
        return general(ctx)
    if rule_of_op is not None:
        return rule_of_op(ctx)
    if torch.Tag.pointwise in ctx.op.tags:
        return _RULES["pointwise"](ctx)
    return general(ctx)


_HALF = (torch.bfloat16, torch.float16)
_MIXED: weakref.WeakKeyDictionary[Graph, bool] = weakref.WeakKeyDictionary()


def in_own_dtype(ctx: OpContext, run: Run) -> Run:
    """For half precision: compute in the dtype in which the operator itself computes, and return the dtype that it
    returns.

    Autocast knows operators by name: it runs cross entropy in float32, but not the softmax and gather that a rule
    replaces it with. What the operator did when it was traced shows in the dtypes of its inputs and its result.
    """
    if not _mixed(ctx.node.graph) or mutates(ctx.node) or _is_view(ctx):
        return run
    outputs = [value for value in pytree.tree_leaves(ctx.node.meta["val"]) if isinstance(value, Tensor)]
    full_result = all(value.dtype not in _HALF for value in outputs)
    inputs = pytree.tree_leaves(ctx.args, is_leaf=_is_node)
    half_inputs = full_result and any(
        _is_node(node) and getattr(node.meta.get("val"), "dtype", None) in _HALF for node in inputs
    )

    def to_float(value: Any) -> Any:
        return value.float() if isinstance(value, Tensor) and value.dtype in _HALF else value

    def with_dtypes(*args: Any) -> Any:
        if half_inputs:
            args = pytree.tree_map(to_float, args)
        with torch.autocast(ctx.device.type, enabled=False) if full_result else nullcontext():
            flat, spec = pytree.tree_flatten(run(*args))
        dtypes = iter(outputs)
        return pytree.tree_unflatten([v.to(next(dtypes).dtype) if isinstance(v, Tensor) else v for v in flat], spec)

    return with_dtypes


def _mixed(graph: Graph) -> bool:
    """Return whether anything in this graph is in half precision."""
    if graph not in _MIXED:
        values = (value for node in graph.nodes for value in pytree.tree_leaves(node.meta.get("val")))
        _MIXED[graph] = any(isinstance(value, Tensor) and value.dtype in _HALF for value in values)
    return _MIXED[graph]


def _is_node(value: Any) -> bool:
    return isinstance(value, Node)


def general(ctx: OpContext) -> Run:
    """Use vmap if it has a rule for the operator, otherwise call the operator once per member.

    With `deterministic`, vmap is used only for views, which compute nothing.
    """
    is_view = _is_view(ctx) or torch.Tag.inplace_view in ctx.op.tags
    if ctx.varies or (ctx.deterministic and not is_view):
        return once_per_member(ctx)
    batched = vmapped(ctx)
    return once_per_member(ctx) if batched is None or not _works_on_fakes(ctx, batched) else batched


def once_per_member(ctx: OpContext) -> Run:
    """Call the operator once per member. A view through which a later in-place operator may write is refused."""
    if any(argument.is_out for argument in ctx.op._schema.arguments):
        raise NotStackable(f"{ctx.name} writes its result into another tensor (out=)")
    if _is_view(ctx) and any(mutates(node) for node in ctx.node.graph.nodes):
        raise NotStackable(f"{ctx.name} is a view of a tensor that is changed in place")
    if torch.Tag.inplace_view in ctx.op.tags:
        raise NotStackable(f"{ctx.name} changes the shape or the layout of a tensor in place")
    return per_member(ctx.call, ctx)


def vmapped(ctx: OpContext) -> Run:
    """Return the operator under `torch.vmap`, with the member axis first in stacked arguments and results."""
    in_dims = tuple(_in_dims(ctx, value) for value in ctx.args)

    def run(*args: Any) -> Any:
        return torch.vmap(ctx.call, in_dims=in_dims, randomness="error")(*args)

    return run


def _in_dims(ctx: OpContext, value: Any) -> Any:
    if isinstance(value, Node):
        return 0 if ctx.carries(value) else None
    if isinstance(value, list | tuple) and ctx.stacked(ctx.args.index(value)):
        return [_in_dims(ctx, item) for item in value]
    return None


def _works_on_fakes(ctx: OpContext, run: Run) -> bool:
    """Return whether `run` gives the right shapes on fake tensors, without vmap falling back to its slow loop."""
    fake = next(value for value in pytree.tree_leaves(ctx.node.meta["val"]) if isinstance(value, Tensor))
    mode = getattr(fake, "fake_mode", None)
    assert mode is not None

    def add_axis(value: Any) -> Any:
        if isinstance(value, Node):
            meta = value.meta["val"]
            return meta.new_empty((ctx.members, *meta.shape)) if ctx.carries(value) else meta
        if isinstance(value, list | tuple):
            return [add_axis(item) for item in value]
        return value

    functorch: Any = torch._C._functorch
    slow_loop = functorch._is_vmap_fallback_enabled()
    functorch._set_vmap_fallback_enabled(False)
    try:
        with mode, warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("error")
            result = run(*(add_axis(value) for value in ctx.args))
    except Exception:
        return False
    finally:
        functorch._set_vmap_fallback_enabled(slow_loop)
    results = [value for value in pytree.tree_leaves(result) if isinstance(value, Tensor)]
    solo_results = [value for value in pytree.tree_leaves(ctx.node.meta["val"]) if isinstance(value, Tensor)]
    return len(results) == len(solo_results) and all(
        a.shape == (ctx.members, *b.shape) and a.dtype == b.dtype for a, b in zip(results, solo_results, strict=True)
    )


def _is_view(ctx: OpContext) -> bool:
    return any(result.alias_info is not None for result in ctx.op._schema.returns) and not mutates(ctx.node)


def mutates(node: Node) -> bool:
    """Return whether the node's operator changes an argument in place."""
    schema = getattr(node.target, "_schema", None)
    return bool(schema is not None and schema.is_mutable)


def numbers_of(value: Any, members: int) -> tuple[float, ...]:
    """Return a number of the trace as one number per member."""
    return tuple(value.values) if isinstance(value, PerMember) else (value,) * members
