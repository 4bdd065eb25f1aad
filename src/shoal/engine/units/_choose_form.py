"""Choose the fastest captured form for a group of members: forms are tried, timed and remembered.

The candidates are one stack of all members, and each member's own step on parallel streams. The first candidate is
built, captured and timed, and its steps are undone. If so little work is left that no other form could save the time of
trying it, that unit trains; if compiling could pay, its step is compiled in another process meanwhile. If much more
work is left, other forms are tried before training, compiled ones too. Measurements (seconds, bytes) are stored on
disk, see `perf_cache`, so that later runs decide without trying again.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from shoal.engine.planning import perf_cache
from shoal.engine.recipes.recipe import Recipe, TraceCache
from shoal.engine.rules.op_context import NotStackable
from shoal.engine.tiers.captured.chunk import Cache
from shoal.engine.tiers.captured.compiling import no_compiling, not_cached
from shoal.engine.tiers.captured.graphs import RECORDER, clear, held, trim
from shoal.engine.tiers.captured.unit import CapturedUnit
from shoal.engine.tiers.unit import context_lost, out_of_memory
from shoal.engine.tracing.trace import Trace
from shoal.engine.units.trials import num_steps
from shoal.utils.set_up_times import timed

_PACKAGE = Path(__file__).parents[2]
COMPILED_GAIN = 0.5
"""The share of an uncompiled step's time that compiling is assumed to save until it has been measured."""
ALL_FORMS = 20
"""If training takes so many times as long as compiling, all forms are tried before it."""
FORM_GAIN = 0.5
"""The share of a step's time that another form is assumed to save."""
SMALL = 50_000
"""Convolutional networks of up to so many weights are tried as a stack first, which is faster to set up than
streams."""
FEW_OPERATIONS = 1e10
"""Convolutional networks with up to so many operations in a forward pass are tried as a stack first, too."""
FULL_SECONDS = 1e-3
"""If a member's own step takes longer than this, members on streams fill the device, and stacking them is not tried."""


@dataclass(frozen=True, slots=True)
class Form:
    """A way to capture a group, and the cost of a step of all its members in it."""

    chunk: int
    """Members in one stack; 1: each member by itself, on streams."""
    compiled: bool
    seconds: float = 0.0
    compile_seconds: float = 0.0

    @property
    def tier(self) -> str:
        return "streams" if self.chunk == 1 else "stacked"

    @property
    def name(self) -> str:
        """The name under which measurements of this form are stored."""
        return self.tier + perf_cache.COMPILED if self.compiled else self.tier


def choose(
    recipes: Sequence[Recipe],
    trace_cache: TraceCache,
    cache: Cache,
    compile: bool | Literal["auto"],
    *,
    stackable: bool = True,
    recorded: str = "",
) -> tuple[Form, CapturedUnit] | None:
    """Return the fastest form and a unit of it, or None if nothing could be captured.

    Args:
        recorded: The form that these members had in the run that is resumed. They get it again if it can be captured.
    """
    trials = Trials(recipes, trace_cache, cache)
    with timed("trials"):
        if trace_cache.deterministic:
            form = _alone(trials, compile)
            return None if form is None else (form, trials.unit(form))
        form = _recorded_form(trials, recorded, compile, stackable)
        if form is None:
            form = _choose(trials, compile, stackable)
            while form is not None and form.compiled and not trials.made_here(form):
                trials.confirm(form, load_only=_should_load(trials, form, compile))
                form = _choose(trials, compile, stackable)
    if form is None:
        return None
    unit = trials.unit(form)
    if compile == "auto" and not form.compiled and _pays_meanwhile(trials, form):
        unit.compile_meanwhile(partial(trials.note_compiled, form))
    return form, unit


def _alone(trials: Trials, compile: bool | Literal["auto"]) -> Form | None:
    """Return the form in which a member's bits depend neither on other members nor on measured times: each by itself,
    compiled only if that is asked for."""
    compiled = trials.confirm(Form(1, True)) if compile is True else None
    return compiled or trials.time(Form(1, False))


