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

import copy
import random
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.errors import describe
from shoal.pack import memory
from shoal.pack.members import Member, autocast, draws, evaluating, number, run_step, scratch_copy
from shoal.pack.observe import (
    Observed,
    difference,
    rounded,
    rounded_leaves,
    state_of,
    widen,
    widen_leaves,
)
from shoal.pack.python_state import preserved
from shoal.pack.signature import Path, lift, numbers, skeleton
from shoal.pack.stacked.program import Program, as_column
from shoal.pack.trace import Trace, Untraceable
from shoal.pack.trace import autocast as autocast_for
from shoal.pack.unit import context_lost, out_of_memory
from shoal.pack.used import used_params
from shoal.randomness import draw_step, generator_at
from shoal.tables import size as format_bytes

if TYPE_CHECKING:
    from shoal.pack.recipe import Evaluation, Kitchen, Proofs, Recipe

_T = TypeVar("_T")

MOST_ROWS = 4
"""Members that are proven in one program."""


class Disproved(Untraceable):
    """The program does something else than the user's code; the message says where."""


class _NotInFloat64(Exception):
    """The step, or its trace, does not run in float64."""


@dataclass(slots=True, eq=False)
class _Case:
    """One member's graphs, and what they are a record of."""

    key: Hashable
    """Equal for graphs that can be stacked."""
    steps: dict[int, Trace]
    subject: Any
    """The member's recipe, or for an evaluation its model."""

    @property
    def kind(self) -> Hashable:
        """What is proven once: the graph, and the code that it records, whatever the floating-point numbers in it."""
        return self.key, tuple(trace.kind for trace in self.steps.values())


# --- training -------------------------------------------------------------------------------------------------------


def prove_training(recipes: Sequence[Recipe], kitchen: Kitchen, *, solo: bool = False) -> dict[int, str]:
    """Why members of one recipe key may not train by their common program, by index; those who may are left out.

    `solo`: by a program of one member, without a member axis.
    """
    proofs, key = kitchen.proofs, (kitchen.proofs.number(recipes[0].key), solo)
    cases = [_Case(key, recipe.steps, recipe) for recipe in recipes]
    for rows in _chosen(cases, proofs, apart=solo):
        _note(proofs, rows, _reasons(rows, kitchen, solo))
    reasons = {case.subject.member.index: proofs.reasons[case.kind] for case in cases}
    return {index: reason for index, reason in reasons.items() if reason}


def proven_together(recipes: Sequence[Recipe], kitchen: Kitchen) -> bool:
    """Whether members that were proven apart differ only in numbers that were proven to be each member's own."""
    key = (kitchen.proofs.number(recipes[0].key), False)
    cases = [_Case(key, recipe.steps, recipe) for recipe in recipes]
    return _lifted(cases) <= kitchen.proofs.lifted.get(cases[0].key, set())


def _reasons(rows: Sequence[_Case], kitchen: Kitchen, solo: bool) -> list[str]:
    """For each of these members, what differs; empty where nothing does."""
    members: list[Member] = [case.subject.member for case in rows]
    need = 4 * sum(memory.rough(case.subject) for case in rows)  # twice the bytes of an element, both ways
    free = memory.free_bytes(members[0].device)
    if need > free:
        return [f"checking it would take about {format_bytes(need)}, and {format_bytes(free)} is free"] * len(rows)
    narrow = any(member.job.precision is not None for member in members)
    try:
        with _same_world(*((m.job.step, m.job.loss) for m in members), caches=_caches(rows)) as world:
            try:
                reasons = _compare_steps(rows, kitchen, wide=not narrow, solo=solo)
            except _NotInFloat64:
                reasons = _compare_steps(rows, kitchen, wide=False, solo=solo)
        return [(reason and f"its own step does something else: {reason}") or world.reason for reason in reasons]
    except Exception as error:
        return [_unchecked(error)] * len(rows)


def _compare_steps(rows: Sequence[_Case], kitchen: Kitchen, *, wide: bool, solo: bool) -> list[str]:
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
            _step_trace(case.steps[size], member, batch, kitchen, wide)
            for case, member, batch in zip(rows, members, batches, strict=True)
        ]
        by_program = _in_float64(wide, _run_program, members, traces, batches, apart, solo, kitchen.deterministic)
        for place, member in enumerate(compared):
            start, stream = state_of(member.model), member.rng.get_state()
            by_itself = _in_float64(wide, _run_step, member, _fresh(batches[place]))
            kitchen.proofs.steps += 1
            reason = difference(by_itself, by_program[place])
            if reason:
                other = replace(member, model=rounded(member.model, start, traces[place]), rng=generator_at(stream))
                slack = _run_step(other, rounded_leaves(batches[place], traces[place]))
                reason = difference(by_itself, by_program[place], slack)
                kitchen.proofs.steps += 1
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


