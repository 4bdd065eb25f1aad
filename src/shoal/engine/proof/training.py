"""Proof, before any training, that a stacked program computes what the user's own step computes.

A trace records what a step did once, and a graph cannot carry everything that Python does. So a trace is not believed:
the user's step and the stacked program run side by side, from the same state, on the same batches, for two steps (what
the first one leaves behind shows in the second), and everything that training uses is compared: the loss, the logs,
every gradient (none is not zero), every buffer, `requires_grad`, and how many random numbers were drawn.

It is done in float64, where two orders of summation differ by far less than any mistake. A model that does not run in
float64, or a job with a `precision`, is compared in its own dtypes, within ten times what rounding its inputs changes.
Evaluation is proven in the same way, under the grad mode that it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.engine.members.member import Member, autocast, draws, number, run_step, scratch_copy
from shoal.engine.planning import memory
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
from shoal.engine.recipes.program import Program, as_column
from shoal.engine.tracing.params_with_grad import used_params
from shoal.engine.tracing.trace import Trace
from shoal.engine.tracing.trace import autocast as autocast_for
from shoal.utils.randomness import draw_step, generator_at
from shoal.utils.tables import size as format_bytes

if TYPE_CHECKING:
    from shoal.engine.recipes.recipe import Recipe, TraceCache

from shoal.engine.proof.cases import (
    Case,
    NotInFloat64,
    caches_of,
    chosen,
    fresh_copy,
    in_float64,
    lifted_places,
    note,
    same_world,
    stacked_state,
    twin_of,
    unchecked,
)


def prove_training(recipes: Sequence[Recipe], trace_cache: TraceCache, *, solo: bool = False) -> dict[int, str]:
    """Why members of one recipe key may not train by their common program, by index; those who may are left out.

    `solo`: by a program of one member, without a member axis.
    """
    proofs, key = trace_cache.proofs, (trace_cache.proofs.number(recipes[0].key), solo)
    cases = [Case(key, recipe.steps, recipe) for recipe in recipes]
    for rows in chosen(cases, proofs, apart=solo):
        note(proofs, rows, _reasons(rows, trace_cache, solo))
    reasons = {case.subject.member.index: proofs.reasons[case.kind] for case in cases}
    return {index: reason for index, reason in reasons.items() if reason}


def proven_together(recipes: Sequence[Recipe], trace_cache: TraceCache) -> bool:
    """Whether members that were proven apart differ only in numbers that were proven to be each member's own."""
    key = (trace_cache.proofs.number(recipes[0].key), False)
    cases = [Case(key, recipe.steps, recipe) for recipe in recipes]
    return lifted_places(cases) <= trace_cache.proofs.lifted.get(cases[0].key, set())


def _reasons(rows: Sequence[Case], trace_cache: TraceCache, solo: bool) -> list[str]:
    """For each of these members, what differs; empty where nothing does."""
    members: list[Member] = [case.subject.member for case in rows]
    need = 4 * sum(memory.rough(case.subject) for case in rows)  # twice the bytes of an element, both ways
    free = memory.free_bytes(members[0].device)
    if need > free:
        return [f"checking it would take about {format_bytes(need)}, and {format_bytes(free)} is free"] * len(rows)
    narrow = any(member.job.precision is not None for member in members)
    try:
        with same_world(*((m.job.step, m.job.loss) for m in members), caches=caches_of(rows)) as world:
            try:
                reasons = _compare_steps(rows, trace_cache, wide=not narrow, solo=solo)
            except NotInFloat64:
                reasons = _compare_steps(rows, trace_cache, wide=False, solo=solo)
        return [(reason and f"its own step does something else: {reason}") or world.reason for reason in reasons]
    except Exception as error:
        return [unchecked(error)] * len(rows)


