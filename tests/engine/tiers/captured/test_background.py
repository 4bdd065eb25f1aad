"""A step that is compiled in another process while its unit trains, on a CPU, and what happens to that process."""

from __future__ import annotations

import gc
import os
import re
import select
import signal
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.loop import run
from tests.engine.tiers.captured.test_captured import worst
from tests.engine.tiers.captured.test_captured_on_cpu import CPU, OnCpu, as_on_a_gpu
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch.fx import GraphModule

import shoal
from shoal.engine.recipes.recipe import TraceCache
from shoal.engine.tiers.captured import background
from shoal.engine.tiers.captured.background import BackgroundCompile
from shoal.engine.tiers.captured.compiling import compile_graph
from shoal.engine.tiers.captured.executor import CapturedExecutor
from shoal.engine.tiers.captured.graphs import Graph
from shoal.engine.tiers.captured.unit import CapturedUnit
from shoal.engine.tiers.unit import Outcome, Unit
from shoal.preparation.checks import prepare
from shoal.training import collect

__all__ = ["as_on_a_gpu"]

DATA = torch.randn(12, 4, dtype=torch.float64), torch.randint(3, (12,))


def jobs(small: bool = False) -> list[shoal.Job]:
    def net() -> nn.Module:
        layers = [nn.Linear(4, 3)] if small else [nn.Linear(4, 6), nn.Dropout(0.2), nn.Linear(6, 3)]
        return nn.Sequential(*layers).double()

    return [
        shoal.Job(
            model=net, data=DATA, loss=nn.functional.cross_entropy,
            optimizer=torch.optim.SGD if small else torch.optim.Adam, hparams={"lr": 0.01 * (seed + 1)}, batch_size=4,
            epochs=4 + seed, seed=seed,
        )
        for seed in range(3)
    ]  # fmt: skip


class Timed(OnCpu):
    """Says what a replay takes: one second, or `compiled` seconds for the graph that was captured last."""

    def __init__(self, compiled: float) -> None:
        super().__init__()
        self.compiled = compiled

    def time(self, graph: Graph, before: Callable[[], object]) -> float:
        for _ in range(3):  # it does run, and must leave no trace
            before()
            graph.replay()
        return self.compiled if graph is self.graphs[-1] else 1.0


class Patient(CapturedExecutor):
    """Waits for the other process after its first turn."""

    def run(self, work: list[tuple[Unit, int]], meanwhile: Callable[[], None] | None = None) -> list[Outcome]:
        outcomes = super().run(work, meanwhile)
        for unit, _ in work:
            assert isinstance(unit, CapturedUnit)
            if unit._background is not None and unit._background._process is not None:
                unit._background._process._process.wait()
                unit._background._process.seconds = 100.0
        return outcomes


