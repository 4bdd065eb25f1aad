"""Which captured form suits a group of members: tried, timed, and remembered.

Candidates are one stack of all members, and every member's own step side by side on streams. Each is built on a
throwaway unit, captured and timed; compiling is weighed against the steps that are left.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from shoal.data.source import TensorSource
from shoal.pack.captured.chunk import Cache
from shoal.pack.captured.executor import CapturedExecutor
from shoal.pack.captured.unit import CapturedUnit
from shoal.pack.measure import num_steps
from shoal.pack.recipe import Kitchen, Recipe
from shoal.pack.stacked.site import NotStackable
from shoal.pack.trace import Trace

COMPILED_GAIN = 0.5
"""The share of an uncompiled step that compiling is taken to save, until it has been measured."""
REPLAYS = 10
FULL_SECONDS = 1e-3
"""Members whose own steps take longer than this fill the device by themselves; stacking them is not tried."""


@dataclass(frozen=True, slots=True)
class Form:
    """How a group is captured, and what a step of all its members costs in that form."""

    chunk: int
    """Members in one stack; 1: each by itself on streams."""
    compiled: bool
    seconds: float = 0.0
    compile_seconds: float = 0.0

    @property
    def tier(self) -> str:
        return "streams" if self.chunk == 1 else "stacked"


_known: dict[Hashable, Form] = {}


def why_not(recipe: Recipe) -> str:
    """Why a member's steps cannot be captured; empty where they can."""
    member, job = recipe.member, recipe.member.job
    if not isinstance(member.data.source, TensorSource):
        return "its data is read as training goes"
    if job.accumulate > 1:
        return "it accumulates gradients"
    if recipe.optimizer.flags is None:
        return f"{recipe.optimizer.kind.__name__} has no rule"
    runner = recipe.optimizer.runner
    if job.schedule is not None and job.schedule_every == "step" and (runner is None or not runner.can_table()):
        return "its schedule cannot be foreseen"
    if next(iter(recipe.steps.values())).out_spec.children()[0].children()[1].num_leaves:
        return "its step gives logs"
    return ""


def choose(
    recipes: Sequence[Recipe],
    kitchen: Kitchen,
    cache: Cache,
    compile: bool | Literal["auto"],
    *,
    stackable: bool = True,
) -> Form | None:
    """The fastest form found; None where nothing could be captured."""
    optimizers = tuple(Counter(recipe.optimizer.key for recipe in recipes).items())
    key = (recipes[0].key, optimizers, compile, stackable)
    if key not in _known:
        found = _choose(recipes, kitchen, cache, compile, stackable)
        if found is None:
            return None
        _known[key] = found
    return _known[key]


def _choose(
    recipes: Sequence[Recipe], kitchen: Kitchen, cache: Cache, compile: bool | Literal["auto"], stackable: bool
) -> Form | None:
    graph = next(iter(recipes[0].steps.values()))
    count = len(recipes)
    order = [1] if count == 1 or not stackable else [1, count] if _convolves(graph) else [count, 1]
    plain = _first([trial(recipes, kitchen, cache, Form(chunk, False)) for chunk in order[:1]])
    if compile is False:
        return _best([plain, *(trial(recipes, kitchen, cache, Form(chunk, False)) for chunk in order[1:])])
    steps = max(num_steps(recipe.member) - recipe.member.step for recipe in recipes)
    effort = 5.0 + 0.15 * len(graph.nodes)
    if compile == "auto" and plain is not None and steps * plain.seconds * COMPILED_GAIN < effort:
        return plain
    first = trial(recipes, kitchen, cache, Form(order[0], True))
    settled = first is not None and (order[0] == 1 and first.seconds > FULL_SECONDS * count)
    if first is not None and (
        settled or len(order) == 1 or steps * first.seconds * COMPILED_GAIN < max(effort, first.compile_seconds)
    ):
        return _best([plain, first])
    return _best([plain, first, *(trial(recipes, kitchen, cache, Form(chunk, True)) for chunk in order[1:])])


def _first(forms: list[Form | None]) -> Form | None:
    return next((form for form in forms if form is not None), None)


def _best(forms: list[Form | None]) -> Form | None:
    found = [form for form in forms if form is not None]
    return min(found, key=lambda form: form.seconds) if found else None


def trial(recipes: Sequence[Recipe], kitchen: Kitchen, cache: Cache, form: Form) -> Form | None:
    """Build, capture and time one form on a unit that is then thrown away; None where it fails."""
    try:
        return _timed(recipes, kitchen, cache, form)
    except (RuntimeError, NotImplementedError, AssertionError, NotStackable):
        return None
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def _timed(recipes: Sequence[Recipe], kitchen: Kitchen, cache: Cache, form: Form) -> Form:
    unit = CapturedUnit(recipes, kitchen, cache, chunk=form.chunk, compiled=form.compiled)
    compile_seconds = unit.prepare()
    graph = CapturedExecutor().graph([unit])
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    best = float("inf")
    for _ in range(3):
        start.record()
        for _ in range(REPLAYS):
            unit.rewind()
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) / REPLAYS / 1e3)
    return replace(form, seconds=best, compile_seconds=compile_seconds)


def _convolves(graph: Trace) -> bool:
    return any("conv" in str(node.target) for node in graph.nodes if node.op == "call_function")
