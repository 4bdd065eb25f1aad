"""Many models in eval mode on the same inputs, as one stacked program where that is exact."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.engine.members.step import evaluating
from shoal.engine.proof.cases import stacked_state
from shoal.engine.proof.prove import prove_evaluation
from shoal.engine.recipes.frozen import alike_in_all
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
    shared: frozenset[int],
) -> Program | None:
    """The eval-mode program of these models on a batch that they share; `rows`: the model of each row of the stack;
    `shared`: of parameters, then buffers, those that all of them have in common: what comes of these is computed once.

    None where it cannot be stacked, draws random numbers, or writes to parameters (an embedding with max_norm), which
    belong to the members' own models.
    """
    try:
        flags = [False] * len(pytree.tree_leaves(batch))
        program = trace_cache.program([traces[row] for row in rows], flags, device, shared)
        prove_evaluation(models, whats, traces, batch, trace_cache)
    except (NotStackable, Untraceable):
        return None
    return None if program.draws or program.written else program


class Forward:
    """Many models in eval mode on the same batches; weights are stacked once, for all the batches that follow.

    Used in a `with` statement, it brings models that had to go to `device` by themselves back to where they were.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        precision: str | None = None,
        *,
        whats: Sequence[Evaluation] | None = None,
        device: torch.device | None = None,
    ) -> None:
        """`whats`: what each computes, by default its outputs. `device`: where, by default where each one is."""
        self.models = list(models)
        self.whats = [Evaluation.forward(precision)] * len(self.models) if whats is None else list(whats)
        self.device = device
        self._trace_cache = TraceCache()
        self._states: dict[tuple[int, ...], list[Tensor]] = {}
        self._shared: dict[tuple[int, ...], frozenset[int]] = {}
        self._homes: dict[int, torch.device] = {}
        self._most = max(1, len(self.models))
        """Models that memory holds at once, as far as is known."""
        self.calls = 0
        """Stacked programs run so far."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for place, home in self._homes.items():
            self.models[place].to(home)
        self._homes.clear()

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
        return joined(self.each(inputs))

    def each(self, batch: Any) -> list[Any]:
        """What each model computes, as a list."""
        outputs: list[Any] = [None] * len(self.models)
        for places, traces in self._groups(batch):
            stacked = self._stacked(places, traces, batch) if traces else None
            for i, place in enumerate(places):
                outputs[place] = self._alone(place, batch) if stacked is None else member_output(stacked, i)
        return outputs

    def _groups(self, batch: Any) -> list[tuple[list[int], list[Trace]]]:
        """Models by what they compute, no more at once than memory holds; those without a graph have none."""
        groups: dict[Hashable, tuple[list[int], list[Trace]]] = {}
        for place, (model, what) in enumerate(zip(self.models, self.whats, strict=True)):
            try:
                graph = self._trace_cache.evaluation(model, what, batch)
            except Untraceable:
                groups[("alone", place)] = ([place], [])
                continue
            places, traces = groups.setdefault((skeleton(graph), what.precision), ([], []))
            places.append(place)
            traces.append(graph)
        most = self._most
        return [
            (places[i : i + most], traces[i : i + most])
            for places, traces in groups.values()
            for i in range(0, len(places), most)
        ]

    def _stacked(self, places: list[int], traces: list[Trace], batch: Any) -> Any:
        """One program for all of them; None where it cannot be, or would not pay."""
        if len(places) < 2:
            return None
        models, rows = [self.models[place] for place in places], range(len(places))
        whats = [self.whats[place] for place in places]
        device = self.device or next(models[0].parameters()).device
        key = tuple(places)
        if key not in self._shared:
            self._shared[key] = alike_in_all(models, traces[0])
        program = evaluation_program(
            models, whats, traces, rows, batch, self._trace_cache, device, self._shared[key]
        )  # fmt: skip
        if program is None:
            return None
        try:
            return self._run(program, key, traces[0], batch, device)
        except Exception as error:
            if context_lost(error):
                raise
            if not out_of_memory(error):
                return None  # their own Python may handle what a stack does not
        self._states.clear()  # and then half of them at once
        self._most = max(1, len(places) // 2)
        halves = [slice(0, self._most), slice(self._most, None)]
        parts = [self._stacked(places[half], traces[half], batch) for half in halves]
        return None if any(part is None for part in parts) else pytree.tree_map(lambda *x: torch.cat(x), *parts)

    def _run(self, program: Program, places: tuple[int, ...], trace: Trace, batch: Any, device: torch.device) -> Any:
        if places not in self._states:
            stacked = stacked_state([self.models[place] for place in places], trace, self._shared[places])
            on_device = [tensor.to(device) for tensor in stacked]
            self._states[places] = [tensor.expand(len(places), *tensor.shape[1:]) for tensor in on_device]
        state, count = self._states[places], len(trace.params)
        state = [*state[:count], *(buffer.clone() for buffer in state[count:])]  # eval mode may still write to buffers
        self.calls += 1
        with torch.no_grad(), autocast(self.whats[places[0]].precision, device):
            outputs = program(state, pytree.tree_leaves(batch), lambda index: torch.empty(0))[0]
        return pytree.tree_map_only(Tensor, _with_own_rows, outputs)

    def _alone(self, place: int, batch: Any) -> Any:
        model, what = self.models[place], self.whats[place]
        first = next(model.parameters(), None)
        home = first.device if first is not None else torch.device("cpu")
        device = self.device or home
        if home != device:
            self._homes.setdefault(place, home)
            model.to(device)
        with evaluating(model), autocast(what.precision, device):
            return evaluated(model, lambda: what.call(model, batch))[0]


def _with_own_rows(output: Tensor) -> Tensor:
    """An output in which each member has memory of its own, also where it was computed once for all."""
    return output.contiguous() if output.dim() and not output.stride(0) else output


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
