"""What a GPU captures, run operator by operator on a CPU: chunks, counted draws and the rules a GPU takes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from tests.engine.loop import run
from tests.engine.tiers.captured import host_kernels
from tests.engine.tiers.captured.test_captured import CASES, KINDS, job, worst
from torch import nn

import shoal
from shoal import reference
from shoal.engine.members.member import Member, counted
from shoal.engine.members.stretches import Stretch
from shoal.engine.planning.planner import Part
from shoal.engine.planning.policy import Fifo, Policy, RoundRobin
from shoal.engine.proof.group import group
from shoal.engine.recipes.recipe import Recipe, TraceCache
from shoal.engine.rules import op_context
from shoal.engine.runtime.planning_context import PlanningContext
from shoal.engine.runtime.run import Run
from shoal.engine.runtime.unit_runner import UnitRunner
from shoal.engine.stack import _flat_state, _update_kernel, fused_update, transfer
from shoal.engine.tiers.captured import _step
from shoal.engine.tiers.captured import chunk as chunk_module
from shoal.engine.tiers.captured.compiling import Executable
from shoal.engine.tiers.captured.executor import CapturedExecutor
from shoal.engine.tiers.captured.fusion import kernel_source
from shoal.engine.tiers.captured.graphs import Branch, Graph, Recorder
from shoal.engine.tiers.captured.unit import CapturedUnit
from shoal.engine.tiers.unit import Executor, Outcome, Unit
from shoal.preparation.checks import prepare
from shoal.reporting.events import Event
from shoal.training import collect
from shoal.utils.randomness import counter_bits

CPU = torch.device("cpu")


class Ahead(Executor):
    """Looks ahead, as an executor does that waits for a device."""

    def run(self, work: list[tuple[Unit, int]], meanwhile: Callable[[], None] | None = None) -> list[Outcome]:
        outcomes = super().run(work)
        if meanwhile is not None:
            meanwhile()
        return outcomes


class Recorded:
    """A graph: what was recorded, on the tensors of that moment."""

    def __init__(self, branches: Sequence[Branch]) -> None:
        self.branches, self.replays = list(branches), 0

    def replay(self) -> None:
        self.replays += 1
        for branch in self.branches:
            branch()

    def pool(self) -> None:
        return None


class OnCpu(Recorder):
    """Records and replays without a device: an index beyond its table is an error here, and no assert somewhere."""

    def __init__(self) -> None:
        self.graphs: list[Recorded] = []

    def capture(self, branches: Sequence[Branch], lane: int, beside: Graph | None = None) -> Graph:
        self.graphs.append(Recorded(branches))
        return self.graphs[-1]

    def on(self, lane: int) -> AbstractContextManager[Any]:
        return nullcontext()

    def fork(self, lanes: Sequence[int]) -> None: ...

    def join(self, lanes: Sequence[int]) -> None: ...

    def wait(self) -> None: ...


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference loop draws as it does on a GPU, large kernels take the members all at once, and what comes and goes
    is laid side by side for it."""

    @contextmanager
    def drawing(state: Any) -> Iterator[None]:
        with counted(state.job.seed, state.device) as mode:
            mode.begin(len(state.losses))
            yield

    monkeypatch.setattr(reference, "_drawing", drawing)
    monkeypatch.setattr(op_context, "one_by_one", lambda _: False)
    monkeypatch.setattr(_flat_state, "on_gpu", lambda _: True)
    monkeypatch.setattr(transfer, "is_away", lambda tensor, device: True)


def train(jobs: list[shoal.Job], chunk: int) -> shoal.Results:
    members, trace_cache = prepare(jobs, CPU), TraceCache()
    units: list[Unit] = [
        CapturedUnit(found.recipes, trace_cache, {}, chunk=min(chunk, len(found.recipes)), compiled=False)
        for found in group(members, trace_cache)
    ]
    run(units, Ahead())
    return collect(members, {})


class Seats(PlanningContext):
    """Captured units on a CPU, and a seat for every member."""

    chunk = 8

    def bytes(self, members: Sequence[Member]) -> float:
        return float(len(members))

    def units(self, members: Sequence[Member]) -> list[tuple[Unit, Part]]:
        found = group(list(members), self.trace_cache)
        parts = [Part("stacked", [m.index for m in g.members], [m.name for m in g.members], "") for g in found]
        made: list[Unit] = [
            CapturedUnit(g.recipes, self.trace_cache, {}, chunk=self.chunk, compiled=False) for g in found
        ]
        return list(zip(made, parts, strict=True))

    def recipe_to_join(self, runner: UnitRunner, member: Member, beside: Sequence[Recipe] = ()) -> Recipe | None:
        recipe = self.recipes[member.index]
        return recipe if runner.unit.accepts(recipe, beside) else None


