"""Choose the members that represent others in a proof, and set the conditions under which their code runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.engine.proof._observed import widened
from shoal.engine.python_state.preserve import preserved
from shoal.engine.tiers.unit import context_lost, out_of_memory
from shoal.engine.tracing.patches import Untraceable
from shoal.engine.tracing.signature import Path, lift, numbers
from shoal.engine.tracing.trace import Trace
from shoal.errors import describe
from shoal.utils.random_state import Snapshot

if TYPE_CHECKING:
    from shoal.engine.recipes.recipe import Proofs

_T = TypeVar("_T")

MOST_ROWS = 4
"""The most members that are proven in one program."""


class Disproved(Untraceable):
    """Raised if the program does something else than the user's code; the message says where."""


class NotInFloat64(Exception):
    """Raised if the step, or its trace, does not run in float64."""


@dataclass(slots=True, eq=False)
class Case:
    """One member's graphs, and the recipe or evaluation that they were traced from."""

    key: Hashable
    """A key that is equal for graphs that can be stacked."""
    steps: dict[int, Trace]
    subject: Any
    """The member's recipe; for an evaluation, its model and the `Evaluation`."""

    @property
    def kind(self) -> Hashable:
        """A key that is equal if one proof is enough: the graph and the code, without floating-point numbers."""
        return self.key, tuple(trace.kind for trace in self.steps.values())


def choose_rows(cases: Sequence[Case], proofs: Proofs, *, apart: bool) -> Iterator[list[Case]]:
    """Choose the members to prove: one of each kind, and enough that every number that can differ does differ.

    The most distant members are among them, and a lone member gets another one beside it, to show that rows do not
    affect each other.
    """
    distinct = list({tuple(map(id, case.steps.values())): case for case in reversed(cases)}.values())[::-1]
    rows: list[Case] = []
    missing = set() if apart else lifted_places(distinct) - proofs.lifted.get(cases[0].key, set())
    if missing:
        tables = {case: [numbers(trace) for trace in case.steps.values()] for case in distinct}
        far = max(distinct, key=lambda case: _distance(tables[distinct[0]], tables[case]))
        rows = [far, max(distinct, key=lambda case: _distance(tables[far], tables[case]))]
        for case in distinct:
            missing -= lifted_places(rows)
            if missing & lifted_places([far, case]) and case not in rows:
                rows.append(case)
    for case in distinct:
        if case.kind not in proofs.reasons and all(case.kind != other.kind for other in rows):
            rows.append(case)
    if len(rows) == 1 and not apart and cases[-1] is not rows[0]:
        rows.append(cases[-1])
    most = 1 if apart else MOST_ROWS
    yield from (rows[start : start + most] for start in range(0, len(rows), most))


def note(proofs: Proofs, rows: Sequence[Case], reasons: Sequence[str]) -> None:
    """Record the reasons, and the numbers that were proven to be per member."""
    for case, reason in zip(rows, reasons, strict=True):
        proofs.reasons[case.kind] = proofs.reasons.get(case.kind) or reason
    if not any(reasons):
        proofs.lifted.setdefault(rows[0].key, set()).update(lifted_places(rows))


def lifted_places(cases: Sequence[Case]) -> set[Path | int]:
    """Return the numbers and constants that differ between these members."""
    places: set[Path | int] = set()
    for size in cases[0].steps:
        traces = list({id(case.steps[size]): case.steps[size] for case in cases}.values())
        if len(traces) > 1:
            scalars, constants = lift(traces)
            places |= {*scalars, *constants}
    return places


def _distance(a: list[dict[Path, Any]], b: list[dict[Path, Any]]) -> float:
    """Return how far apart the numbers in two members' graphs are."""
    pairs = ((x, other[path]) for table, other in zip(a, b, strict=True) for path, x in table.items())
    return sum((float(abs(x - y) / (abs(x) + abs(y))) for x, y in pairs if x != y), 0.0)


@dataclass(slots=True)
class World:
    """The outcome of `same_world`, in which users' code ran."""

    reason: str = ""
    """A sentence on state outside the model that the code changed; empty if it changed none."""


