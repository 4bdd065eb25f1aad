"""Weights that no step changes and that several members have alike: a stack keeps them once, without a member axis.

A backbone with many heads, or adapters over one base: what is computed from shared weights and a shared batch is then
computed once for all members.
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
"""Operators that write their running averages without saying so, where this argument is true."""


class FrozenWeights:
    """Which members have the same frozen weights, by the values; kept for a run."""

    def __init__(self) -> None:
        self._numbers = count()
        self._known: dict[Hashable, list[tuple[int, list[Tensor]]]] = {}

    def number(self, recipe: Recipe, places: Sequence[int]) -> int:
        """The same for all recipes of one key whose tensors at these places are equal."""
        tensors = _state(recipe, places)
        known = self._known.setdefault(recipe.key, [])
        for number, others in known:
            if all(a is b or _equal(a, b) for a, b in zip(tensors, others, strict=True)):
                return number
        known.append((next(self._numbers), tensors))
        return known[-1][0]


def share(recipes: Sequence[Recipe], trace_cache: TraceCache) -> None:
    """Let those of these recipes (of one key) that have the same frozen weights share them.

    Where all members have their own (random layers that are not trained, say), they stay one stack, each with its own.
    """
    places = frozen_places(recipes[0], trace_cache)
    if not places:
        return
    numbers = [trace_cache.frozen.number(recipe, places) for recipe in recipes]
    for recipe, number in zip(recipes, numbers, strict=True):
        if len(recipes) == 1 or numbers.count(number) > 1:
            recipe.share(places, number)


def frozen_places(recipe: Recipe, trace_cache: TraceCache) -> tuple[int, ...]:
    """Of parameters, then buffers: those that are not trained, that a step reads and that neither a step nor a
    validation writes."""
    if recipe.optimizer.flags is None:  # the user's own class runs on the members' rows, and may write to any of them
        return ()
    first = next(iter(recipe.steps.values()))
    named = dict(recipe.member.model.named_parameters())
    trained = {place for place, name in enumerate(first.params) if named[name].requires_grad}
    written = set().union(*(_written(trace) for trace in recipe.steps.values()))
    owned = enumerate(first.nodes[: len(first.params) + len(first.buffers)])
    read = {place for place, node in owned if any(user.op != "output" for user in node.users)}
    places = read - trained - written
    return tuple(sorted(places - _written_in_validation(recipe.member, first, trace_cache))) if places else ()


def _written_in_validation(member: Member, step: Trace, trace_cache: TraceCache) -> set[int]:
    """The places of the step's parameters and buffers that validation writes to; all of them where it has no graph."""
    names = [*step.params, *step.buffers]
    try:
        traces = trace_cache.validations(member)
    except Untraceable:
        return set(range(len(names)))
    written = {[*trace.params, *trace.buffers][place] for trace in traces for place in _written(trace)}
    return {place for place, name in enumerate(names) if name in written}


def _written(trace: Trace) -> set[int]:
    """The parameters and buffers that a graph writes to, or gives back otherwise than they were."""
    owned = len(trace.params) + len(trace.buffers)
    place = {node: index for index, node in enumerate(trace.nodes[:owned])}
    written: set[int] = set()
    for node in trace.nodes:
        schema = getattr(node.target, "_schema", None)
        flag = next((place for op, place in _WRITERS.items() if node.target is op), None)
        if schema is not None and schema.is_mutable:
            written |= {place[root] for root in map(origin, node.all_input_nodes[:1]) if root in place}
        if flag is not None and (len(node.args) <= flag or node.args[flag]):
            written |= {place[root] for root in map(origin, node.all_input_nodes) if root in place}
    outputs = [node for node in trace.nodes[-1].args[0] if isinstance(node, Node)]  # type: ignore[union-attr]
    given = outputs[len(outputs) - len(trace.buffers) :] if trace.buffers else []
    unchanged = {place[node] for node in given if node in place}
    return written | (set(range(len(trace.params), owned)) - unchanged)


def alike_in_all(models: Sequence[nn.Module], trace: Trace) -> frozenset[int]:
    """Of the parameters, then buffers of a trace: those that are equal in all of these models."""
    named = [{**dict(model.named_parameters()), **dict(model.named_buffers())} for model in models]
    names = enumerate((*trace.params, *trace.buffers))
    return frozenset(
        place for place, name in names if all(_equal(named[0][name].detach(), x[name].detach()) for x in named[1:])
    )


def _state(recipe: Recipe, places: Sequence[int]) -> list[Tensor]:
    trace = next(iter(recipe.steps.values()))
    model = recipe.member.model
    params, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    state = [*(params[name] for name in trace.params), *(buffers[name] for name in trace.buffers)]
    return [state[place].detach() for place in places]


def _equal(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, so that zeros of different signs and NaNs are told apart."""
    if a.device != b.device or a.dtype != b.dtype or a.shape != b.shape or a.layout != torch.strided:
        return False
    same = a.data_ptr() == b.data_ptr() and a.stride() == b.stride()
    return same or _bits(a).equal(_bits(b))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor.reshape(1).view(torch.uint8)
