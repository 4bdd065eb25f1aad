"""Eval-mode programs of a stack's members, made when they are first needed, one for each shape of batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.engine.members.member import Member
from shoal.engine.recipes.program import Program
from shoal.engine.recipes.recipe import Evaluation, TraceCache
from shoal.engine.stack.stack import Stack
from shoal.engine.tiers.stacked.forward import evaluation_program
from shoal.engine.tracing.patches import Untraceable
from shoal.engine.tracing.trace import Trace
from shoal.jobs.job import Job


class EvaluationPrograms:
    """Programs for batches that all members share."""

    def __init__(self, traces: dict[Any, list[Trace]] | None = None) -> None:
        """Start without programs. `traces` are those of the same members in another stack."""
        self._programs: dict[Any, Program | None] = {}
        self._traces = traces or {}

    def of(self, slots: Sequence[int]) -> EvaluationPrograms:
        """Return the programs of a stack of some of these members, whose traces are reused."""
        return EvaluationPrograms({key: [traces[slot] for slot in slots] for key, traces in self._traces.items()})

    def get(
        self,
        kind: str,
        batch: Any,
        what: Callable[[Job], Evaluation],
        members: Sequence[Member],
        stack: Stack,
        trace_cache: TraceCache,
    ) -> Program | None:
        """Return the program of this kind for batches like this one; None: members must be evaluated separately."""
        key = (kind, *_shapes(batch))
        if key not in self._programs:
            models, whats = [member.model for member in members], [what(member.job) for member in members]
            self._programs[key] = None
            try:
                if key not in self._traces:
                    pairs = zip(models, whats, strict=True)
                    self._traces[key] = [trace_cache.evaluation(model, what, batch) for model, what in pairs]
            except Untraceable:
                return None
            self._programs[key] = evaluation_program(
                models, whats, self._traces[key], stack.rows, batch, trace_cache, stack.device, stack.shared
            )
        return self._programs[key]


def _shapes(batch: Any) -> tuple[Any, ...]:
    """Return a batch's structure and the shapes of its tensors. For a plain tuple this does not need its pytree
    spec."""
    if type(batch) in (tuple, list) and all(type(leaf) is Tensor for leaf in batch):
        return type(batch), *((tuple(leaf.shape), leaf.dtype) for leaf in batch)
    leaves, spec = pytree.tree_flatten(batch)
    return repr(spec), *((tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else None for leaf in leaves)
