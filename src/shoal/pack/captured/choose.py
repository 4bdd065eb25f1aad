"""Which captured form suits a group of members: tried, timed, and remembered.

Candidates are one stack of all members, and every member's own step side by side on streams. The first is built,
captured and timed, and what it did is undone. Where the work that is left is so short that no other form could save
what trying it takes, that unit is the one that trains; else others are tried in the same way, compiled ones too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from shoal.data.source import TensorSource
from shoal.pack.captured.chunk import Cache
from shoal.pack.captured.graphs import RECORDER, clear
from shoal.pack.captured.unit import CapturedUnit
from shoal.pack.measure import num_steps
from shoal.pack.recipe import Kitchen, Recipe
from shoal.pack.stacked.site import NotStackable
from shoal.pack.times import timed
from shoal.pack.trace import Trace
from shoal.pack.unit import context_lost

COMPILED_GAIN = 0.5
"""The share of an uncompiled step that compiling is taken to save, until it has been measured."""
FORM_GAIN = 0.5
"""The share of a step that another form is taken to save."""
REPLAYS = 10
ENOUGH_SECONDS = 0.1
"""Replays are timed three times, or until so much time is over."""
SMALL = 50_000
"""Weights of a convolutional network up to which a stack is tried before streams: it is sooner ready."""
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
) -> tuple[Form, CapturedUnit] | None:
    """The fastest form found, and a unit of it; None where nothing could be captured."""
    optimizers = tuple(Counter(recipe.optimizer.key for recipe in recipes).items())
    key = (recipes[0].key, optimizers, compile, stackable)
    trials = Trials(recipes, kitchen, cache)
    if key not in _known:
        with timed("trials"):
            found = _choose(trials, compile, stackable)
        if found is None:
            return None
        _known[key] = found
    return _known[key], trials.unit(_known[key])


class Trials:
    """Forms that are tried for one group of members."""

    def __init__(self, recipes: Sequence[Recipe], kitchen: Kitchen, cache: Cache) -> None:
        self.recipes, self.kitchen, self.cache = recipes, kitchen, cache
        self.spent = 0.0
        """What the last trial took, compiling aside."""
        self._last: tuple[Form, CapturedUnit] | None = None

    def unit(self, form: Form) -> CapturedUnit:
        """A unit of this form: the one that was tried last, where it is that one."""
        last, self._last = self._last, None
        if last is not None and last[0] == form:
            return last[1]
        del last  # two would need twice the memory
        return self._build(form)

    def _build(self, form: Form) -> CapturedUnit:
        with timed("units"):
            unit = CapturedUnit(self.recipes, self.kitchen, self.cache, chunk=form.chunk, compiled=form.compiled)
        unit.step_seconds = form.seconds
        return unit

    def time(self, form: Form) -> Form | None:
        """Build, capture and time one form; None where it fails."""
        if self._last is not None:
            self._last = None
            clear()
        try:
            with timed("trials") as span:
                self._last = self._time(form)
        except (RuntimeError, NotImplementedError, AssertionError, NotStackable) as error:
            if context_lost(error):
                raise
        if self._last is None:
            clear()
            return None
        found = self._last[0]
        self.spent = span.seconds - found.compile_seconds
        return found

    def _time(self, form: Form) -> tuple[Form, CapturedUnit]:
        unit = self._build(form)
        return _timed(unit, form), unit


def _choose(trials: Trials, compile: bool | Literal["auto"], stackable: bool) -> Form | None:
    recipes = trials.recipes
    graph = next(iter(recipes[0].steps.values()))
    count = len(recipes)
    first_alone = _convolves(graph) and _weights(recipes[0]) > SMALL
    order = [1] if count == 1 or not stackable else [1, count] if first_alone else [count, 1]
    steps = max(num_steps(recipe.member) - recipe.member.step for recipe in recipes)
    plain = trials.time(Form(order[0], False))
    if compile is False:
        more = trials.spent * (count if order[-1] == 1 else 1)
        if plain is not None and (len(order) == 1 or steps * plain.seconds * FORM_GAIN < more):
            return plain
        return _best([plain, *(trials.time(Form(chunk, False)) for chunk in order[1:])])
    effort = 5.0 + 0.15 * len(graph.nodes)
    if compile == "auto" and plain is not None and steps * plain.seconds * COMPILED_GAIN < effort:
        return plain
    first = trials.time(Form(order[0], True))
    settled = first is not None and (order[0] == 1 and first.seconds > FULL_SECONDS * count)
    if first is not None and (
        settled or len(order) == 1 or steps * first.seconds * COMPILED_GAIN < max(effort, first.compile_seconds)
    ):
        return _best([plain, first])
    return _best([plain, first, *(trials.time(Form(chunk, True)) for chunk in order[1:])])


def _best(forms: list[Form | None]) -> Form | None:
    found = [form for form in forms if form is not None]
    return min(found, key=lambda form: form.seconds) if found else None


def _timed(unit: CapturedUnit, form: Form) -> Form:
    graph = unit.graph(RECORDER)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    best, total = float("inf"), 0.0
    with unit.trying():
        while total < ENOUGH_SECONDS and total < 3 * REPLAYS * best:
            start.record()
            for _ in range(REPLAYS):
                unit.rewind()
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            seconds = start.elapsed_time(end) / 1e3
            best, total = min(best, seconds / REPLAYS), total + seconds
    unit.step_seconds = best
    return replace(form, seconds=best, compile_seconds=unit.compile_seconds)


def _weights(recipe: Recipe) -> int:
    return sum(weight.numel() for weight in recipe.member.model.parameters())


def _convolves(graph: Trace) -> bool:
    return any("conv" in str(node.target) for node in graph.nodes if node.op == "call_function")
