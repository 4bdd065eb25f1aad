"""Memory: the analytic part against what real tensors do, corrections, budgets and sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoal
from shoal.engine.members.member import Member
from shoal.engine.planning import memory, perf_cache
from shoal.engine.planning.liveness import Ledger, nbytes, optimizer_bytes, solo_step, stacked_step
from shoal.engine.planning.planner import Curve, Plan
from shoal.engine.recipes.recipe import Recipe, TraceCache
from shoal.engine.runtime.planning_context import PlanningContext
from shoal.engine.stack._flat_state import FlatUpdate
from shoal.engine.tiers.stacked.unit import StackedUnit
from shoal.preparation.checks import prepare

X = torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(0))
Y = torch.arange(64) % 4


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))
    monkeypatch.setattr(memory, "_analytic", {})


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1), nn.Flatten(), nn.Linear(288, 4)
    )


def recipe(**changes: Any) -> tuple[Recipe, TraceCache]:
    settings: dict[str, Any] = {"optimizer": torch.optim.SGD, "hparams": {"lr": 0.1, "momentum": 0.9}}
    job = shoal.Job(model=network, data=(X, Y), loss=F.cross_entropy, batch_size=16, steps=4, **settings | changes)
    (member,) = prepare([job], torch.device("cpu"))
    trace_cache = TraceCache()
    return trace_cache.recipe(member), trace_cache


@pytest.mark.parametrize("rows", [2, 5])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.RMSprop, torch.optim.AdamW])
def test_a_step_on_fake_tensors_holds_what_real_ones_hold(optimizer: type[torch.optim.Optimizer], rows: int) -> None:
    own, trace_cache = recipe(optimizer=optimizer, hparams={"lr": 0.1})
    said = stacked_step(own, rows)
    settings: dict[str, Any] = {"optimizer": optimizer, "hparams": {"lr": 0.1}}
    unit = StackedUnit([recipe(**settings, seed=i)[0] for i in range(rows)], trace_cache)
    order = torch.arange(64).repeat(rows, 1)
    unit.begin_epoch(order)
    unit.run(1)
    with Ledger() as ledger:
        unit.run(1)
    held = ledger.held(0).working
    assert said.working == pytest.approx(held, rel=0.1)
    assert sum(said.sizes) == said.working
    stack = unit.stack
    flat = [own for part in stack.optimizer.ruled() for own in part._fused if isinstance(own, FlatUpdate)]
    scratch = [tensor for own in flat for tensor in own.scratch]
    state = sum(map(nbytes, [*stack.params, *stack.buffers, *stack.optimizer.tensors(), *scratch]))
    assert said.state == pytest.approx(state, rel=0.15, abs=512 * 40), "up to whole blocks and the numbers' columns"


def test_a_stack_grows_by_its_rows_and_a_member_alone_is_less() -> None:
    own, _ = recipe()
    two, eight = stacked_step(own, 2), stacked_step(own, 8)
    assert eight.working == pytest.approx(4 * two.working, rel=0.1)
    alone = solo_step(own)
    assert alone.working < two.working and 0 < optimizer_bytes(own) < alone.state


def predict_bytes(recipe: Recipe, rows: int) -> int:
    """The peak bytes of so many members, stacked, the data set aside."""
    return int(sum(curve.at(max(rows, 2)) for curve in memory.footprint(recipe, "stacked")))


def test_predictions_follow_what_was_measured() -> None:
    own, _ = recipe()
    key = perf_cache.digest(own)
    cold = {rows: predict_bytes(own, rows) for rows in (2, 8, 32)}
    assert cold[2] < cold[8] < cold[32]
    perf_cache.note(key, tier="stacked", rows=8, bytes=2 * cold[8])
    assert predict_bytes(own, 32) == pytest.approx(2 * cold[32], rel=0.01), "one point: its ratio"
    perf_cache.note(key, tier="stacked", rows=2, bytes=cold[2] + 1000)
    perf_cache.note(key, tier="stacked", rows=8, bytes=cold[8])
    assert predict_bytes(own, 8) == 2 * cold[8], "the high-water mark stays"
    assert predict_bytes(own, 2) == cold[2] + 1000
    assert predict_bytes(own, 5) == pytest.approx((cold[2] + 1000 + 2 * cold[8]) / 2, rel=0.01), "between them"
    assert predict_bytes(own, 32) == pytest.approx(cold[32] + cold[8], rel=0.01), "and beyond"


def test_what_was_seen_of_a_large_pack_is_what_is_said_of_it() -> None:
    state, working = Curve.line(0.0, 10.0), Curve(((1, 6.0), (8, 13.0), (64, 69.0)))
    found = memory.corrected(state, working, Curve(((2, 100.0), (8, 120.0))))
    assert state.at(8) + found.at(8) == pytest.approx(120.0)
    assert memory.corrected(state, working, Curve(((0, 5.0),))) is working


def test_two_points_carry_what_is_fixed() -> None:
    state, working = Curve.line(0.0, 10.0), Curve.line(0.0, 5.0)
    found = memory.corrected(state, working, Curve(((4, 4 * 15 + 700.0), (8, 8 * 15 + 700.0))))
    assert state.at(32) + found.at(32) == pytest.approx(32 * 15 + 700)


def planned(members: list[Member], **settings: Any) -> Plan:
    return PlanningContext(members, timed=False, thorough=True, **settings).propose(members)


def test_the_plan_stays_within_a_budget_and_tiers_are_remembered() -> None:
    jobs = [
        shoal.Job(model=network, data=(X, Y), loss=F.cross_entropy, batch_size=16, steps=2, hparams={"lr": 0.1}, seed=i)
        for i in range(9)
    ]
    members = prepare(jobs, torch.device("cpu"))
    own = TraceCache().recipe(members[0])
    for rows in (2, 3, 7):  # as many as fit, and not one more
        need = memory.data_bytes(members) + predict_bytes(own, rows)
        made = planned(members, budget=need + 1)
        assert [part.members for part in made.parts] == [list(range(rows))] and made.memory_bytes <= need + 1
        assert [w.index for w in made.waiting] == list(range(rows, 9))
        fewer = planned(members, budget=need - 2)
        assert sum(len(part.members) for part in fewer.parts) == (rows - 1 if rows > 2 else 0)
    again = planned(members, tiers={0: "serial", 1: "serial", 2: "stacked"})
    tiers = {index: part.tier for part in again.parts for index in part.members}
    assert tiers == {0: "serial", 1: "serial"} | dict.fromkeys(range(2, 9), "stacked")
    assert "serial as in the run before" in again.parts[0].reason and len(again.parts) == 3


def test_what_a_waiting_job_should_take() -> None:
    own, _ = recipe()
    member = own.member
    ticket = PlanningContext([member], timed=False, thorough=True).ticket(member, 0.0)
    assert ticket.seconds != ticket.seconds and ticket.bytes == predict_bytes(own, 1)
    perf_cache.note(perf_cache.digest(own), tier="stacked", rows=1, seconds=0.1)
    ticket = PlanningContext([member], timed=False).ticket(member, 0.0)
    assert ticket.seconds == pytest.approx(0.4, rel=1.1), "four steps"


def test_the_budget(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    assert memory.memory_budget(cpu, 123) == 123
    assert 0 < memory.memory_budget(cpu) < memory.free_bytes(cpu) * 1.1
    monkeypatch.setattr(memory, "_available", lambda: 1000)
    monkeypatch.setattr(memory, "_cgroup_free", lambda: 500)
    assert memory.memory_budget(cpu) == 450


def test_the_limit_of_a_container(tmp_path: Path) -> None:
    assert memory._cgroup_free(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    assert memory._cgroup_free(tmp_path) == 300000
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 200000\n")
    assert memory._cgroup_free(tmp_path) == 500000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._cgroup_free(tmp_path) is None
