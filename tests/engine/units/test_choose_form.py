"""Which captured form a group gets: what is tried, what is remembered, and what a trial is worth."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoal
from shoal.engine.planning import memory, perf_cache
from shoal.engine.recipes.recipe import Recipe, TraceCache
from shoal.engine.tiers.captured.unit import CapturedUnit
from shoal.engine.units import _choose_form
from shoal.engine.units._choose_form import Form
from shoal.preparation.checks import prepare

SECONDS = {"stacked": 1e-4, "streams": 2e-4, "stacked compiled": 5e-5, "streams compiled": 1e-4}
X, Y = torch.randn(32, 3, 6, 6), torch.randint(3, (32,))


@pytest.fixture(autouse=True)
def tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The forms that were tried, with made-up times and bytes, in a cache of its own."""
    found: list[str] = []
    grown = iter(range(0, 10**12, 10**9))

    def timed(unit: CapturedUnit, form: Form) -> Form:
        found.append(form.name)
        unit.set_up_bytes = next(grown) + 7
        return replace(form, seconds=SECONDS[form.name], compile_seconds=3.0 if form.compiled else 0.0)

    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))
    monkeypatch.setattr(_choose_form, "_time_replays", timed)
    monkeypatch.setattr(_choose_form, "held", lambda: (next(grown), 7))
    monkeypatch.setattr(_choose_form, "clear", lambda: None)
    another_process(monkeypatch)
    return found


def another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_choose_form, "_trials", {})


def conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 3))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(108, 8), nn.ReLU(), nn.Linear(8, 3))


def recipes(count: int, steps: int, **changes: Any) -> tuple[list[Recipe], TraceCache]:
    settings: dict[str, Any] = {"model": mlp, "data": (X, Y), "loss": F.cross_entropy, "batch_size": 8, "steps": steps}
    jobs = [shoal.Job(**(settings | {"hparams": {"lr": 0.1}, "seed": i} | changes)) for i in range(count)]
    trace_cache = TraceCache()
    return [trace_cache.recipe(member) for member in prepare(jobs, torch.device("cpu"))], trace_cache


def chosen_unit(count: int, steps: int, compile: Any, **changes: Any) -> tuple[Form, CapturedUnit]:
    made, trace_cache = recipes(count, steps, **changes)
    found = _choose_form.choose(made, trace_cache, trace_cache.executables, compile)
    assert found is not None
    form, unit = found
    assert unit.tier == form.tier and unit.compiled == form.compiled and len(unit.members) == count
    return form, unit


def chosen(count: int, steps: int, compile: Any = False, **changes: Any) -> Form:
    return chosen_unit(count, steps, compile, **changes)[0]


def test_how_long_training_is_decides_how_it_is_compiled(tried: list[str]) -> None:
    """A step takes 0.1 ms, compiling about 14 s."""
    form, unit = chosen_unit(4, 10**4, "auto")
    assert form.name == "stacked" and unit._background is None, "a second is too short for it"
    form, unit = chosen_unit(4, 2 * 10**5, "auto")
    assert form.name == "stacked" and unit._background is not None, "20 s: in another process, meanwhile"
    assert chosen_unit(4, 2 * 10**5, False)[1]._background is None, "it is not wanted"
    assert tried == ["stacked", "streams"], "the other form was tried for compile=False only"
    assert chosen(4, 10**9, "auto").name == "stacked compiled", "a day: before training, and all forms are tried"


@pytest.mark.parametrize(("seconds", "name"), [(5e-5, "stacked compiled"), (9.9e-5, "stacked"), (2e-4, "stacked")])
def test_what_another_process_compiled_is_used_by_the_next_run(
    monkeypatch: pytest.MonkeyPatch, seconds: float, name: str
) -> None:
    _, unit = chosen_unit(4, 2 * 10**5, "auto")
    assert unit._background is not None
    unit._background._note_times(seconds, 2.0)
    another_process(monkeypatch)
    monkeypatch.setitem(SECONDS, "stacked compiled", seconds)
    form, unit = chosen_unit(4, 2 * 10**5, "auto")
    assert form.name == name
    slower = seconds > SECONDS["stacked"]
    assert unit._background is None if slower or form.compiled else unit._background is not None
    assert chosen(4, 10**4, "auto").name == "stacked", "loading takes longer than it saves"