def _fresh(batch: Any) -> Any:
    """A copy of a batch, for code that may write to it."""
    return pytree.tree_map_only(Tensor, Tensor.clone, batch)


def _step_trace(recorded: Trace, member: Member, batch: Any, kitchen: Kitchen, wide: bool) -> Trace:
    """The graph of the copy's step: the one that will train, or in float64 its twin of the same operators."""
    return _twin(recorded, wide, partial(kitchen.step_on, member, batch, twice=False))


def _twin(recorded: Trace, wide: bool, record: Callable[[], Trace]) -> Trace:
    if not wide:
        return recorded
    try:
        trace = record()
    except Untraceable as refusal:
        raise _NotInFloat64 from refusal
    if not trace.like(recorded):
        raise _NotInFloat64
    return trace


def _in_float64(wide: bool, run: Callable[..., _T], *args: Any) -> _T:
    """Run; what raises in float64 may still run in the model's own dtypes."""
    try:
        return run(*args)
    except Exception as error:
        if wide and not (out_of_memory(error) or context_lost(error)):
            raise _NotInFloat64 from error
        raise


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
    state = _stacked_state([member.model for member in members], trace)
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


def _stacked_state(models: Sequence[nn.Module], trace: Trace) -> list[Tensor]:
    named = [{**dict(model.named_parameters()), **dict(model.named_buffers())} for model in models]
    return [torch.stack([own[name].detach() for own in named]) for name in (*trace.params, *trace.buffers)]


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


# --- evaluation -----------------------------------------------------------------------------------------------------


def prove_evaluation(
    models: Sequence[nn.Module], whats: Sequence[Evaluation], traces: Sequence[Trace], batch: Any, kitchen: Kitchen
) -> None:
    """See that models in eval mode give what their common program gives.

    Raises:
        Disproved: when it does not.
    """
    key = ("evaluation", kitchen.proofs.number(skeleton(traces[0])))
    cases = [_Case(key, {0: t}, subject) for t, *subject in zip(traces, models, whats, strict=True)]
    for rows in _chosen(cases, kitchen.proofs, apart=False):
        try:
            with _same_world(*(case.subject[1].function for case in rows), caches=_caches(rows)) as world:
                try:
                    reasons = _compare_outputs(rows, batch, kitchen, wide=whats[0].precision is None)
                except _NotInFloat64:
                    reasons = _compare_outputs(rows, batch, kitchen, wide=False)
            _note(kitchen.proofs, rows, [reason or world.reason for reason in reasons])
        except Exception as error:
            _note(kitchen.proofs, rows, [_unchecked(error)] * len(rows))
    for case in cases:
        if kitchen.proofs.reasons[case.kind]:
            raise Disproved(kitchen.proofs.reasons[case.kind])


def _compare_outputs(rows: Sequence[_Case], batch: Any, kitchen: Kitchen, *, wide: bool) -> list[str]:
    leaves = pytree.tree_leaves(batch)
    models = [copy.deepcopy(case.subject[0]).to(leaves[0].device) for case in rows]
    whats: list[Evaluation] = [case.subject[1] for case in rows]
    device, precision = leaves[0].device, whats[0].precision
    if wide:
        models, batch = [widen(model) for model in models], widen_leaves(batch)
        leaves = pytree.tree_leaves(batch)
    traces = [
        _twin(case.steps[0], wide, partial(kitchen.evaluation, model, what, batch, twice=False))
        for case, model, what in zip(rows, models, whats, strict=True)
    ]
    program = Program(traces, device=device, stacked_batch=[False] * len(leaves), deterministic=kitchen.deterministic)
    if program.draws:
        return ["it draws random numbers in eval mode"] * len(rows)
    state = _stacked_state(models, traces[0])
    with torch.no_grad(), autocast_for(precision, device):
        outputs, after = _in_float64(wide, program, state, _fresh(leaves), lambda index: torch.empty(0))
    reasons = []
    for place, (model, what, trace) in enumerate(zip(models, whats, traces, strict=True)):
        start = state_of(model)
        expected = _in_float64(wide, _run_evaluation, model, what, _fresh(batch))
        seen = _outputs(*pytree.tree_map_only(Tensor, itemgetter(place), (outputs, after)))
        reason = difference(expected, seen)
        if reason:
            nearby = rounded(model, start, trace)
            slack = _run_evaluation(nearby, what, rounded_leaves(batch, trace))
            reason = difference(expected, seen, slack)
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


