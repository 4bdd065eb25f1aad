"""Prove, before any training, that a stacked program computes what the user's own step computes.

A trace records what a step did once, and a graph cannot represent everything that Python does. So the user's step and
the stacked program run from the same state, on the same batches, for two steps (what the first changes shows in the
second), and everything that training uses is compared: the loss, the logs, every gradient (None differs from zero),
every buffer, `requires_grad`, and how many random numbers were drawn.

This is done in float64, where two orders of summation differ far less than any mistake. A model that does not run in
float64, or a job with a `precision`, is compared in its own dtypes, within ten times what rounding its inputs changes.
Evaluation is proven in the same way, in the grad mode that it has.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.data.loader import LoaderSource
from shoal.engine.members.member import Member, draws
from shoal.engine.members.scratch import scratch_copy
from shoal.engine.members.step import autocast, evaluating, number, run_step
from shoal.engine.planning import memory
from shoal.engine.proof import cases as proof_cases
from shoal.engine.proof._observed import Observed, difference, rounded, rounded_leaves, state_of, widen, widen_leaves
from shoal.engine.proof.cases import Case, Disproved, TraceFor, fresh_copy, in_float64
from shoal.engine.recipes.program import Program, as_column
from shoal.engine.recipes.recipe import Evaluation, validation_batches
from shoal.engine.tracing.signature import skeleton
from shoal.engine.tracing.trace import Trace
from shoal.engine.tracing.trace import autocast as autocast_for
from shoal.utils.randomness import draw_step, generator_at
from shoal.utils.tables import size as format_bytes

if TYPE_CHECKING:
    from shoal.engine.recipes.recipe import Recipe, TraceCache


OTHER_WEIGHTS = "batches of different shapes give gradients to different weights"
"""The reason why members are not stacked if batch shapes train different weights; a stack always updates the same."""


def prove_training(recipes: Sequence[Recipe], trace_cache: TraceCache, *, solo: bool = False) -> dict[int, str]:
    """Return by index the reasons why members of one recipe key may not train with their common program.

    Members that may are left out.

    Args:
        solo: Prove a program of one member, without a member axis.
    """
    proofs, key = trace_cache.proofs, (trace_cache.proofs.number(recipes[0].key), solo)
    cases = [Case(key, recipe.steps, recipe) for recipe in recipes]
    for rows in proof_cases.choose_rows(cases, proofs, apart=solo):
        proof_cases.note(proofs, rows, _reasons(rows, trace_cache, solo))
    reasons = {}
    for case in cases:
        for size, trace in case.steps.items():
            trace.used = proofs.used.get((key, size), trace.used)
        first, *others = (trace.trained for trace in case.steps.values())
        differs = OTHER_WEIGHTS if any(trained != first for trained in others) else ""
        reasons[case.subject.member.index] = proofs.reasons[case.kind] or differs
    return {index: reason for index, reason in reasons.items() if reason}


def proven_together(recipes: Sequence[Recipe], trace_cache: TraceCache) -> bool:
    """Return whether members that were proven separately differ only in numbers that were proven to be per member."""
    key = (trace_cache.proofs.number(recipes[0].key), False)
    cases = [Case(key, recipe.steps, recipe) for recipe in recipes]
    return proof_cases.lifted_places(cases) <= trace_cache.proofs.lifted.get(cases[0].key, set())


def _reasons(rows: Sequence[Case], trace_cache: TraceCache, solo: bool) -> list[str]:
    """Return for each of these members what differs; empty if nothing does."""
    members: list[Member] = [case.subject.member for case in rows]
    need = 4 * sum(memory.rough_bytes(case.subject) for case in rows)  # two runs in float64
    free = memory.free_bytes(members[0].device)
    if need > free:
        return [f"checking it would take about {format_bytes(need)}, and {format_bytes(free)} is free"] * len(rows)
    wide = all(member.job.precision is None for member in members)
    code = [(member.job.step, member.job.loss) for member in members]
    reasons = proof_cases.compare(rows, code, wide, partial(_compare_steps, rows, trace_cache, solo))
    return [reason or _changed_validation(case) for reason, case in zip(reasons, rows, strict=True)]


def _compare_steps(
    rows: Sequence[Case], trace_cache: TraceCache, solo: bool, wide: bool, trace_for: TraceFor
) -> list[str]:
    """Run two steps both ways and compare them; the second on the shortest batch, which all members share.

    The second step is compared for the first member only, since what a step changes shows in any member, or for all if
    a first call leaves something behind. All graphs are made before: what the first step leaves behind is not in them.
    """
    members = [_copied(case.subject.member, wide) for case in rows]
    sizes = list(rows[0].steps)
    reasons = [""] * len(members)
    caches = any(trace.caches for case in rows for trace in case.steps.values())
    steps = []
    for size, apart, compared in (
        (sizes[0], not solo, members),
        (sizes[-1], False, members if caches else members[:1]),
    ):
        batches = [_batch(member, size, place, wide) for place, member in enumerate(members)]
        batches = batches if apart else batches[-1:] * len(members)
        traces = [
            trace_for(case.steps[size], partial(trace_cache.step_on, member, batch, twice=False))
            for case, member, batch in zip(rows, members, batches, strict=True)
        ]
        steps.append((size, apart, compared, batches, traces))
    for size, apart, compared, batches, traces in steps:
        shared = frozenset() if solo else rows[0].subject.shared
        by_program = in_float64(
            wide, _run_program, members, traces, batches, apart, solo, trace_cache.deterministic, shared
        )
        gradients = by_program[0].values["gradient of"].values()
        trace_cache.proofs.used[rows[0].key, size] = [gradient is not None for gradient in gradients]
        for place, member in enumerate(compared):
            start, stream = state_of(member.model), member.rng.get_state()
            by_itself = in_float64(wide, _run_step, member, fresh_copy(batches[place]))
            trace_cache.proofs.steps += 1
            run_rounded = partial(_run_rounded_step, member, start, stream, batches[place], traces[place], trace_cache)
            reason = difference(by_itself, by_program[place], traces[place], run_rounded)
            reason = reason and f"its own step does something else: {reason}"
            reasons[place] = reasons[place] or reason
            _descend(member.model)
    return reasons


def _changed_validation(case: Case) -> str:
    """Return why a member's validation cannot be recorded beside its training: the first training step leaves something
    behind that changes it, such as a number that a cache takes from the mode of the model."""
    member: Member = case.subject.member
    if member.val is None or not any(trace.caches for trace in case.steps.values()):
        return ""
    what, first = Evaluation.validation(member.job, bool(member.job.metrics)), next(iter(case.steps))
    val, source = member.val, member.val.source

    def evaluate_after_step(batch: Any, step: bool) -> Observed:
        with proof_cases.same_world(member.job.step, member.job.loss, caches=True):
            member_copy = _copied(member, wide=False)
            start = state_of(member_copy.model)
            if step:
                _run_step(member_copy, _batch(member_copy, first, 0, wide=False))
            with torch.no_grad():
                for name, tensor in (*member_copy.model.named_parameters(), *member_copy.model.named_buffers()):
                    tensor.copy_(start[name])
            return _run_evaluation(member_copy.model, what, fresh_copy(batch))

    try:
        loaded = [source.sample(1)] if isinstance(source, LoaderSource) else None
        for batch in loaded or validation_batches(val, member.job.batch_size):
            alone, after = (evaluate_after_step(batch, step) for step in (False, True))
            reason = difference(alone, after, case.steps[first], partial(evaluate_after_step, batch, False))
            if reason:
                return f"what its first training step leaves behind changes its validation: {reason}"
    except Exception as error:
        return proof_cases.unchecked(error)
    return ""


def _copied(member: Member, wide: bool) -> Member:
    """Return a copy of the member on its device, in float64 if `wide`."""
    scratch = scratch_copy(member)
    scratch.model = (widen(scratch.model) if wide else scratch.model).to(member.device)
    return scratch


def _batch(member: Member, size: int, place: int, wide: bool) -> Any:
    """Return a batch of so many rows; another `place` gives other rows."""
    source, start = member.data.source, min(place * size, max(0, member.num_rows - size))
    batch = source.sample(size, place) if isinstance(source, LoaderSource) else member.data.take(start, start + size)
    return widen_leaves(batch) if wide else batch


def _run_program(
    members: Sequence[Member],
    traces: Sequence[Trace],
    batches: Sequence[Any],
    apart: bool,
    solo: bool,
    deterministic: bool,
    shared: frozenset[int],
) -> list[Observed]:
    """Run the program from the members' current state, and return its results for each. The members are not changed."""
    trace, device = traces[0], members[0].device
    leaves = [pytree.tree_leaves(batch) for batch in batches]
    program = Program(
        traces, device=device, stacked_batch=[apart] * len(leaves[0]), solo=solo, deterministic=deterministic,
        shared=shared,
    )  # fmt: skip
    state = proof_cases.stacked_state([member.model for member in members], trace)
    state = [tensor[0] for tensor in state] if solo else state
    weights = [tensor.requires_grad_() for tensor, wanted in zip(state, trace.trainable, strict=False) if wanted]
    columns = [torch.stack(column) if apart else column[0].clone() for column in zip(*leaves, strict=True)]
    generators = [generator_at(member.rng.get_state()) for member in members]
    noise = draw_step(program.draws, generators, [m.job.seed for m in members], [m.batches for m in members], device)
    noise = [value[0] for value in noise] if solo else noise
    with torch.enable_grad(), autocast_for(members[0].job.precision, device):
        (losses, logs), after = program(state, columns, noise.__getitem__)
    flags = dict(zip(trace.params, trace.trainable, strict=True))
    grads = iter(torch.autograd.grad(losses.sum(), weights, allow_unused=True) if weights else ())
    gradients = {name: next(grads) if wanted else None for name, wanted in flags.items()}
    logged = {name: as_column(value, 1 if solo else len(members)) for name, value in logs.items()}
    after_params: dict[str, Tensor | None] = {
        name: tensor.detach() for name, tensor in zip(trace.params, state, strict=False)
    }

    def row(values: dict[str, Tensor | None], place: int) -> dict[str, Tensor | None]:
        return {name: v if v is None or solo else v[place] for name, v in values.items()}

    return [
        Observed(
            {
                "loss": row({"": losses}, place),
                "log": {name: column[0 if solo else place] for name, column in logged.items()},
                "gradient of": row(gradients, place),
                "weight": row(after_params, place),
                "buffer": row({name: after[name] for name in trace.buffers}, place),
            },
            flags,
            generator.get_state() if device.type == "cpu" else None,
        )
        for place, generator in enumerate(generators)
    ]