def test_the_form_of_a_deterministic_run_follows_from_the_job_alone(tried: list[str]) -> None:
    for count in (1, 4):
        made, _ = recipes(count, 10**9)
        found = _choose_form.choose(
            made, trace_cache := TraceCache(deterministic=True), trace_cache.executables, "auto"
        )
        assert found is not None and found[0].name == "streams" and found[1]._background is None
        asked = _choose_form.choose(made, trace_cache, trace_cache.executables, True)
        assert asked is not None and asked[0].name == "streams compiled"
    assert set(tried) == {"streams", "streams compiled"}


def test_full_memory_does_not_change_the_form_of_a_deterministic_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(unit: CapturedUnit, form: Form) -> Form:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(_choose_form, "_time_replays", full)
    made, _ = recipes(4, 10**9)
    for compile in (True, "auto"):
        with pytest.raises(torch.OutOfMemoryError):
            _choose_form.choose(made, TraceCache(deterministic=True), {}, compile)


def test_compiling_meanwhile_begins_with_the_fastest_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SECONDS, "streams", 4e-5)
    assert chosen(4, 10**6, False).name == "streams"
    another_process(monkeypatch)
    form, unit = chosen_unit(4, 10**6, "auto")
    assert form.name == "streams" and unit._background is not None


def test_a_step_that_another_process_could_not_compile_is_not_tried_again() -> None:
    _, unit = chosen_unit(4, 2 * 10**5, "auto")
    assert unit._background is not None
    unit._background._note_times(None, 0.0)
    assert chosen_unit(4, 2 * 10**5, "auto")[1]._background is None