def train(
    compiled: float, chunk: int = 3, small: bool = False
) -> tuple[shoal.Results, list[tuple[float | None, float]], CapturedUnit]:
    """Train jobs whose step takes a second, and `compiled` seconds when it is compiled; they equal the plain loop."""
    members, trace_cache = prepare(jobs(small), CPU), TraceCache()
    unit = CapturedUnit([trace_cache.recipe(m) for m in members], trace_cache, {}, chunk=chunk, compiled=False)
    unit.step_seconds = 3.0  # an old measurement
    measured: list[tuple[float | None, float]] = []
    unit.compile_meanwhile(lambda *seconds: measured.append(seconds))
    run([unit], Patient(Timed(compiled)))
    results = collect(members, {})
    for ours, theirs in zip(results, [shoal.solo(job) for job in jobs(small)], strict=True):
        assert ours.status == "done" and worst(ours, theirs) < 1e-9
    assert unit._background is None
    return results, measured, unit


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the graph instead of compiling it, which takes a minute."""

    def as_it_is(graph: GraphModule) -> Callable[[list[Tensor]], None]:
        def run(tensors: list[Tensor]) -> None:
            with torch.no_grad():
                graph(*tensors)

        return run

    monkeypatch.setattr(background, "_PROGRAM", "")
    monkeypatch.setattr(background, "compile_graph", as_it_is)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_step_is_compiled_and_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With settings of torch that change what is compiled."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    matmul = torch.backends.cuda.matmul
    before, matmul.allow_bf16_reduced_precision_reduction = matmul.allow_bf16_reduced_precision_reduction, False
    counters.clear()
    try:
        with inductor.patch(epilogue_fusion=False):
            _, measured, unit = train(0.5, small=True)
    finally:
        matmul.allow_bf16_reduced_precision_reduction = before
    assert unit.compiled and len(measured) == 1
    assert counters["inductor"]["fxgraph_cache_hit"] == 1 and not counters["inductor"]["fxgraph_cache_miss"]


@pytest.mark.usefixtures("as_on_a_gpu", "uncompiled")
def test_what_the_other_process_did_not_compile_is_not_compiled_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(background, "compile_graph", compile_graph)
    _, measured, unit = train(0.5, small=True)
    assert not unit.compiled and measured == [(None, 0.0)]


@pytest.mark.slow
@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("chunk", [1, 3])
def test_a_step_with_dropout_is_compiled_and_loaded(chunk: int) -> None:
    assert train(0.5, chunk)[2].compiled


@pytest.mark.usefixtures("as_on_a_gpu", "uncompiled")
@pytest.mark.parametrize("chunk", [1, 3])
def test_a_faster_step_takes_over(chunk: int) -> None:
    _, measured, unit = train(0.5, chunk)
    assert unit.compiled and unit.form.endswith(" compiled") and unit.step_seconds == 0.5
    ((step_seconds, load_seconds),) = measured
    assert step_seconds == 0.5 and 0 < load_seconds < 100
    assert unit.set_up_seconds > 100, "another shape would take what the other process took"


def test_the_other_process_knows_all_our_operators() -> None:
    """Also those of a GPU, such as a dropout's mask, which are registered when they are first used."""
    folder = Path(shoal.__file__).parent
    names = {
        name for file in folder.rglob("*.py") for name in re.findall(r'custom_op\("shoal::(\w+)"', file.read_text())
    }
    assert {"hold", "counter_mask", "patches"} <= names
    program = (
        "import importlib, sys, torch; from shoal.engine.tiers.captured.background import OPERATORS; "
        "[importlib.import_module(module) for module in OPERATORS]; "
        "print([name for name in sys.argv[1:] if not hasattr(torch.ops.shoal, name)])"
    )
    done = subprocess.run([sys.executable, "-c", program, *sorted(names)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.usefixtures("as_on_a_gpu", "uncompiled")
def test_a_slower_step_is_not_used() -> None:
    _, measured, unit = train(2.0)
    assert not unit.compiled and unit.step_seconds == 1.0 and measured[0][0] == 2.0, "3.0 was too much"


@pytest.mark.usefixtures("as_on_a_gpu", "uncompiled")
def test_a_process_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_PROGRAM", "raise SystemExit(3)")
    _, measured, unit = train(0.5)
    assert not unit.compiled and measured == [(None, 0.0)]


@pytest.mark.usefixtures("as_on_a_gpu", "uncompiled")
def test_without_a_cache_no_process_is_started() -> None:
    with inductor.patch(fx_graph_cache=False):
        _, measured, unit = train(0.5)
    assert not unit.compiled and measured == [(None, 0.0)]


@pytest.mark.usefixtures("as_on_a_gpu", "uncompiled")
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), RuntimeError("no compiler")])
@pytest.mark.parametrize("where", ["compile_graph", "_replace_step"])
def test_a_step_that_cannot_be_loaded_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, error: Exception, where: str
) -> None:
    def broken(*args: Any, **settings: Any) -> Any:
        raise error

    monkeypatch.setattr(background, where, broken)
    monkeypatch.setattr(background, "clear", lambda: None)
    _, measured, unit = train(0.5)
    full = isinstance(error, torch.OutOfMemoryError)  # the next unit may have room
    assert not unit.compiled and measured == ([] if full else [(None, 0.0)])


@pytest.mark.usefixtures("as_on_a_gpu", "uncompiled")
def test_a_step_that_fails_when_it_is_timed_is_replaced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(recorder: Timed, graph: Graph, before: Callable[[], object]) -> float:
        graph.replay()
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(Timed, "time", full)
    monkeypatch.setattr(background, "clear", lambda: None)
    _, measured, unit = train(0.5)
    assert not unit.compiled and not measured and unit.step_seconds == 3.0