LENGTHS: list[dict[str, Any]] = [{"epochs": 1 + i % 3} if i % 2 else {"epochs": None, "steps": 3 + i} for i in range(9)]


@pytest.mark.parametrize("policy", [Fifo(), RoundRobin(slice_seconds=1e-3)])
@pytest.mark.parametrize("chunk", [1, 8])
@pytest.mark.parametrize("kinds", [False, True], ids=["one optimizer", "several"])
@pytest.mark.usefixtures("as_on_a_gpu")
def test_seats_that_are_taken_again(chunk: int, policy: Policy, kinds: bool) -> None:
    """Members in one stack, each at another place of its epoch, some of them at their short last batch."""
    jobs = [job(i, val=None, **((LENGTHS[i] | KINDS[i % len(KINDS)]) if kinds else LENGTHS[i])) for i in range(9)]
    if kinds:
        jobs += [job(9 + i, val=None, **changes) for i, changes in enumerate(KINDS)]
    members = prepare(jobs, CPU)
    planning = Seats(members, timed=False)
    planning.budget, planning.chunk = 4, chunk
    told: list[Event] = []
    run = Run(members, planning, policy=policy, notify=told.append)
    run.turn_seconds = 1e-4
    run.go()
    joins = [event.data["unit"] for event in told if event.kind == "join"]
    assert len(set(joins)) < len(joins)
    for ours, own in zip(collect(members, {}), jobs, strict=True):
        theirs = reference.solo(own)
        assert (ours.status, ours.steps) == (theirs.status, theirs.steps), own.name
        assert worst(ours, theirs) < 1e-9, own.name


@pytest.mark.parametrize("chunk", [1, 8])
@pytest.mark.parametrize("seats", [2, 3, 4])
@pytest.mark.usefixtures("as_on_a_gpu")
def test_graphs_of_seats_that_are_taken_again(chunk: int, seats: int) -> None:
    """What is captured is replayed for its own unit alone, and rows where nobody sits stand still."""
    jobs = [job(i, val=None, **LENGTHS[i % len(LENGTHS)]) for i in range(14)]
    members = prepare(jobs, CPU)
    planning = Seats(members, timed=False)
    planning.budget, planning.chunk, planning.executor = seats, chunk, CapturedExecutor(recorder := OnCpu())
    run = Run(members, planning)
    run.turn_seconds = 1e-3
    run.go()
    assert recorder.graphs and all(graph.replays for graph in recorder.graphs)
    for ours, own in zip(collect(members, {}), jobs, strict=True):
        theirs = reference.solo(own)
        assert (ours.status, ours.steps) == (theirs.status, theirs.steps), own.name
        assert worst(ours, theirs) < 1e-9, own.name


@pytest.mark.parametrize("chunk", [1, 8])
@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_seat_that_stays_free(chunk: int) -> None:
    """Its steps are captured with the others' and replayed for several epochs, and go nowhere."""
    jobs = [job(i, val=None, epochs=1 if i == 0 else 6) for i in range(4)]
    members, trace_cache = prepare(jobs, CPU), TraceCache()
    unit = CapturedUnit([trace_cache.recipe(m) for m in members], trace_cache, {}, chunk=min(chunk, 4), compiled=False)
    run([unit], CapturedExecutor(OnCpu()))
    for ours, own in zip(collect(members, {}), jobs, strict=True):
        assert worst(ours, reference.solo(own)) < 1e-9, own.name


@pytest.mark.usefixtures("as_on_a_gpu")
def test_one_order_is_read_for_all_only_where_it_is_the_order_of_all() -> None:
    """A clone with another data seed begins that seed's orders in the epoch it is in; drop_last may make as many rows
    of the rest of an epoch as of a whole one."""
    jobs, trace_cache = [job(i, val=None, data_seed=7, batch_size=30, drop_last=True) for i in range(2)], TraceCache()
    late, begun, both = (prepare(jobs, CPU) for _ in range(3))
    for members in (late, both, begun):
        for member in members:
            member.epoch = 1
    for member in (late[0], *both):
        torch.randperm(len(member.data), generator=member.orders)
    begun[0].earlier = [Stretch(5, 5, [1.0], {})]
    for members, agree in ((late, False), (begun, False), (both, True)):
        recipes = [trace_cache.recipe(member) for member in members]
        assert recipes[0].key == recipes[1].key
        unit = CapturedUnit(recipes, trace_cache, {}, chunk=2, compiled=False)
        assert unit.chunks[0].shared == agree


