"""Which captured form suits a group of members: tried, timed, and remembered.

Candidates are one stack of all members, and every member's own step side by side on streams. The first is built,
captured and timed, and what it did is undone. Where the work that is left is so short that no other form could save
what trying it takes, that unit is the one that trains; else others are tried in the same way, compiled ones too. What
a trial measured (seconds, bytes) is stored on disk, see `perf_cache`: later runs decide without trying again.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from shoal.data.source import TensorSource
from shoal.engine.planning import perf_cache
from shoal.engine.recipes.recipe import Recipe, TraceCache
from shoal.engine.rules.op_context import NotStackable
from shoal.engine.tiers.captured.chunk import Cache
from shoal.engine.tiers.captured.graphs import RECORDER, clear, held, trim
from shoal.engine.tiers.captured.unit import CapturedUnit
from shoal.engine.tiers.unit import context_lost, out_of_memory
from shoal.engine.tracing.trace import Trace
from shoal.engine.units.trials import num_steps
from shoal.utils.set_up_times import timed

_PACKAGE = Path(__file__).parents[2]
COMPILED_GAIN = 0.5
"""The share of an uncompiled step that compiling is taken to save, until it has been measured."""
FORM_GAIN = 0.5
"""The share of a step that another form is taken to save."""
REPLAYS = 10
ENOUGH_SECONDS = 0.1
"""Replays are timed three times, or until so much time is over."""
SMALL = 50_000
"""Weights of a convolutional network up to which a stack is tried before streams: it is sooner ready."""
FEW_OPERATIONS = 1e10
"""Of a convolutional network's forward pass: with no more than this, a stack is tried before streams as well."""
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

    @property
    def name(self) -> str:
        """What it is remembered under."""
        return self.tier + perf_cache.COMPILED if self.compiled else self.tier


def why_not(recipe: Recipe) -> str:
    """Why a member's steps cannot be captured; empty where they can."""
    member, job = recipe.member, recipe.member.job
    if not isinstance(member.data.source, TensorSource):
        return "its data is read as training goes"
    if job.accumulate > 1:
        return "it accumulates gradients"
    if job.average is not None:
        return "it averages its weights"
    if recipe.optimizer.flags is None:
        return f"{recipe.optimizer.kind.__name__} has no rule"
    runner = recipe.optimizer.runner
    if job.schedule is not None and job.schedule_every == "step" and (runner is None or not runner.can_table()):
        return "its schedule cannot be foreseen"
    if len({tuple(trace.log_names) for trace in recipe.steps.values()}) > 1:
        return "its batches log different names"
    return ""


def choose(
    recipes: Sequence[Recipe],
    trace_cache: TraceCache,
    cache: Cache,
    compile: bool | Literal["auto"],
    *,
    stackable: bool = True,
    recorded: str = "",
) -> tuple[Form, CapturedUnit] | None:
    """The fastest form, and a unit of it; None where nothing could be captured.

    `recorded`: the form that these had in the run that is resumed. They have it again if it can be captured.
    """
    trials = Trials(recipes, trace_cache, cache)
    with timed("trials"):
        before = _recorded(recorded, len(recipes), compile, stackable)
        form = None if before is None else trials.time(before)
        if form is not None and form.compiled and not trials.made_here(form):
            form = trials.confirm(form)
        if form is not None:
            return form, trials.unit(form)
        form = _choose(trials, compile, stackable)
        while form is not None and form.compiled and not trials.made_here(form):
            trials.confirm(form)
            form = _choose(trials, compile, stackable)
    return None if form is None else (form, trials.unit(form))


def _recorded(name: str, count: int, compile: bool | Literal["auto"], stackable: bool) -> Form | None:
    """The form of this name for so many members; None where they cannot have it."""
    tier, _, compiled = name.partition(" ")
    if tier not in ("streams", "stacked") or (tier == "stacked" and not stackable):
        return None
    return Form(1 if tier == "streams" else max(2, count), bool(compiled) and compile is not False)


_Place = tuple[str, int, str]
"""A trial: of which recipes, how many members, which form."""


@dataclass(frozen=True, slots=True)
class _Trial:
    """What a trial came to."""

    form: Form | None
    """With what it measured; None: it failed."""
    spent: float = 0.0
    """Seconds that it took, compiling aside."""
    here: bool = True
    """Whether this process made it, and not an earlier one."""


_trials: dict[_Place, _Trial] = {}
"""Should the disk not hold them, none is made twice in a process."""


