"""One forward pass of many models: eval-mode outputs for the same inputs, stacked where that is exact."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.engine.members.member import evaluating
from shoal.engine.proof.prove import prove_evaluation
from shoal.engine.recipes.program import Program
from shoal.engine.recipes.recipe import Evaluation, TraceCache
from shoal.engine.rules.op_context import NotStackable
from shoal.engine.tiers.unit import Unlike, context_lost, evaluated, out_of_memory, stack_outputs
from shoal.engine.tracing.patches import Untraceable
from shoal.engine.tracing.signature import skeleton
from shoal.engine.tracing.trace import Trace, autocast


class Forward:
    """Many models' eval-mode forward; weights are stacked once, for all the batches that follow."""

    def __init__(self, models: Sequence[nn.Module], precision: str | None = None) -> None:
        self.models = list(models)
        self.precision = precision
        self._trace_cache, self._what = TraceCache(), Evaluation.forward(precision)
        self._states: dict[tuple[int, ...], list[Tensor]] = {}
        self.calls = 0
        """Stacked programs run so far."""

    def __call__(self, inputs: tuple[Any, ...]) -> Any:
        """Outputs with the member axis first.

        Raises:
            ValueError: when the members' outputs have different shapes.
        """
        groups = self._groups(inputs)
        if len(groups) == 1 and groups[0][1]:
            whole = self._stacked(groups[0][0], groups[0][1], inputs)
            if whole is not None:
                return whole
        outputs: list[Any] = [None] * len(self.models)
        for places, traces in groups:
            stacked = self._stacked(places, traces, inputs) if traces else None
            for i, place in enumerate(places):
                outputs[place] = self._alone(place, inputs) if stacked is None else _row(stacked, i)
        return joined(outputs)

    def _groups(self, inputs: tuple[Any, ...]) -> list[tuple[list[int], list[Trace]]]:
        """Models by what they compute; those without a graph have none."""
        found: dict[Hashable, tuple[list[int], list[Trace]]] = {}
        for place, model in enumerate(self.models):
            try:
                graph = self._trace_cache.evaluation(model, self._what, inputs)
            except Untraceable:
                found[("alone", place)] = ([place], [])
                continue
            places, traces = found.setdefault(skeleton(graph), ([], []))
            places.append(place)
            traces.append(graph)
        return list(found.values())

    def _stacked(self, places: list[int], traces: list[Trace], inputs: tuple[Any, ...]) -> Any:
        """One program for all of them; None where it cannot be, or would not pay."""
        leaves = pytree.tree_leaves(inputs)
        if len(places) < 2:
            return None
        device = next(self.models[places[0]].parameters()).device
        try:
            program = Program(traces, device=device, stacked_batch=[False] * len(leaves))
            models = [self.models[place] for place in places]
            prove_evaluation(models, [self._what] * len(models), traces, inputs, self._trace_cache)
        except (NotStackable, Untraceable):
            return None
        if program.draws:
            return None
        key = tuple(places)
        if key not in self._states:
            self._states[key] = self._stack(places, traces[0])
        state, count = self._states[key], len(traces[0].params)
        state = [*state[:count], *(buffer.clone() for buffer in state[count:])]  # eval mode may still write to buffers
        self.calls += 1
        try:
            with torch.no_grad(), autocast(self.precision, device):
                out, _ = program(state, leaves, lambda index: torch.empty(0))
        except Exception as error:
            if out_of_memory(error) or context_lost(error):
                raise
            return None  # their own Python may handle what a stack does not
        return out

    def _stack(self, places: list[int], graph: Trace) -> list[Tensor]:
        named = [{**dict(m.named_parameters()), **dict(m.named_buffers())} for m in (self.models[p] for p in places)]
        return [torch.stack([own[name].detach() for own in named]) for name in (*graph.params, *graph.buffers)]

    def _alone(self, place: int, inputs: tuple[Any, ...]) -> Any:
        model = self.models[place]
        first = next(model.parameters(), None)
        device = first.device if first is not None else torch.device("cpu")
        with evaluating(model), autocast(self.precision, device):
            return evaluated(model, lambda: model(*inputs))[0]


def joined(outputs: list[Any]) -> Any:
    """One output of each member as one pytree, members first.

    Raises:
        ValueError: when they have different shapes.
    """
    stacked = stack_outputs(outputs)
    if isinstance(stacked, Unlike):
        shapes = [list(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in outputs]
        raise ValueError(f"the members' outputs differ ({shapes}); call each member's own model instead")
    return stacked


def _row(outputs: Any, place: int) -> Any:
    return pytree.tree_map(lambda leaf: leaf[place], outputs)
