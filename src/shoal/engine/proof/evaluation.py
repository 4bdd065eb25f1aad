"""Proof that members in eval mode give what their common program gives, in the manner of `prove`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.engine.members.member import evaluating
from shoal.engine.proof._observed import (
    Observed,
    coarsest,
    difference,
    is_coarse,
    rounded,
    rounded_leaves,
    state_of,
    widen,
    widen_leaves,
)
from shoal.engine.recipes.program import Program
from shoal.engine.tracing.signature import skeleton
from shoal.engine.tracing.trace import Trace
from shoal.engine.tracing.trace import autocast as autocast_for

if TYPE_CHECKING:
    from shoal.engine.recipes.recipe import Evaluation, TraceCache

from shoal.engine.proof.cases import (
    Case,
    Disproved,
    NotInFloat64,
    caches_of,
    chosen,
    fresh_copy,
    in_float64,
    note,
    same_world,
    stacked_state,
    twin_of,
    unchecked,
)


def prove_evaluation(
    models: Sequence[nn.Module],
    whats: Sequence[Evaluation],
    traces: Sequence[Trace],
    batch: Any,
    trace_cache: TraceCache,
) -> None:
    """See that models in eval mode give what their common program gives.

    Raises:
        Disproved: when it does not.
    """
    key = ("evaluation", trace_cache.proofs.number(skeleton(traces[0])))
    cases = [Case(key, {0: t}, subject) for t, *subject in zip(traces, models, whats, strict=True)]
    for rows in chosen(cases, trace_cache.proofs, apart=False):
        try:
            with same_world(*(case.subject[1].function for case in rows), caches=caches_of(rows)) as world:
                try:
                    reasons = _compare_outputs(rows, batch, trace_cache, wide=whats[0].precision is None)
                except NotInFloat64:
                    reasons = _compare_outputs(rows, batch, trace_cache, wide=False)
            note(trace_cache.proofs, rows, [reason or world.reason for reason in reasons])
        except Exception as error:
            note(trace_cache.proofs, rows, [unchecked(error)] * len(rows))
    for case in cases:
        if trace_cache.proofs.reasons[case.kind]:
            raise Disproved(trace_cache.proofs.reasons[case.kind])


def _compare_outputs(rows: Sequence[Case], batch: Any, trace_cache: TraceCache, *, wide: bool) -> list[str]:
    leaves = pytree.tree_leaves(batch)
    models = [copy.deepcopy(case.subject[0]).to(leaves[0].device) for case in rows]
    whats: list[Evaluation] = [case.subject[1] for case in rows]
    device, precision = leaves[0].device, whats[0].precision
    if wide:
        models, batch = [widen(model) for model in models], widen_leaves(batch)
        leaves = pytree.tree_leaves(batch)
    traces = [
        twin_of(case.steps[0], wide, partial(trace_cache.evaluation, model, what, batch, twice=False))
        for case, model, what in zip(rows, models, whats, strict=True)
    ]
    program = Program(
        traces, device=device, stacked_batch=[False] * len(leaves), deterministic=trace_cache.deterministic
    )
    if program.draws:
        return ["it draws random numbers in eval mode"] * len(rows)
    state = stacked_state(models, traces[0])
    with torch.no_grad(), autocast_for(precision, device):
        outputs, after = in_float64(wide, program, state, fresh_copy(leaves), lambda index: torch.empty(0))
    reasons = []
    for place, (model, what, trace) in enumerate(zip(models, whats, traces, strict=True)):
        start = state_of(model)
        expected = in_float64(wide, _run_evaluation, model, what, fresh_copy(batch))
        seen = _outputs(*pytree.tree_map_only(Tensor, itemgetter(place), (outputs, after)))
        reason = difference(expected, seen)
        if reason and is_coarse(trace):
            nearby = rounded(model, start, trace)
            slack = _run_evaluation(nearby, what, rounded_leaves(batch, trace))
            reason = difference(expected, seen, slack, coarsest(trace))
        reasons.append(reason)
    return reasons


def _run_evaluation(model: nn.Module, what: Evaluation, batch: Any) -> Observed:
    device = next((leaf.device for leaf in pytree.tree_leaves(batch)), torch.device("cpu"))
    with torch.random.fork_rng([]), evaluating(model), autocast_for(what.precision, device):
        outputs = what.call(model, batch)
    return _outputs(outputs, {name: buffer.detach().clone() for name, buffer in model.named_buffers()})


def _outputs(outputs: Any, buffers: dict[str, Tensor]) -> Observed:
    leaves = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor | int | float)]
    tensors = [x.detach() if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64) for x in leaves]
    return Observed({"output": {str(i): x for i, x in enumerate(tensors)}, "buffer": dict(buffers)})