def _run_step(member: Member, batch: Any) -> Observed:
    """Run the user's step forward and backward, and return its results. The member's buffers and random stream
    advance."""
    job, model = member.job, member.model
    params = dict(model.named_parameters())
    for param in params.values():
        param.grad = None
    with draws(member) as begin, torch.enable_grad():
        begin()
        with autocast(job, member.device):
            loss, logs = run_step(job, model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
    return Observed(
        {
            "loss": {"": loss.detach()},
            "log": {name: torch.tensor(number(value), dtype=torch.float64) for name, value in logs.items()},
            "gradient of": {name: param.grad for name, param in params.items()},
            "weight": {name: param.detach().clone() for name, param in params.items()},
            "buffer": {name: buffer.detach().clone() for name, buffer in model.named_buffers()},
        },
        {name: param.requires_grad for name, param in params.items()},
        member.rng.get_state() if member.device.type == "cpu" else None,
    )


def _run_rounded_step(
    member: Member, start: dict[str, Tensor], stream: Tensor, batch: Any, trace: Trace, trace_cache: TraceCache
) -> Observed:
    """Run the user's step from rounded weights and rows, which shows how much rounding can change."""
    trace_cache.proofs.steps += 1
    other = replace(member, model=rounded(member.model, start, trace), rng=generator_at(stream))
    return _run_step(other, rounded_leaves(batch, trace))


def _descend(model: nn.Module) -> None:
    """Move along the gradients, so that the second step differs from the first."""
    with torch.no_grad():
        for param in model.parameters():
            if param.grad is not None:
                param.sub_(1e-3 * param.grad)


# --- evaluation -----------------------------------------------------------------------------------------------------


def prove_evaluation(
    models: Sequence[nn.Module],
    whats: Sequence[Evaluation],
    traces: Sequence[Trace],
    batch: Any,
    trace_cache: TraceCache,
) -> None:
    """Check that models in eval mode give the results of their common program.

    Raises:
        Disproved: If they do not.
    """
    key = ("evaluation", trace_cache.proofs.number(skeleton(traces[0])))
    cases = [Case(key, {0: t}, subject) for t, *subject in zip(traces, models, whats, strict=True)]
    for rows in proof_cases.choose_rows(cases, trace_cache.proofs, apart=False):
        code = [case.subject[1].function for case in rows]
        compare_outputs = partial(_compare_outputs, rows, batch, trace_cache)
        reasons = proof_cases.compare(rows, code, whats[0].precision is None, compare_outputs)
        proof_cases.note(trace_cache.proofs, rows, reasons)
    for case in cases:
        if trace_cache.proofs.reasons[case.kind]:
            raise Disproved(trace_cache.proofs.reasons[case.kind])


def _compare_outputs(
    rows: Sequence[Case], batch: Any, trace_cache: TraceCache, wide: bool, trace_for: TraceFor
) -> list[str]:
    leaves = pytree.tree_leaves(batch)
    models = [copy.deepcopy(case.subject[0]).to(leaves[0].device) for case in rows]
    whats: list[Evaluation] = [case.subject[1] for case in rows]
    device, precision = leaves[0].device, whats[0].precision
    if wide:
        models, batch = [widen(model) for model in models], widen_leaves(batch)
        leaves = pytree.tree_leaves(batch)
    traces = [
        trace_for(case.steps[0], partial(trace_cache.evaluation, model, what, batch, twice=False))
        for case, model, what in zip(rows, models, whats, strict=True)
    ]
    program = Program(
        traces, device=device, stacked_batch=[False] * len(leaves), deterministic=trace_cache.deterministic
    )
    if program.draws:
        return ["it draws random numbers in eval mode"] * len(rows)
    state = proof_cases.stacked_state(models, traces[0])
    with torch.no_grad(), autocast_for(precision, device):
        outputs, after = in_float64(wide, program, state, fresh_copy(leaves), lambda index: torch.empty(0))
    reasons = []
    for place, (model, what, trace) in enumerate(zip(models, whats, traces, strict=True)):
        start = state_of(model)
        expected = in_float64(wide, _run_evaluation, model, what, fresh_copy(batch))
        seen = _outputs(*pytree.tree_map_only(Tensor, itemgetter(place), (outputs, after)))
        reasons.append(
            difference(expected, seen, trace, partial(_run_rounded_evaluation, model, start, what, batch, trace))
        )
    return reasons


def _run_evaluation(model: nn.Module, what: Evaluation, batch: Any) -> Observed:
    device = next((leaf.device for leaf in pytree.tree_leaves(batch)), torch.device("cpu"))
    with torch.random.fork_rng([]), evaluating(model), autocast_for(what.precision, device):
        outputs = what.call(model, batch)
    return _outputs(outputs, {name: buffer.detach().clone() for name, buffer in model.named_buffers()})


def _run_rounded_evaluation(
    model: nn.Module, start: dict[str, Tensor], what: Evaluation, batch: Any, trace: Trace
) -> Observed:
    return _run_evaluation(rounded(model, start, trace), what, rounded_leaves(batch, trace))


def _outputs(outputs: Any, buffers: dict[str, Tensor]) -> Observed:
    leaves = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor | int | float)]
    tensors = [x.detach() if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64) for x in leaves]
    return Observed({"output": {str(i): x for i, x in enumerate(tensors)}, "buffer": dict(buffers)})
