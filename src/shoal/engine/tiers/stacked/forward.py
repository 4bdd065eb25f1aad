"""Many models in eval mode on the same inputs, as one stacked program where that is exact."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.engine.members.member import evaluating
from shoal.engine.proof.cases import stacked_state
from shoal.engine.proof.prove import prove_evaluation
from shoal.engine.recipes.program import Program
from shoal.engine.recipes.recipe import Evaluation, TraceCache
from shoal.engine.rules.op_context import NotStackable
from shoal.engine.tiers.unit import Unlike, context_lost, evaluated, member_output, out_of_memory, stack_outputs
from shoal.engine.tracing.patches import Untraceable
from shoal.engine.tracing.signature import skeleton
from shoal.engine.tracing.trace import Trace, autocast


def evaluation_program(
    models: Sequence[nn.Module],
    whats: Sequence[Evaluation],
    traces: Sequence[Trace],
    rows: Sequence[int],
    batch: Any,
    trace_cache: TraceCache,
    device: torch.device,
) -> Program | None:
    """The eval-mode program of these models on a batch that they share; `rows`: the model of each row of the stack.

    None where it cannot be stacked, draws random numbers, or writes to parameters (an embedding with max_norm), which
    belong to the members' own models.
    """
    try:
        flags = [False] * len(pytree.tree_leaves(batch))
        program = trace_cache.program([traces[row] for row in rows], flags, device)
        prove_evaluation(models, whats, traces, batch, trace_cache)
    except (NotStackable, Untraceable):
        return None
    return None if program.draws or program.written else program


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
                outputs[place] = self._alone(place, inputs) if stacked is None else member_output(stacked, i)
        return joined(outputs)

    def _groups(self, inputs: tuple[Any, ...]) -> list[tuple[list[int], list[Trace]]]:
        """Models by what they compute; those without a graph have none."""
        groups: dict[Hashable, tuple[list[int], list[Trace]]] = {}
        for place, model in enumerate(self.models):
            try:
                graph = self._trace_cache.evaluation(model, self._what, inputs)
            except Untraceable:
                groups[("alone", place)] = ([place], [])
                continue
            places, traces = groups.setdefault(skeleton(graph), ([], []))
            places.append(place)
            traces.append(graph)
        return list(groups.values())

    def _stacked(self, places: list[int], traces: list[Trace], inputs: tuple[Any, ...]) -> Any:
        """One program for all of them; None where it cannot be, or would not pay."""
        if len(places) < 2:
            return None
        models, rows = [self.models[place] for place in places], range(len(places))
        device = next(models[0].parameters()).device
        whats = [self._what] * len(models)
        program = evaluation_program(models, whats, traces, rows, inputs, self._trace_cache, device)
        if program is None:
            return None
        key = tuple(places)
        if key not in self._states:
            self._states[key] = stacked_state(models, traces[0])
        state, count = self._states[key], len(traces[0].params)
        state = [*state[:count], *(buffer.clone() for buffer in state[count:])]  # eval mode may still write to buffers
        self.calls += 1
        try:
            with torch.no_grad(), autocast(self.precision, device):
                out, _ = program(state, pytree.tree_leaves(inputs), lambda index: torch.empty(0))
        except Exception as error:
            if out_of_memory(error) or context_lost(error):
                raise
            return None  # their own Python may handle what a stack does not
        return out

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
