"""What the garbage collector sees during a run, and afterwards."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from tests.engine.loop import run
from tests.engine.tiers.captured.test_captured import job
from tests.engine.tiers.captured.test_captured_on_cpu import CPU, OnCpu, Seats

from shoal.engine.recipes.recipe import TraceCache
from shoal.engine.runtime.run import Run
from shoal.engine.runtime.unit_runner import UnitRunner
from shoal.engine.tiers.captured.executor import CapturedExecutor
from shoal.engine.tiers.captured.unit import CapturedUnit
from shoal.engine.tiers.stacked.unit import StackedUnit
from shoal.engine.tiers.unit import Outcome
from shoal.preparation.checks import prepare
from shoal.utils import garbage_collection


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    gc.unfreeze()
    yield
    garbage_collection.thaw()
    gc.unfreeze()


class Ring:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.own = self


def test_what_is_frozen_is_looked_at_by_our_own_collections_alone() -> None:
    ring = Ring()
    seen = weakref.ref(ring)
    garbage_collection.freeze()
    assert gc.get_freeze_count()
    del ring
    gc.collect()
    assert seen() is not None
    garbage_collection.collect()
    assert seen() is None and gc.get_freeze_count(), "and the rest is frozen again"
    garbage_collection.thaw()
    assert not gc.get_freeze_count()
    garbage_collection.collect()
    assert not gc.get_freeze_count()


def test_what_has_just_become_garbage_is_not_frozen() -> None:
    seen = weakref.ref(Ring())
    garbage_collection.freeze()
    assert seen() is None


def test_what_somebody_else_froze_is_left_alone() -> None:
    gc.freeze()
    before = gc.get_freeze_count()
    garbage_collection.freeze()
    garbage_collection.collect()
    garbage_collection.thaw()
    assert 0 < gc.get_freeze_count() <= before


class OnGpu(Seats):
    """Says that it is on a GPU."""

    def noted(self, runner: UnitRunner, seconds: float, batches: int) -> int | None:
        return None


def runs(full_at: int = 0, stop: bool = False) -> tuple[Run, list[int], list[int]]:
    """A run of two units one after the other; frozen objects after each round, and at each call of `forget`."""
    jobs = [job(i, val=None, batch_size=8 + 8 * (i // 2), epochs=1) for i in range(4)]
    members = prepare(jobs, CPU)
    planning = OnGpu(members, timed=False)
    planning.budget, planning.gpu, planning.executor = 2, True, CapturedExecutor(OnCpu())
    frozen, forgotten, turns = list[int](), list[int](), list[int]()
    real, forget = planning.executor.run, planning.executor.forget

    def turn(work: Any, meanwhile: Any = None) -> list[Outcome]:
        turns.append(len(work))
        if len(turns) == full_at:
            return [Outcome(0.0, full="no room") for _ in work]
        return real(work, meanwhile)

    def forgetting() -> None:
        seen = weakref.ref(old.pop()) if old else None
        forget()
        assert seen is None or seen() is None, "memory that is full is looked through, the frozen part too"
        forgotten.append(gc.get_freeze_count())

    old = [Ring()]
    planning.executor.run, planning.executor.forget = turn, forgetting  # type: ignore[method-assign]

    def between() -> None:
        frozen.append(gc.get_freeze_count())
        if stop:
            raise KeyboardInterrupt

    return Run(members, planning, between=between), frozen, forgotten


def test_units_are_frozen_while_they_run() -> None:
    run_of_units, frozen, forgotten = runs()
    run_of_units.go()
    assert frozen and all(frozen) and not forgotten
    assert not gc.get_freeze_count()
    assert [member.status for member in run_of_units.members.values()] == ["done"] * 4


def test_full_memory_is_looked_through() -> None:
    run_of_units, frozen, forgotten = runs(full_at=2)
    run_of_units.go()
    assert forgotten and all(frozen) and not gc.get_freeze_count()
    assert [member.status for member in run_of_units.members.values()] == ["done"] * 4


def test_an_interrupted_run_thaws() -> None:
    run_of_units, frozen, _ = runs(stop=True)
    with pytest.raises(KeyboardInterrupt):
        run_of_units.go()
    assert all(frozen) and not gc.get_freeze_count()


def test_a_run_on_a_cpu_freezes_them_too() -> None:
    run_of_units, frozen, _ = runs()
    run_of_units.planning.gpu = False
    run_of_units.go()
    assert frozen and all(frozen)
    assert not gc.get_freeze_count()


@pytest.mark.parametrize("kind", ["captured", "stacked"])
def test_a_unit_that_has_ended_is_gone_without_the_collector(kind: str) -> None:
    """Its memory is the device's, and frozen objects are not looked at."""
    members, trace_cache = prepare([job(i, val=None, epochs=1 + i) for i in range(3)], CPU), TraceCache()
    recipes = [trace_cache.recipe(member) for member in members]
    gc.collect()
    gc.disable()
    try:
        if kind == "captured":
            captured = CapturedUnit(recipes, trace_cache, {}, chunk=3, compiled=False)
            stacks = [weakref.ref(captured.chunks[0].stack)]
            run([captured], CapturedExecutor(OnCpu()))
            stacks.append(weakref.ref(captured.chunks[0].stack))
            del captured
        else:
            stacked = StackedUnit(recipes, trace_cache)
            stacks = [weakref.ref(stacked.stack)]
            run([stacked])
            del stacked
        assert not any(stack() for stack in stacks)
    finally:
        gc.enable()