class Trials:
    """Forms that are tried for one group of members."""

    def __init__(self, recipes: Sequence[Recipe], trace_cache: TraceCache, cache: Cache) -> None:
        self.recipes, self.trace_cache, self.cache = recipes, trace_cache, cache
        self.spent = 0.0
        """What the last trial took, compiling aside."""
        self._last: tuple[Form, CapturedUnit] | None = None
        self._bytes = 0
        self._failed: set[str] = set()
        """Forms that this group cannot have: with more memory, say, another one may."""
        self._key = perf_cache.digest_of(recipes)
        self._known = perf_cache.lookup(self._key)

    def _place(self, form: Form) -> _Place:
        return self._key, len(self.recipes), form.name

    def made_here(self, form: Form) -> bool:
        """Whether this process has tried a form."""
        trial = _trials.get(self._place(form))
        return form.name in self._failed or (trial is not None and trial.here)

    def known(self, form: Form) -> _Trial | None:
        """An earlier trial of as many members; None where there was none, or it failed."""
        if form.name in self._failed:
            return None
        place, entry = self._place(form), self._known
        seconds = entry.seconds.get(form.name, {}).get(len(self.recipes))
        if place not in _trials and seconds is not None:
            measured = replace(form, seconds=seconds, compile_seconds=entry.compile_seconds.get(form.name, 0.0))
            _trials[place] = _Trial(measured, entry.trial_seconds.get(form.name, 0.0), here=False)
        trial = _trials.get(place)
        return trial if trial is not None and trial.form is not None else None

    def unit(self, form: Form) -> CapturedUnit:
        """A unit of this form: the one that was tried last, where it is that one."""
        last, self._last = self._last, None
        if last is not None and last[0] == form:
            return last[1]
        del last  # two would need twice the memory
        return self._build(form)

    def _build(self, form: Form) -> CapturedUnit:
        with timed("units"):
            unit = CapturedUnit(self.recipes, self.trace_cache, self.cache, chunk=form.chunk, compiled=form.compiled)
        unit.step_seconds = form.seconds
        return unit

    def time(self, form: Form) -> Form | None:
        """Build, capture and time one form, unless that was done before; None where it fails."""
        known = self.known(form)
        if known is not None:
            self.spent = known.spent
            return known.form
        return None if self.made_here(form) else self.confirm(form)

    def confirm(self, form: Form) -> Form | None:
        """Try a form here, whatever was measured before: what is compiled has to be compiled here, which may fail."""
        if self._last is not None:
            self._last = None
            clear()
        try:
            with timed("trials") as span:
                self._last = self._time(form)
        except (RuntimeError, NotImplementedError, AssertionError, NotStackable) as error:
            if context_lost(error) or _broken(error):
                raise
            self._failed.add(form.name)
            if not out_of_memory(error):
                _trials[self._place(form)] = _Trial(None)
        if self._last is None:
            clear()
            return None
        measured = self._last[0]
        self.spent = span.seconds - measured.compile_seconds
        self._remember(measured)
        return measured

    def _time(self, form: Form) -> tuple[Form, CapturedUnit]:
        trim()
        before, _ = held()
        unit = self._build(form)
        measured = _timed(unit, form)
        self._bytes = unit.set_up_bytes - before
        return measured, unit

    def _remember(self, form: Form) -> None:
        _trials[self._place(form)] = _Trial(form, self.spent)
        perf_cache.note(
            self._key, tier=form.name, rows=len(self.recipes), seconds=form.seconds, bytes=self._bytes,
            compile_seconds=form.compile_seconds if form.compiled else None, trial_seconds=self.spent,
        )  # fmt: skip


def _choose(trials: Trials, compile: bool | Literal["auto"], stackable: bool) -> Form | None:
    recipes = trials.recipes
    graph = next(iter(recipes[0].steps.values()))
    count = len(recipes)
    first_alone = _convolves(graph) and _weights(recipes[0]) > SMALL and _operations(graph) > FEW_OPERATIONS
    order = [1] if count == 1 or not stackable else [1, count] if first_alone else [count, 1]
    steps = max(num_steps(recipe.member) - recipe.member.step for recipe in recipes)
    plain = trials.time(Form(order[0], False))
    if compile is False:
        more = trials.spent * (count if order[-1] == 1 else 1)
        tried = len(order) == 2 and trials.known(Form(order[1], False)) is not None
        if (
            plain is not None
            and not tried
            and (len(order) == 1 or _fills(plain, count) or steps * plain.seconds * FORM_GAIN < more)
        ):
            return plain
        return _best([plain, *(trials.time(Form(chunk, False)) for chunk in order[1:])])
    effort = 5.0 + 0.15 * len(graph.nodes)
    if compile == "auto" and plain is not None and steps * plain.seconds * COMPILED_GAIN < effort:
        return plain
    first = trials.time(Form(order[0], True))
    if first is not None and (
        len(order) == 1
        or _fills(first, count)
        or steps * first.seconds * COMPILED_GAIN < max(effort, first.compile_seconds)
    ):
        return _best([plain, first])
    return _best([plain, first, *(trials.time(Form(chunk, True)) for chunk in order[1:])])


def _fills(form: Form, count: int) -> bool:
    """Whether members side by side fill the device already."""
    return form.chunk == 1 and form.seconds > FULL_SECONDS * count


def _best(forms: list[Form | None]) -> Form | None:
    return min((form for form in forms if form is not None), key=lambda form: form.seconds, default=None)


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


def _operations(graph: Trace) -> float:
    """Of all convolutions and linear layers in a forward pass."""
    total = 0.0
    for node in graph.nodes:
        if node.op == "call_function" and any(name in str(node.target) for name in ("conv", "linear")):
            _, weight, *_ = node.all_input_nodes
            total += 2.0 * node.meta["val"].numel() * weight.meta["val"][0].numel()
    return total


def _broken(error: Exception) -> bool:
    """Whether an invariant of this package does not hold. What torch asserts while it compiles or captures is a form
    that cannot be had; what is asserted here is a mistake, and must show."""
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, AssertionError) and bool(frames) and Path(frames[-1].filename).is_relative_to(_PACKAGE)