def _compare_steps(rows: Sequence[Case], trace_cache: TraceCache, *, wide: bool, solo: bool) -> list[str]:
    """Two steps both ways; the second on the shortest batch there is, which all members share.

    The second step is compared for the first member alone: what a step leaves behind shows in anybody's.
    """
    members = [_copied(case.subject.member, wide) for case in rows]
    sizes = list(rows[0].steps)
    reasons = [""] * len(members)
    for size, apart, compared in ((sizes[0], not solo, members), (sizes[-1], False, members[:1])):
        batches = [_batch(member, size, place, wide) for place, member in enumerate(members)]
        batches = batches if apart else batches[-1:] * len(members)
        traces = [
            _step_trace(case.steps[size], member, batch, trace_cache, wide)
            for case, member, batch in zip(rows, members, batches, strict=True)
        ]
        by_program = in_float64(wide, _run_program, members, traces, batches, apart, solo, trace_cache.deterministic)
        for place, member in enumerate(compared):
            start, stream = state_of(member.model), member.rng.get_state()
            by_itself = in_float64(wide, _run_step, member, fresh_copy(batches[place]))
            trace_cache.proofs.steps += 1
            reason = difference(by_itself, by_program[place])
            if reason and is_coarse(traces[place]):
                other = replace(member, model=rounded(member.model, start, traces[place]), rng=generator_at(stream))
                slack = _run_step(other, rounded_leaves(batches[place], traces[place]))
                reason = difference(by_itself, by_program[place], slack, coarsest(traces[place]))
                trace_cache.proofs.steps += 1
            reasons[place] = reasons[place] or reason
            _descend(member.model)
    return reasons


def _copied(member: Member, wide: bool) -> Member:
    """A copy on its device, in float64 where that is wanted."""
    scratch = scratch_copy(member)
    scratch.model = (widen(scratch.model) if wide else scratch.model).to(member.device)
    return scratch


def _batch(member: Member, size: int, place: int, wide: bool) -> Any:
    """A batch of so many rows; that of another place is from elsewhere in the data."""
    start = min(place * size, max(0, member.num_rows - size))
    batch = member.data.take(start, start + size)
    return widen_leaves(batch) if wide else batch


def _step_trace(recorded: Trace, member: Member, batch: Any, trace_cache: TraceCache, wide: bool) -> Trace:
    """The graph of the copy's step: the one that will train, or in float64 its twin of the same operators."""
    return twin_of(recorded, wide, partial(trace_cache.step_on, member, batch, twice=False))


def _run_program(
    members: Sequence[Member],
    traces: Sequence[Trace],
    batches: Sequence[Any],
    apart: bool,
    solo: bool,
    deterministic: bool,
) -> list[Observed]:
    """What the program gives for each member, from where the members are; nothing of theirs changes."""
    trace, device = traces[0], members[0].device
    leaves = [pytree.tree_leaves(batch) for batch in batches]
    program = Program(
        traces, device=device, stacked_batch=[apart] * len(leaves[0]), solo=solo, deterministic=deterministic
    )
    used = [a and b for a, b in zip(trace.trainable, used_params(trace), strict=True)]
    state = stacked_state([member.model for member in members], trace)
    state = [tensor[0] for tensor in state] if solo else state
    weights = [tensor.requires_grad_() for tensor, wanted in zip(state, used, strict=False) if wanted]
    columns = [torch.stack(column) if apart else column[0].clone() for column in zip(*leaves, strict=True)]
    generators = [generator_at(member.rng.get_state()) for member in members]
    noise = draw_step(program.draws, generators, [m.job.seed for m in members], [m.batches for m in members], device)
    noise = [value[0] for value in noise] if solo else noise
    with torch.enable_grad(), autocast_for(members[0].job.precision, device):
        (losses, logs), after = program(state, columns, noise.__getitem__)
    grads = iter(torch.autograd.grad(losses.sum(), weights, allow_unused=True) if weights else ())
    gradients = {name: next(grads) if wanted else None for name, wanted in zip(trace.params, used, strict=True)}
    logged = {name: as_column(value, 1 if solo else len(members)) for name, value in logs.items()}
    flags = dict(zip(trace.params, trace.trainable, strict=True))
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
    """What the user's own step gives, forward and backward; the member's buffers and stream move on."""
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


def _descend(model: nn.Module) -> None:
    """Move along the gradients, so that the second step is not the first one again."""
    with torch.no_grad():
        for param in model.parameters():
            if param.grad is not None:
                param.sub_(1e-3 * param.grad)
