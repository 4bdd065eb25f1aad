"""What a proof is about: which members represent which others, and the world in which their code runs; for `prove`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
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
"""Members that are proven in one program."""


class Disproved(Untraceable):
    """The program does something else than the user's code; the message says where."""


class NotInFloat64(Exception):
    """The step, or its trace, does not run in float64."""


@dataclass(slots=True, eq=False)
class Case:
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


def choose_rows(cases: Sequence[Case], proofs: Proofs, *, apart: bool) -> Iterator[list[Case]]:
    """The few members to prove: one of each kind, and enough of them that every number differs which will differ.

    The most distant members are among them, and a lone member gets another beside it: a row must not see another's.
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
    for case, reason in zip(rows, reasons, strict=True):
        proofs.reasons[case.kind] = proofs.reasons.get(case.kind) or reason
    if not any(reasons):
        proofs.lifted.setdefault(rows[0].key, set()).update(lifted_places(rows))


def lifted_places(cases: Sequence[Case]) -> set[Path | int]:
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
class World:
    reason: str = ""
    """What was changed that a copy of the model does not hold."""


@contextmanager
def same_world(*reached: Any, caches: bool) -> Iterator[World]:
    """Inside, users' code runs on copies of their models; after, whatever else it changed is as it was.

    `caches`: it is known to fill caches at a first call.
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


Twin = Callable[[Trace, Callable[[], Trace]], Trace]
"""The graph to compare in place of a recorded one, which the second argument records in float64."""


def compare(rows: Sequence[Case], code: Sequence[Any], wide: bool, run: Callable[[bool, Twin], list[str]]) -> list[str]:
    """Say for each of these members what differs; empty where nothing does.

    `code`: the users' functions that run. `run`: compares, in float64 if it is called with True, as it is where `wide`.
    """
    caches = any(trace.caches for case in rows for trace in case.steps.values())
    try:
        with same_world(*code, caches=caches) as world:
            reasons = (wide and _compare_in_float64(rows, run)) or run(False, lambda recorded, _: recorded)
        return [reason or world.reason for reason in reasons]
    except Exception as error:
        return [unchecked(error)] * len(rows)


def _compare_in_float64(rows: Sequence[Case], run: Callable[[bool, Twin], list[str]]) -> list[str] | None:
    """What differs in float64; None where the step does not run in it.

    The recorded graph itself runs in float64, unless dtypes are in it. Where it then differs, numbers may be in it that
    the code took from a dtype, such as an epsilon, so the step is recorded in float64.
    """
    twins = {trace: widened(trace) for case in rows for trace in case.steps.values()}
    with suppress(NotInFloat64):
        if None not in twins.values():
            reasons = run(True, lambda recorded, _: twins[recorded] or recorded)
            if not any(reasons):
                return reasons
    with suppress(NotInFloat64):
        return run(True, _recorded_in_float64)
    return None


def unchecked(error: Exception) -> str:
    if context_lost(error):
        raise error
    what = "memory was full" if out_of_memory(error) else f"it raised {describe(error)}"
    return f"it could not be checked against its own step: {what}"


def fresh_copy(batch: Any) -> Any:
    """A copy of a batch, for code that may write to it."""
    return pytree.tree_map_only(Tensor, Tensor.clone, batch)


def _recorded_in_float64(recorded: Trace, record: Callable[[], Trace]) -> Trace:
    try:
        trace = record()
    except Untraceable as refusal:
        raise NotInFloat64 from refusal
    if not trace.like(recorded):
        raise NotInFloat64
    return trace


def in_float64(wide: bool, run: Callable[..., _T], *args: Any) -> _T:
    """Run; what raises in float64 may still run in the model's own dtypes."""
    try:
        return run(*args)
    except Exception as error:
        if wide and not (out_of_memory(error) or context_lost(error)):
            raise NotInFloat64 from error
        raise


def stacked_state(models: Sequence[nn.Module], trace: Trace) -> list[Tensor]:
    named = [{**dict(model.named_parameters()), **dict(model.named_buffers())} for model in models]
    return [torch.stack([tensors[name].detach() for tensors in named]) for name in (*trace.params, *trace.buffers)]