def _recorded_form(trials: Trials, name: str, compile: bool | Literal["auto"], stackable: bool) -> Form | None:
    """Return the form that these members had in the run that is resumed, if it can be captured here."""
    previous = _form_named(name, len(trials.recipes), compile, stackable)
    form = None if previous is None else trials.time(previous)
    if form is not None and form.compiled and not trials.made_here(form):
        form = trials.confirm(form, load_only=_should_load(trials, form, compile))
    return form


def _should_load(trials: Trials, form: Form, compile: bool | Literal["auto"]) -> bool:
    """Return whether a form that an earlier run compiled is used only if it need not be compiled again."""
    graph = next(iter(trials.recipes[0].steps.values()))
    return compile == "auto" and _steps_left(trials) * form.seconds < ALL_FORMS * _compile_estimate(graph)


def _form_named(name: str, count: int, compile: bool | Literal["auto"], stackable: bool) -> Form | None:
    """Return the form with this name for so many members, or None if they cannot have it."""
    tier, _, compiled = name.partition(" ")
    if tier not in ("streams", "stacked") or (tier == "stacked" and not stackable):
        return None
    return Form(1 if tier == "streams" else max(2, count), bool(compiled) and compile is not False)


_TrialKey = tuple[str, int, str]
"""Identifies a trial: digest of the recipes, number of members, name of the form."""


@dataclass(frozen=True, slots=True)
class _Trial:
    """The result of a trial."""

    form: Form | None
    """The form with its measurements; None if it failed."""
    spent: float = 0.0
    """Seconds that the trial took, without compiling."""
    here: bool = True
    """Whether this process made the trial, rather than an earlier run."""


_trials: dict[_TrialKey, _Trial] = {}
"""Trials of this process. No trial is repeated in a process, even if the file on disk cannot be written."""


