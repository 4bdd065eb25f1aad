"""Run many models in eval mode on the same inputs, as one stacked program if that is exact."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.data.source import cloned
from shoal.engine.members.step import evaluating
from shoal.engine.proof.cases import stacked_state
from shoal.engine.proof.prove import prove_evaluation
from shoal.engine.recipes.frozen import alike_in_all
from shoal.engine.recipes.program import Program
from shoal.engine.recipes.recipe import Evaluation, TraceCache
from shoal.engine.rules.op_context import NotStackable
from shoal.engine.tiers.unit import (
    Unlike,
    context_lost,
    evaluated,
    is_own_dataclass,
    map_fields,
    member_output,
    out_of_memory,
    stack_outputs,
)
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
    """Return the eval-mode program of these models on a batch that they share; None if there is none.

    It must be stackable, draw no random numbers, and write to no parameters (as an embedding with max_norm does), which
    belong to the members' own models.

    Args:
        rows: The index of the model in each row of the stack.
        shared: The indices of parameters and buffers that are equal in all models. What depends only on these and on
            the batch is computed once.
    """
    try:
        flags = [False] * len(pytree.tree_leaves(batch))
        program = trace_cache.programs.get([traces[row] for row in rows], flags, device, shared)
        prove_evaluation(models, whats, traces, batch, trace_cache)
    except (NotStackable, Untraceable):
        return None
    return None if program.draws or program.written else program


class Forward:
    """Runs many models in eval mode on the same batches. Weights are stacked once for all batches.

    Used in a `with` statement, it moves models that had to be moved to `device` back to where they were.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        precision: str | None = None,
        *,
        whats: Sequence[Evaluation] | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Prepare to run `models`.

        Args:
            whats: What each model computes; by default its outputs.
            device: Where to run; by default on each model's device.
        """
        self.models = list(models)
        self.whats = [Evaluation.forward(precision)] * len(self.models) if whats is None else list(whats)
        self.device = device
        self._trace_cache = TraceCache()
        self._states: dict[tuple[int, ...], list[Tensor]] = {}
        self._shared: dict[tuple[int, ...], frozenset[int]] = {}
        self._homes: dict[int, torch.device] = {}
        self._most = max(1, len(self.models))
        """The most models that fit in memory at once, as far as is known."""
        self.calls = 0
        """The number of stacked programs run so far."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for index, device in self._homes.items():
            self.models[index].to(device)
        self._homes.clear()

    def __call__(self, inputs: tuple[Any, ...]) -> Any:
        """Return the outputs with the member axis first.

        Raises:
            ValueError: If the members' outputs have different shapes.
        """
        groups = self._groups(inputs)
        if len(groups) == 1 and groups[0][1]:
            stacked = self._stacked(groups[0][0], groups[0][1], inputs)
            if stacked is not None:
                return stacked
        return joined(self.each(inputs))

    def each(self, batch: Any) -> list[Any]:
        """Return what each model computes, as a list."""
        outputs: list[Any] = [None] * len(self.models)
        for indices, traces in self._groups(batch):
            stacked = self._stacked(indices, traces, batch) if traces else None
            for i, index in enumerate(indices):
                outputs[index] = self._alone(index, batch) if stacked is None else member_output(stacked, i)
        return outputs

    def _groups(self, batch: Any) -> list[tuple[list[int], list[Trace]]]:
        """Group models by what they compute, at most as many as fit in memory; models that cannot be traced are
        alone."""
        groups: dict[Hashable, tuple[list[int], list[Trace]]] = {}
        for index, (model, what) in enumerate(zip(self.models, self.whats, strict=True)):
            try:
                graph = self._trace_cache.evaluation(model, what, batch)
            except Untraceable:
                groups[("alone", index)] = ([index], [])
                continue
            indices, traces = groups.setdefault((skeleton(graph), what.precision), ([], []))
            indices.append(index)
            traces.append(graph)
        most = self._most
        return [
            (indices[i : i + most], traces[i : i + most])
            for indices, traces in groups.values()
            for i in range(0, len(indices), most)
        ]

    def _stacked(self, indices: list[int], traces: list[Trace], batch: Any) -> Any:
        """Run one program for all of these models; None if there is none or it would not pay."""
        if len(indices) < 2:
            return None
        models, rows = [self.models[index] for index in indices], range(len(indices))
        whats = [self.whats[index] for index in indices]
        device = self.device or next(models[0].parameters()).device
        key = tuple(indices)
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
                return None  # the models' own Python may handle it
        self._states.clear()  # then half of them at once
        self._most = max(1, len(indices) // 2)
        halves = [slice(0, self._most), slice(self._most, None)]
        parts = [self._stacked(indices[half], traces[half], batch) for half in halves]
        return None if any(part is None for part in parts) else pytree.tree_map(lambda *x: torch.cat(x), *parts)

    def _run(self, program: Program, indices: tuple[int, ...], trace: Trace, batch: Any, device: torch.device) -> Any:
        if indices not in self._states:
            stacked = stacked_state([self.models[i] for i in indices], trace, self._shared[indices])
            on_device = [tensor.to(device) for tensor in stacked]
            self._states[indices] = [tensor.expand(len(indices), *tensor.shape[1:]) for tensor in on_device]
        state, count = self._states[indices], len(trace.params)
        state = [*state[:count], *(buffer.clone() for buffer in state[count:])]  # eval mode may still write to buffers
        self.calls += 1
        with torch.no_grad(), autocast(self.whats[indices[0]].precision, device):
            outputs = program(state, pytree.tree_leaves(batch), lambda index: torch.empty(0))[0]
        return pytree.tree_map_only(Tensor, _with_own_rows, outputs)

    def _alone(self, index: int, batch: Any) -> Any:
        model, what = self.models[index], self.whats[index]
        first = next(model.parameters(), None)
        current_device = first.device if first is not None else torch.device("cpu")
        device = self.device or current_device
        if current_device != device:
            self._homes.setdefault(index, current_device)
            model.to(device)
        with evaluating(model), autocast(what.precision, device):
            own_batch = batch if len(self.models) == 1 else cloned(batch)  # a network may write to its inputs
            return evaluated(model, lambda: what.call(model, own_batch))[0]


def _with_own_rows(output: Tensor) -> Tensor:
    """Give each member its own memory in an output that was computed once for all members."""
    return output.contiguous() if output.dim() and not output.stride(0) else output


def joined(outputs: list[Any]) -> Any:
    """Stack one output of each member into one pytree or dataclass, members first.

    Beside tensors, objects that cannot be stacked (the cache of a language model) become a list with one for each.

    Raises:
        ValueError: If they have different shapes.
    """
    if is_own_dataclass(outputs[0]) and all(type(output) is type(outputs[0]) for output in outputs):
        return map_fields(joined, outputs)
    if _same_plain(outputs):
        return outputs[0]
    stacked = stack_outputs(outputs)
    if not isinstance(stacked, Unlike):
        return stacked
    (leaves, spec), *others = map(pytree.tree_flatten, outputs)
    if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(outputs)):
        kind = type(outputs[0]).__name__
        raise ValueError(f"outputs of type {kind} cannot be stacked; call each member's own model instead")
    columns = list(map(list, zip(leaves, *(row for row, _ in others), strict=False)))
    if any(spec != other for _, other in others) or not all(map(_fits, columns)):
        shapes = [list(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in outputs]
        raise ValueError(f"the members' outputs differ ({shapes}); call each member's own model instead")
    return pytree.tree_unflatten([_column(column) for column in columns], spec)


def _same_plain(values: list[Any]) -> bool:
    return all(isinstance(value, bool | int | float | str) and value == values[0] for value in values)


def _fits(column: list[Any]) -> bool:
    """Return whether a part of the outputs, one value for each member, can be given back together."""
    return not any(isinstance(value, Tensor) for value in column) or not isinstance(stack_outputs(column), Unlike)


def _column(column: list[Any]) -> Any:
    if is_own_dataclass(column[0]) or _same_plain(column):
        return joined(column)
    stacked = stack_outputs(column)
    return column if isinstance(stacked, Unlike) else stacked