# --- what is proven, and in which world -----------------------------------------------------------------------------


def _chosen(cases: Sequence[_Case], proofs: Proofs, *, apart: bool) -> Iterator[list[_Case]]:
    """The few members to prove: one of each kind, and enough of them that every number differs which will differ.

    The most distant members are among them, and somebody stands beside one alone: a row must not see another's.
    """
    distinct = list({tuple(map(id, case.steps.values())): case for case in reversed(cases)}.values())[::-1]
    rows: list[_Case] = []
    missing = set() if apart else _lifted(distinct) - proofs.lifted.get(cases[0].key, set())
    if missing:
        tables = {case: [numbers(trace) for trace in case.steps.values()] for case in distinct}
        far = max(distinct, key=lambda case: _distance(tables[distinct[0]], tables[case]))
        rows = [far, max(distinct, key=lambda case: _distance(tables[far], tables[case]))]
        for case in distinct:
            missing -= _lifted(rows)
            if missing & _lifted([far, case]) and case not in rows:
                rows.append(case)
    for case in distinct:
        if case.kind not in proofs.reasons and all(case.kind != other.kind for other in rows):
            rows.append(case)
    if len(rows) == 1 and not apart and cases[-1] is not rows[0]:
        rows.append(cases[-1])
    most = 1 if apart else MOST_ROWS
    yield from (rows[start : start + most] for start in range(0, len(rows), most))


def _note(proofs: Proofs, rows: Sequence[_Case], reasons: Sequence[str]) -> None:
    for case, reason in zip(rows, reasons, strict=True):
        proofs.reasons[case.kind] = proofs.reasons.get(case.kind) or reason
    if not any(reasons):
        proofs.lifted.setdefault(rows[0].key, set()).update(_lifted(rows))


def _lifted(cases: Sequence[_Case]) -> set[Path | int]:
    """The numbers and constants that differ between these members."""
    places: set[Path | int] = set()
    for size in cases[0].steps:
        traces = list({id(case.steps[size]): case.steps[size] for case in cases}.values())
        if len(traces) > 1:
            scalars, constants = lift(traces)
            places |= {*scalars, *constants}
    return places


def _distance(a: list[dict[Path, Any]], b: list[dict[Path, Any]]) -> float:
    """How far the numbers in two members' graphs are apart."""
    pairs = ((x, other[path]) for table, other in zip(a, b, strict=True) for path, x in table.items())
    return sum((float(abs(x - y) / (abs(x) + abs(y))) for x, y in pairs if x != y), 0.0)


@dataclass(slots=True)
class _World:
    reason: str = ""
    """What was changed that a copy of the model does not hold."""


@contextmanager
def _same_world(*reached: Any, caches: bool) -> Iterator[_World]:
    """Inside, users' code runs on copies of their models; after, whatever else it changed is as it was.

    `caches`: it is known to fill caches at a first call.
    """
    world, python, arrays = _World(), random.getstate(), np.random.get_state()
    with warnings.catch_warnings(), preserved({"step": reached}) as state:
        warnings.simplefilter("ignore")
        yield world
        same = zip(np.random.get_state(), arrays, strict=True)
        if random.getstate() != python or not all(np.array_equal(a, b) for a, b in same):
            world.reason = "it draws from python's or numpy's random numbers inside the step"
        elif state.changed and not caches:
            world.reason = "it changes python state (a counter, an iterator, random numbers of its own)"
        elif state.written:
            world.reason = "it changes a tensor that is neither a parameter nor a buffer"


def _caches(rows: Sequence[_Case]) -> bool:
    return any(trace.caches for case in rows for trace in case.steps.values())


def _unchecked(error: Exception) -> str:
    if context_lost(error):
        raise error
    what = "memory was full" if out_of_memory(error) else f"it raised {describe(error)}"
    return f"it could not be checked against its own step: {what}"