@pytest.mark.usefixtures("as_on_a_gpu")
def test_those_at_their_end_are_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    members, trace_cache = prepare([job(i, val=None, epochs=1 + i) for i in range(3)], CPU), TraceCache()
    unit = CapturedUnit([trace_cache.recipe(member) for member in members], trace_cache, {}, chunk=3, compiled=False)
    expected: set[tuple[str, int]] = set()

    def look_ahead(self: CapturedUnit, ending: list[int]) -> None:
        expected.update((self.members[slot].name, self.members[slot].epoch) for slot in ending)

    monkeypatch.setattr(CapturedUnit, "look_ahead", look_ahead)
    run([unit], CapturedExecutor(OnCpu()))
    assert expected == {(member.name, member.epoch - 1) for member in members}, "each in its last epoch"


@pytest.mark.usefixtures("as_on_a_gpu")
def test_units_one_after_the_other_have_graphs_of_their_own() -> None:
    """Units come and go, and Python gives the same address to one after the other."""
    recorder, trace_cache = OnCpu(), TraceCache()
    executor = CapturedExecutor(recorder)
    for i in range(4):
        jobs = [job(i + 4 * k, val=None, epochs=2) for k in range(2)]
        members = prepare(jobs, CPU)
        found = group(members, trace_cache)[0]
        run([CapturedUnit(found.recipes, trace_cache, {}, chunk=2, compiled=False)], executor)
        for ours, own in zip(collect(members, {}), jobs, strict=True):
            assert worst(ours, reference.solo(own)) < 1e-9
    gc.collect()


@pytest.mark.usefixtures("as_on_a_gpu")
def test_several_units_side_by_side() -> None:
    jobs = [job(i, val=None, batch_size=(8, 16, 20)[i % 3], epochs=1 + i % 4) for i in range(9)]
    members, trace_cache, recorder = prepare(jobs, CPU), TraceCache(), OnCpu()
    units: list[Unit] = [
        CapturedUnit(found.recipes, trace_cache, {}, chunk=8, compiled=False) for found in group(members, trace_cache)
    ]
    run(units, CapturedExecutor(recorder))
    assert len(recorder.graphs) <= 4 * len(units), "whoever else is there, a unit is captured once for each shape"
    for ours, own in zip(collect(members, {}), jobs, strict=True):
        assert worst(ours, reference.solo(own)) < 1e-9


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_trial_leaves_nothing_behind() -> None:
    members, trace_cache = prepare([job(i, val=None) for i in range(3)], CPU), TraceCache()
    recipes = [trace_cache.recipe(member) for member in members]
    unit = CapturedUnit(recipes, trace_cache, {}, chunk=3, compiled=False)
    before = [tensor.detach().clone() for chunk in unit.chunks for tensor in chunk.tensors()]
    graph = unit.graph(OnCpu())
    with unit.trying():
        for _ in range(20):
            unit.rewind()
            graph.replay()
    after = [tensor.detach() for chunk in unit.chunks for tensor in chunk.tensors()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("chunk", [1, 2, 8])
@pytest.mark.parametrize("case", [case for case in CASES if case != "accumulate"])
@pytest.mark.usefixtures("as_on_a_gpu")
def test_captured_steps_equal_the_reference_loop(case: str, chunk: int) -> None:
    jobs = CASES[case] if chunk == 8 else CASES[case][:3]
    if chunk == 1 and case == "one diverges":
        jobs = CASES[case]
    for ours, own in zip(train(jobs, chunk), jobs, strict=True):
        theirs = reference.solo(own)
        assert (ours.status, ours.steps) == (theirs.status, theirs.steps)
        assert worst(ours, theirs) < 1e-9


@pytest.mark.usefixtures("as_on_a_gpu")
def test_compiled_steps_are_shared_only_by_jobs_that_clip_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    def as_it_is(step: _step.Step, inputs: _step.Inputs, *, compiled: bool) -> Executable:
        return Executable(lambda tensors: step(tensors, inputs), compiled, 0.0)

    monkeypatch.setattr(chunk_module, "executable", as_it_is)
    jobs = [job(0), job(3, clip_norm=0.1), job(6, clip_value=0.01), job(9, clip_value=0.02)]
    trace_cache, cache = TraceCache(), chunk_module.Cache()
    ready = []
    for recipe in group(prepare(jobs, CPU), trace_cache)[0].recipes:
        how = {"solo": True, "shared": False, "compiled": True}
        alone = chunk_module.Chunk.build([recipe], trace_cache, cache, **how)
        alone.prepare(32)
        ready.append(alone._ready[32])
    assert len({id(step) for step in ready[:3]}) == 3
    assert ready[3] is ready[2]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.GRU(2, 5, 2, batch_first=True), nn.Linear(5, 4)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.layers(x.view(-1, 3, 2))[0][:, -1])
        return out