class Trials:
    """Tries and times forms for one group of members."""

    def __init__(self, recipes: Sequence[Recipe], trace_cache: TraceCache, cache: Cache) -> None:
        self.recipes, self.trace_cache, self.cache = recipes, trace_cache, cache
        self.spent = 0.0
        """Seconds that the last trial took, without compiling."""
        self._last: tuple[Form, CapturedUnit] | None = None
        self._bytes = 0
        self._failed: set[str] = set()
        """Names of forms that failed for this group. They may still succeed for another group or with more memory."""
        self._key = perf_cache.digest_of(recipes)
        self._known = perf_cache.lookup(self._key)

    def _trial_key(self, form: Form) -> _TrialKey:
        return self._key, len(self.recipes), form.name

    def made_here(self, form: Form) -> bool:
        """Return whether this process has tried a form."""
        trial = _trials.get(self._trial_key(form))
        return form.name in self._failed or (trial is not None and trial.here)

    def cannot_be_made(self, form: Form) -> bool:
        """Return whether a form failed in this process for a reason other than memory or Inductor's cache."""
        trial = _trials.get(self._trial_key(form))
        return trial is not None and trial.form is None

    def is_built(self, form: Form) -> bool:
        """Return whether the unit of the last trial has this form."""
        return self._last is not None and self._last[0].name == form.name

    def known(self, form: Form) -> _Trial | None:
        """Return an earlier trial with as many members, or None if there was none or it failed."""
        if form.name in self._failed:
            return None
        key, entry = self._trial_key(form), self._known
        seconds = entry.seconds.get(form.name, {}).get(len(self.recipes))
        if key not in _trials and seconds is not None:
            measured = replace(form, seconds=seconds, compile_seconds=entry.compile_seconds.get(form.name, 0.0))
            _trials[key] = _Trial(measured, entry.trial_seconds.get(form.name, 0.0), here=False)
        trial = _trials.get(key)
        return trial if trial is not None and trial.form is not None else None

    def unit(self, form: Form) -> CapturedUnit:
        """Return a unit of this form: the one of the last trial if it has this form, else a new one."""
        last, self._last = self._last, None
        if last is not None and last[0] == form:
            return last[1]
        del last  # freed first, since two units would need twice the memory
        return self._build(form)

    def _build(self, form: Form) -> CapturedUnit:
        with timed("units"):
            unit = CapturedUnit(self.recipes, self.trace_cache, self.cache, chunk=form.chunk, compiled=form.compiled)
        unit.step_seconds = form.seconds
        return unit

    def time(self, form: Form) -> Form | None:
        """Build, capture and time a form, unless a measurement is known. Returns None if it fails."""
        known = self.known(form)
        if known is not None:
            self.spent = known.spent
            return known.form
        return None if self.made_here(form) else self.confirm(form)

    def confirm(self, form: Form, *, load_only: bool = False) -> Form | None:
        """Try a form in this process, whatever was measured before, since compiling it here may fail. Returns None if
        it fails.

        Args:
            load_only: Fail if it is not in Inductor's cache.
        """
        if self._last is not None:
            self._last = None
            clear()
        try:
            with timed("trials") as span, no_compiling() if load_only else nullcontext():
                self._last = self._time(form)
        except (RuntimeError, NotImplementedError, AssertionError, NotStackable) as error:
            if context_lost(error) or _is_own_assertion(error):
                raise
            if self.trace_cache.deterministic and out_of_memory(error):
                raise  # fewer members have the same form, and another form would have other bits
            self._failed.add(form.name)
            if not out_of_memory(error) and not not_cached(error):
                _trials[self._trial_key(form)] = _Trial(None)
        if self._last is None:
            clear()
            return None
        measured = self._last[0]
        self.spent = span.seconds - measured.compile_seconds
        self._remember(measured)
        return measured

    def _time(self, form: Form) -> tuple[Form, CapturedUnit]:
        trim()
        bytes_before, _ = held()
        unit = self._build(form)
        measured = _time_replays(unit, form)
        self._bytes = unit.set_up_bytes - bytes_before
        return measured, unit

    def note_compiled(self, form: Form, seconds: float | None, load_seconds: float) -> None:
        """Store the measurements of a step that another process has compiled, of a unit with this form; None: that
        failed."""
        compiled = replace(form, compiled=True, seconds=seconds or 0.0, compile_seconds=load_seconds)
        if seconds is None:
            _trials[self._trial_key(compiled)] = _Trial(None)
            return
        self.spent, self._bytes = 0.0, 0
        self._remember(compiled)

    def _remember(self, form: Form) -> None:
        _trials[self._trial_key(form)] = _Trial(form, self.spent)
        perf_cache.note(
            self._key, tier=form.name, rows=len(self.recipes), seconds=form.seconds, bytes=self._bytes,
            compile_seconds=form.compile_seconds if form.compiled else None, trial_seconds=self.spent,
        )  # fmt: skip


def _choose(trials: Trials, compile: bool | Literal["auto"], stackable: bool) -> Form | None:
    """Return the form with the shortest step, trying no more forms than the remaining work is worth."""
    graph, count = next(iter(trials.recipes[0].steps.values())), len(trials.recipes)
    streams_first = _convolves(graph) and _weights(trials.recipes[0]) > SMALL and _operations(graph) > FEW_OPERATIONS
    order = [1] if count == 1 or not stackable else [1, count] if streams_first else [count, 1]
    steps = _steps_left(trials)
    plain = trials.time(Form(order[0], False))
    if compile is False:
        return _fastest_plain(trials, order, plain)
    estimate = _compile_estimate(graph)
    if compile == "auto" and plain is not None and steps * plain.seconds < ALL_FORMS * estimate:
        if steps * plain.seconds * COMPILED_GAIN > estimate:
            plain = _fastest_plain(trials, order, plain)
        return None if plain is None else _plain_or_found(trials, plain, steps)
    first = trials.time(Form(order[0], True))
    if first is not None and (
        len(order) == 1
        or _fills_device(first, count)
        or steps * first.seconds * COMPILED_GAIN < max(estimate, first.compile_seconds)
    ):
        return _best([plain, first])
    return _best([plain, first, *(trials.time(Form(chunk, True)) for chunk in order[1:])])