def gone(group: int) -> bool:
    """Whether no process of this group runs any more."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, process_group = path.read_text().rpartition(")")[2].split()[:3]
            if int(process_group) == group and state != "Z":
                return False
    return True


SLOW = """
import subprocess, sys, threading
from shoal.engine.tiers.captured.compiling import compile_graph
from shoal.engine.tiers.captured.background import _end_with_parent
child = subprocess.Popen(["sleep", "600"])
threading.Thread(target=_end_with_parent, args=[int(sys.argv[1])], daemon=True).start()
child.wait()
"""


def unit() -> CapturedUnit:
    members, trace_cache = prepare(jobs(), CPU), TraceCache()
    return CapturedUnit([trace_cache.recipe(m) for m in members], trace_cache, {}, chunk=3, compiled=False)


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[CapturedUnit]]:
    """A unit whose step is being compiled, as the only reference to it."""
    monkeypatch.setattr(background, "_PROGRAM", SLOW)
    trained = unit()
    trained.compile_meanwhile(lambda *seconds: None)
    trained.look_ahead([])
    units = [trained]
    del trained
    yield units
    for each in units:
        each.end_reading()


def group_of(unit: CapturedUnit) -> int:
    assert isinstance(unit._background, BackgroundCompile) and unit._background._process is not None
    assert not unit._background.ended() and not gone(unit._background._process.pid)
    return unit._background._process.pid


def test_the_process_ends_with_the_unit(compiling: list[CapturedUnit]) -> None:
    (trained,) = compiling
    group = group_of(trained)
    trained.look_ahead([])
    assert group_of(trained) == group, "it is started once"
    trained.end_reading()
    assert gone(group) and trained._background is None


def test_the_process_ends_with_a_run_that_fails(compiling: list[CapturedUnit]) -> None:
    group = group_of(compiling[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads exist; the copy uses nothing of theirs
        copy = os.fork()
    if not copy:
        compiling.clear()
        gc.collect()
        os._exit(0)
    os.waitpid(copy, 0)
    assert not gone(group), "a forked process does not end it"
    compiling.clear()
    gc.collect()
    assert gone(group)


def test_one_process_runs_at_a_time_and_memory_that_is_full_ends_it(compiling: list[CapturedUnit]) -> None:
    other = unit()
    other.compile_meanwhile(lambda *seconds: None)
    other.look_ahead([])
    assert other._background is not None and other._background._process is None
    group = group_of(compiling[0])
    compiling[0].drop_graphs()
    assert gone(group)
    other.look_ahead([])
    assert not gone(group_of(other))
    other.end_reading()


@pytest.mark.usefixtures("as_on_a_gpu", "uncompiled")
def test_a_smaller_stack_is_not_compiled_while_training_waits() -> None:
    jobs_of_other_lengths = [replace(job, epochs=3 if job.seed else 9) for job in jobs()]
    members, trace_cache = prepare(jobs_of_other_lengths, CPU), TraceCache()
    trained = CapturedUnit([trace_cache.recipe(m) for m in members], trace_cache, {}, chunk=3, compiled=False)
    trained.step_seconds = 1.0
    trained.compile_meanwhile(lambda *seconds: None)
    forms: list[str] = []
    trained._save_memory = True  # free rows are dropped as soon as they can be
    run(
        [trained],
        Patient(Timed(0.5)),
        lambda member: forms.append(f"{len(trained.chunks[0].by_row)} {trained.form}"),
    )
    assert "3 stacked compiled" in forms and forms[-1] == "1 stacked"
    for ours, job in zip(collect(members, {}), jobs_of_other_lengths, strict=True):
        assert worst(ours, shoal.solo(job)) < 1e-9


def test_the_unit_is_freed_with_its_last_reference(compiling: list[CapturedUnit]) -> None:
    gone_with = weakref.ref(compiling[0])
    gc.disable()
    try:
        compiling.clear()
        assert gone_with() is None
    finally:
        gc.enable()


def test_the_process_ends_with_a_stack_of_another_size(compiling: list[CapturedUnit]) -> None:
    (trained,) = compiling
    group = group_of(trained)
    trained.write_back()
    trained.keep([0])
    trained._fit()
    assert len(trained.chunks[0].by_row) == 1 and gone(group)


PARENT = """
import sys, torch
from tests.engine.tiers.captured import test_background as tests
from shoal.engine.tiers.captured import background
background._PROGRAM = tests.SLOW
unit = tests.unit()
unit.compile_meanwhile(lambda *seconds: None)
unit.look_ahead([])
print(unit._background._process.pid, flush=True)
sys.stdin.read()
"""


def test_the_process_ends_with_a_parent_that_is_killed() -> None:
    root = Path(__file__).parents[4]
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *filter(None, sys.path)])},
    )  # fmt: skip
    assert parent.stdout is not None and parent.stdin is not None
    group = int(parent.stdout.readline())
    assert not gone(group)
    watch = os.pidfd_open(group)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    ended, _, _ = select.select([watch], [], [], 30)
    os.close(watch)
    parent.stdin.close()
    parent.stdout.close()
    assert ended and gone(group)