def test_what_is_no_longer_in_the_cache_is_compiled_meanwhile(
    tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, unit = chosen_unit(4, 2 * 10**5, "auto")
    assert unit._background is not None
    unit._background._note_times(5e-5, 2.0)
    another_process(monkeypatch)
    before = _choose_form._time_replays

    def compiling(unit: CapturedUnit, form: Form) -> Form:
        if form.compiled:
            sys.modules["torch._inductor.compile_fx"].fx_codegen_and_compile()
        return before(unit, form)

    monkeypatch.setattr(_choose_form, "_time_replays", compiling)
    form, unit = chosen_unit(4, 2 * 10**5, "auto")
    assert form.name == "stacked" and unit._background is not None


def test_few_steps_take_the_first_form(tried: list[str]) -> None:
    assert chosen(4, 1).name == "stacked" and tried == ["stacked"]
    assert chosen(4, 10**9).name == "stacked" and tried == ["stacked", "streams"], "now the other is worth a trial"


def test_what_was_tried_is_not_tried_again(tried: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    first = chosen(4, 10**9, compile=True)
    count = len(tried)
    assert first.name == "stacked compiled" and sorted(tried) == sorted(SECONDS.keys() - {"streams"})
    another_process(monkeypatch)
    again = chosen(4, 10**9, compile=True)
    assert again == first and tried[count:] == ["stacked compiled"], "what has to be compiled here is tried here, once"
    assert chosen(4, 10**9, compile=True) == first and len(tried) == count + 1
    assert chosen(4, 10**9, compile=False).name == "stacked" and tried[count + 1 :] == ["streams"]
    assert chosen(5, 10**9, compile=True).chunk == 5 and len(tried) == 2 * count + 2, "another number is another"


def test_what_cannot_be_compiled_here_is_not(tried: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(4, 10**9, compile=True).compiled
    another_process(monkeypatch)  # without a compiler
    before = _choose_form._time_replays

    def timed(unit: CapturedUnit, form: Form) -> Form:
        if form.compiled:
            raise RuntimeError("no compiler")
        return before(unit, form)

    monkeypatch.setattr(_choose_form, "_time_replays", timed)
    for _ in range(2):
        del tried[:]
        assert chosen(4, 10**9, compile=True).name == "stacked"
    assert not tried, "what failed here is not tried again"


@pytest.mark.parametrize("compile", [False, True])
def test_full_memory_is_not_held_against_a_form(
    tried: list[str], monkeypatch: pytest.MonkeyPatch, compile: bool
) -> None:
    chosen(4, 10**9, compile=compile)
    another_process(monkeypatch)
    if not compile:  # what need not be compiled is only tried where it is not remembered
        monkeypatch.setenv("SHOAL_CACHE", str(Path(os.environ["SHOAL_CACHE"]) / "empty"))
    before, name = _choose_form._time_replays, "stacked compiled" if compile else "stacked"

    def full(unit: CapturedUnit, form: Form) -> Form:
        if form.name == name:
            raise torch.OutOfMemoryError("no room")
        return before(unit, form)

    with monkeypatch.context() as crowded:
        crowded.setattr(_choose_form, "_time_replays", full)
        assert chosen(4, 10**9, compile=compile).name != name
    assert chosen(4, 10**9, compile=compile).name == name, "the next group has room"


def test_what_is_slower_here_is_not_taken(tried: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(4, 10**9, compile=True).name == "stacked compiled"
    another_process(monkeypatch)
    monkeypatch.setitem(SECONDS, "stacked compiled", 1.0)
    assert chosen(4, 10**9, compile=True).name != "stacked compiled"


def test_another_optimizer_is_another_trial(tried: list[str]) -> None:
    chosen(2, 1)
    chosen(2, 1, optimizer=torch.optim.SGD)
    assert tried == ["stacked"] * 2


def test_a_full_device_is_not_filled_more(tried: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_choose_form, "FEW_OPERATIONS", 0)  # of a network with more, streams are tried first
    monkeypatch.setitem(SECONDS, "streams", 5e-3)
    assert chosen(4, 10**9, model=conv).name == "streams" and tried == ["streams"]
    monkeypatch.setitem(SECONDS, "streams", 3e-3)
    assert chosen(5, 10**9, model=conv).name == "stacked" and tried == ["streams", "streams", "stacked"]


def test_the_bytes_of_a_trial_are_what_is_predicted(tried: list[str]) -> None:
    chosen(4, 1)
    made, _ = recipes(1, 1)
    assert sum(curve.at(4) for curve in memory.footprint(made[0], "stacked")) == pytest.approx(10**9 + 7)
    entry = perf_cache.lookup(perf_cache.digest(made[0]))
    assert entry.bytes == {"stacked": {4: 10**9 + 7}} and entry.trial_seconds.keys() == {"stacked"}


def test_mixed_optimizers_are_remembered_by_their_numbers() -> None:
    (a, b), (c, d) = recipes(2, 1)[0], recipes(2, 1, optimizer=torch.optim.SGD)[0]
    assert perf_cache.digest_of([a, b]) == perf_cache.digest(a)
    keys = [perf_cache.digest_of(group) for group in ([a, b], [a, b, c], [a, c, d], [c, a, d])]
    assert len(set(keys)) == 3 and keys[2] == keys[3]


def asserting(where: str) -> Any:
    """A function of a file whose invariant does not hold."""
    space: dict[str, Any] = {}
    exec(compile("def broken(*_):\n    assert False, 'an invariant'", where, "exec"), space)
    return space["broken"]


def test_what_torch_asserts_is_a_form_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_choose_form, "_time_replays", asserting(torch.__file__))
    made, trace_cache = recipes(4, steps=10**5)
    assert _choose_form.choose(made, trace_cache, {}, "auto", stackable=True) is None


def test_an_invariant_of_ours_that_does_not_hold_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_choose_form, "_time_replays", asserting(_choose_form.__file__))
    made, trace_cache = recipes(4, steps=10**5)
    with pytest.raises(AssertionError, match="an invariant"):
        _choose_form.choose(made, trace_cache, {}, "auto", stackable=True)
