"""Frozen weights that several members have in common: a stack keeps them once, without a member axis.

Examples are a backbone with many heads, or adapters over one base model. What depends only on shared weights and a
shared batch is computed once for all members.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import count
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.fx import Node

from shoal.engine.members.member import Member
from shoal.engine.tracing.patches import Untraceable
from shoal.engine.tracing.trace import Trace, origin

if TYPE_CHECKING:
    from shoal.engine.recipes.recipe import Recipe, TraceCache

aten = torch.ops.aten
_WRITERS = {
    aten.batch_norm.default: 5, aten.instance_norm.default: 5, aten.native_batch_norm.default: 5,
    aten.cudnn_batch_norm.default: 5,
}  # fmt: skip
"""Operators that write their running averages although their schema does not say so, and the index of the argument that
turns it on."""


class FrozenWeights:
    """Finds the members that have equal frozen weights, by comparing values. It lasts for a run."""

    def __init__(self) -> None:
        self._numbers = count()
        self._known: dict[Hashable, list[tuple[int, list[Tensor]]]] = {}

    def number(self, recipe: Recipe, indices: Sequence[int]) -> int:
        """Return a number that is the same for all recipes of one key whose tensors at these indices are equal."""
        tensors = _tensors_at(recipe, indices)
        groups = self._known.setdefault(recipe.key, [])
        for number, others in groups:
            if all(a is b or same_bits(a, b) for a, b in zip(tensors, others, strict=True)):
                return number
        groups.append((next(self._numbers), tensors))
        return groups[-1][0]


def share(recipes: Sequence[Recipe], trace_cache: TraceCache) -> None:
    """Let recipes of one key that have equal frozen weights share them.

    If all members have different frozen weights (random layers, for example), they stay one stack without sharing.
    """
    indices = frozen_indices(recipes[0], trace_cache)
    if not indices:
        return
    numbers = [trace_cache.frozen.number(recipe, indices) for recipe in recipes]
    for recipe, number in zip(recipes, numbers, strict=True):
        if len(recipes) == 1 or numbers.count(number) > 1:
            recipe.share(indices, number)


def frozen_indices(recipe: Recipe, trace_cache: TraceCache) -> tuple[int, ...]:
    """Return the indices into parameters, then buffers, of those that can be shared.

    They are not trained, a step reads them, and neither a step nor a validation writes them.
    """
    if recipe.optimizer.flags is None:  # the optimizer object may write to any tensor
        return ()
    first = next(iter(recipe.steps.values()))
    named = dict(recipe.member.model.named_parameters())
    trained = {i for i, name in enumerate(first.params) if named[name].requires_grad}
    written = set().union(*(_written_indices(trace) for trace in recipe.steps.values()))
    owned = enumerate(first.nodes[: len(first.params) + len(first.buffers)])
    read = {i for i, node in owned if any(user.op != "output" for user in node.users)}
    indices = read - trained - written
    return tuple(sorted(indices - _written_in_validation(recipe.member, first, trace_cache))) if indices else ()


def _written_in_validation(member: Member, step: Trace, trace_cache: TraceCache) -> set[int]:
    """Return the indices of the step's parameters and buffers that validation writes to; all of them if it cannot be
    traced."""
    names = [*step.params, *step.buffers]
    try:
        traces = trace_cache.validations(member)
    except Untraceable:
        return set(range(len(names)))
    written = {[*trace.params, *trace.buffers][i] for trace in traces for i in _written_indices(trace)}
    return {i for i, name in enumerate(names) if name in written}


def _written_indices(trace: Trace) -> set[int]:
    """Return the indices of the parameters and buffers that a graph writes to or returns changed."""
    owned = len(trace.params) + len(trace.buffers)
    index_of = {node: index for index, node in enumerate(trace.nodes[:owned])}
    written: set[int] = set()
    for node in trace.nodes:
        schema = getattr(node.target, "_schema", None)
        flag = next((index_of for op, index_of in _WRITERS.items() if node.target is op), None)
        if schema is not None and schema.is_mutable:
            written |= {index_of[root] for root in map(origin, node.all_input_nodes[:1]) if root in index_of}
        if flag is not None and (len(node.args) <= flag or node.args[flag]):
            written |= {index_of[root] for root in map(origin, node.all_input_nodes) if root in index_of}
    outputs = [node for node in trace.nodes[-1].args[0] if isinstance(node, Node)]  # type: ignore[union-attr]
    buffers_after = outputs[len(outputs) - len(trace.buffers) :] if trace.buffers else []
    unchanged = {index_of[node] for node in buffers_after if node in index_of}
    return written | (set(range(len(trace.params), owned)) - unchanged)


def alike_in_all(models: Sequence[nn.Module], trace: Trace) -> frozenset[int]:
    """Return the indices of the trace's parameters and buffers that are equal in all of these models."""
    named = [{**dict(model.named_parameters()), **dict(model.named_buffers())} for model in models]
    names = enumerate((*trace.params, *trace.buffers))
    return frozenset(
        i for i, name in names if all(same_bits(named[0][name].detach(), x[name].detach()) for x in named[1:])
    )


def _tensors_at(recipe: Recipe, indices: Sequence[int]) -> list[Tensor]:
    trace = next(iter(recipe.steps.values()))
    model = recipe.member.model
    params, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    state = [*(params[name] for name in trace.params), *(buffers[name] for name in trace.buffers)]
    return [state[i].detach() for i in indices]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal bit for bit: zeros of different signs differ, and equal NaNs do not.

    Sparse and quantized tensors are never equal.
    """
    if a.device != b.device or a.dtype != b.dtype or a.shape != b.shape or a.layout != torch.strided or a.is_quantized:
        return False
    same = a.data_ptr() == b.data_ptr() and a.stride() == b.stride()
    return same or _bits(a).equal(_bits(b))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor.reshape(1).view(torch.uint8)