@pytest.mark.skipif(host_kernels.COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("chunk", [1, 8])
@pytest.mark.parametrize(
    "case", ["dropout rates", "images", "kinds of optimizers", "recurrent", "logs", "clip by value", "one diverges"]
)
@pytest.mark.usefixtures("as_on_a_gpu")
def test_fused_steps_equal_the_reference_loop(case: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kernels that a GPU gets, compiled for the host."""
    monkeypatch.setattr(_step, "can_fuse", lambda _: True)
    monkeypatch.setattr(_update_kernel, "on_gpu", lambda _: True)
    for module in (_flat_state, fused_update):  # of updates on a CPU
        monkeypatch.setattr(module, "suits", lambda *_: False)
    monkeypatch.setattr(_step.cuda_kernels, "load", host_kernels.load)
    jobs = [job(i, model=Recurrent) for i in range(3)] if case == "recurrent" else CASES[case]
    members, trace_cache = prepare(jobs, CPU), TraceCache()
    units = [
        CapturedUnit(part.recipes, trace_cache, {}, chunk=min(chunk, len(part.recipes)), compiled=False)
        for part in group(members, trace_cache)
    ]
    run(list(units), CapturedExecutor(OnCpu()))
    fused = [part.step(part.stack.members[0].job.batch_size).fused for unit in units for part in unit.chunks]
    assert all(fused) or (case == "recurrent" and chunk == 1), "of a layer alone torch's own kernel is taken"
    for ours, own in zip(collect(members, {}), jobs, strict=True):
        assert worst(ours, reference.solo(own)) < 1e-9


def _begins_with_zeros() -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4)).double()
    nn.init.zeros_(net[2].weight)
    return net


@pytest.mark.skipif(host_kernels.COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_wrong_kernel_is_seen_where_gradients_begin_as_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_step, "can_fuse", lambda _: True)
    monkeypatch.setattr(_step.cuda_kernels, "load", host_kernels.load)
    members, trace_cache = prepare([job(i, model=_begins_with_zeros) for i in range(3)], CPU), TraceCache()
    (part,) = group(members, trace_cache)
    for right in (True, False):
        if not right:
            monkeypatch.setitem(kernel_source._EXPRESSIONS, torch.ops.aten.threshold_backward, "({0})")
        unit = CapturedUnit(part.recipes, trace_cache, {}, chunk=3, compiled=False)
        chunk = unit.chunks[0]
        chunk.prepare(chunk.stack.members[0].job.batch_size)
        assert (chunk.step(chunk.stack.members[0].job.batch_size).fused is not None) == right


def test_draws_are_even_and_unrelated_between_seeds_steps_calls_and_elements() -> None:
    zeros, numbers = torch.zeros(16, dtype=torch.int64), torch.arange(16)
    for keys in ((numbers, zeros, zeros), (zeros, numbers, zeros), (zeros, zeros, numbers)):
        unit = counter_bits(*keys, 50_000).double() / 2**32
        assert (unit.mean(1) - 0.5).abs().max() < 0.006
        assert (unit.var(1) - 1 / 12).abs().max() < 0.002
        assert torch.corrcoef(unit).fill_diagonal_(0).abs().max() < 0.025
        assert torch.corrcoef(torch.stack([unit[0, 1:], unit[0, :-1]]))[0, 1].abs() < 0.02
    again = counter_bits(numbers[3:4], zeros[:1], zeros[:1], 100)
    assert torch.equal(again[0], counter_bits(numbers, zeros, zeros, 100)[3]), "a draw depends on the pack"