@contextmanager
def same_world(*reached: Any, caches: bool) -> Iterator[World]:
    """Run users' code on copies of their models inside this context; restore everything else that it changed
    afterwards.

    Args:
        caches: The code is known to fill caches at its first call.
    """
    world, before = World(), Snapshot()
    with warnings.catch_warnings(), preserved({"step": reached}) as state:
        warnings.simplefilter("ignore")
        yield world
        if before.moved():
            world.reason = "it draws from python's or numpy's random numbers inside the step"
        elif state.changed and not caches:
            world.reason = "it changes python state (a counter, an iterator, random numbers of its own)"
        elif state.written:
            world.reason = "it changes a tensor that is neither a parameter nor a buffer"


TraceFor = Callable[[Trace, Callable[[], Trace]], Trace]
"""Returns the graph to compare in place of a recorded one; its second argument records the step in float64."""


def compare(
    rows: Sequence[Case], code: Sequence[Any], wide: bool, run: Callable[[bool, TraceFor], list[str]]
) -> list[str]:
    """Return for each of these members what differs; empty if nothing does.

    Args:
        code: The users' functions that run.
        wide: Try float64 first, and the model's own dtypes if that fails.
        run: Compares, in float64 if called with True.
    """
    caches = any(trace.caches for case in rows for trace in case.steps.values())

    def run_in_same_world(wide: bool, trace_for: TraceFor) -> list[str]:
        with same_world(*code, caches=caches) as world:
            reasons = run(wide, trace_for)
        return [reason or world.reason for reason in reasons]

    try:
        in_float64 = _compare_in_float64(rows, run_in_same_world) if wide else None
        return in_float64 or run_in_same_world(False, lambda recorded, _: recorded)
    except Exception as error:
        return [unchecked(error)] * len(rows)


def _compare_in_float64(rows: Sequence[Case], run: Callable[[bool, TraceFor], list[str]]) -> list[str] | None:
    """Return what differs in float64; None if the step does not run in float64.

    The recorded graph itself runs in float64, unless it contains dtypes. If it then differs, it may contain numbers
    that the code took from a dtype, such as an epsilon. So the step is recorded in float64, and compared again.
    """
    wide_traces = {trace: widened(trace) for case in rows for trace in case.steps.values()}
    with suppress(NotInFloat64):
        if None not in wide_traces.values():
            reasons = run(True, lambda recorded, _: wide_traces[recorded] or recorded)
            if not any(reasons):
                return reasons
    with suppress(NotInFloat64):
        return run(True, _recorded_in_float64)
    return None


def unchecked(error: Exception) -> str:
    """Return the reason for members whose comparison raised."""
    if context_lost(error):
        raise error
    what = "memory was full" if out_of_memory(error) else f"it raised {describe(error)}"
    return f"it could not be checked against its own step: {what}"


def fresh_copy(batch: Any) -> Any:
    """Return a copy of a batch, for code that may write to it."""
    return pytree.tree_map_only(Tensor, Tensor.clone, batch)


def _recorded_in_float64(recorded: Trace, record: Callable[[], Trace]) -> Trace:
    """Record the step in float64; raise NotInFloat64 if that is not possible, or if it has other operators then."""
    try:
        trace = record()
    except Untraceable as refusal:
        raise NotInFloat64 from refusal
    if not trace.like(recorded):
        raise NotInFloat64
    return trace


def in_float64(wide: bool, run: Callable[..., _T], *args: Any) -> _T:
    """Call `run`. If it raises in float64, raise NotInFloat64, since the model's own dtypes may still work."""
    try:
        return run(*args)
    except Exception as error:
        if wide and not (out_of_memory(error) or context_lost(error)):
            raise NotInFloat64 from error
        raise


def stacked_state(models: Sequence[nn.Module], trace: Trace, shared: Collection[int] = ()) -> list[Tensor]:
    """Stack the parameters and buffers of these models, in the trace's order; at the indices in `shared` only the first
    model's."""
    named = [{**dict(model.named_parameters()), **dict(model.named_buffers())} for model in models]
    names = enumerate((*trace.params, *trace.buffers))
    return [torch.stack([x[name].detach() for x in (named[:1] if i in shared else named)]) for i, name in names]