def _fastest_plain(trials: Trials, order: list[int], plain: Form | None) -> Form | None:
    """Return the faster form of those that are not compiled; the second one is tried if the remaining work is worth it.

    Args:
        order: The number of members in a stack of each form.
        plain: The first form, if it can be captured.
    """
    count = len(trials.recipes)
    second_cost = trials.spent * (count if order[-1] == 1 else 1)
    second_known = len(order) == 2 and trials.known(Form(order[1], False)) is not None
    if (
        plain is not None
        and not second_known
        and (
            len(order) == 1
            or _fills_device(plain, count)
            or _steps_left(trials) * plain.seconds * FORM_GAIN < second_cost
        )
    ):
        return plain
    return _best([plain, *(trials.time(Form(chunk, False)) for chunk in order[1:])])


def _plain_or_found(trials: Trials, plain: Form, steps: int) -> Form:
    """Return the compiled form if an earlier run has compiled it and loading it saves time, otherwise the plain one."""
    earlier = trials.known(replace(plain, compiled=True))
    if earlier is None or earlier.form is None:
        return plain
    saved = steps * (plain.seconds - earlier.form.seconds)
    load_seconds = 0.0 if trials.is_built(earlier.form) else earlier.form.compile_seconds
    return earlier.form if saved > load_seconds else plain


def _pays_meanwhile(trials: Trials, plain: Form) -> bool:
    """Return whether compiling this form's step while it trains could pay, as far as is known."""
    compiled = replace(plain, compiled=True)
    earlier = trials.known(compiled)
    if trials.cannot_be_made(compiled):
        return False
    if earlier is not None and earlier.form is not None and earlier.form.seconds >= plain.seconds:
        return False
    graph = next(iter(trials.recipes[0].steps.values()))
    return _steps_left(trials) * plain.seconds > _compile_estimate(graph)


def _steps_left(trials: Trials) -> int:
    """Return the most steps that a member still has."""
    return max(num_steps(recipe.member) - recipe.member.step for recipe in trials.recipes)


def _compile_estimate(graph: Trace) -> float:
    """Return about how many seconds it takes to compile a step, which was 13 to 52 s for 17 to 263 nodes."""
    return 12.0 + 0.15 * len(graph.nodes)


def _fills_device(form: Form, count: int) -> bool:
    """Return whether members on parallel streams already fill the device."""
    return form.chunk == 1 and form.seconds > FULL_SECONDS * count


def _best(forms: list[Form | None]) -> Form | None:
    return min((form for form in forms if form is not None), key=lambda form: form.seconds, default=None)


def _time_replays(unit: CapturedUnit, form: Form) -> Form:
    """Time replays of the unit's captured step, and return the form with its measurements."""
    graph = unit.graph(RECORDER)
    with unit.trying():
        unit.step_seconds = RECORDER.time(graph, unit.rewind)
    return replace(form, seconds=unit.step_seconds, compile_seconds=unit.compile_seconds)


def _weights(recipe: Recipe) -> int:
    return sum(weight.numel() for weight in recipe.member.model.parameters())


def _convolves(graph: Trace) -> bool:
    return any("conv" in str(node.target) for node in graph.nodes if node.op == "call_function")


def _operations(graph: Trace) -> float:
    """Count the operations of all convolutions and linear layers in a forward pass."""
    total = 0.0
    for node in graph.nodes:
        if node.op == "call_function" and any(name in str(node.target) for name in ("conv", "linear")):
            _, weight, *_ = node.all_input_nodes
            total += 2.0 * node.meta["val"].numel() * weight.meta["val"][0].numel()
    return total


def _is_own_assertion(error: Exception) -> bool:
    """Return whether an assertion of this package failed. That is a bug and must be raised; an assertion in torch while
    it compiles or captures only means that this form is not available."""
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, AssertionError) and bool(frames) and Path(frames[-1].filename).is_relative_to(_PACKAGE)
