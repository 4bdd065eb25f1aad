"""Trials: what they decide, what they remember, and that they disturb nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.engine.members.member import Member
from shoal.engine.planning import perf_cache
from shoal.engine.planning.planner import Plan
from shoal.engine.recipes.recipe import Recipe, TraceCache
from shoal.engine.rules import _product
from shoal.engine.runtime.planning_context import PlanningContext
from shoal.engine.units import trials
from shoal.engine.units.trials import TrialResult
from shoal.preparation.checks import prepare


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))
    monkeypatch.setattr(trials, "_trial_results", {})


def members(count: int = 3, steps: int = trials.FEW_STEPS) -> list[Member]:
    g = torch.Generator().manual_seed(3)
    x, y = torch.randn(64, 8, generator=g), torch.randint(4, (64,), generator=g)
    made = [
        shoal.Job(
            model=lambda: nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 4)),
            data=(x, y),
            loss=F.cross_entropy,
            optimizer=torch.optim.SGD,
            hparams={"lr": 0.1},
            batch_size=16,
            steps=steps,
            seed=i,
            name=f"job {i}",
        )
        for i in range(count)
    ]
    return prepare(made, torch.device("cpu"))


def recipe(member: Member) -> tuple[Recipe, TraceCache]:
    trace_cache = TraceCache()
    return trace_cache.recipe(member), trace_cache


def planned(chosen: list[Member], **settings: Any) -> Plan:
    return PlanningContext(chosen, **settings).propose(chosen)


def test_a_trial_disturbs_nothing() -> None:
    (member,) = members(1)
    weights = [p.detach().clone() for p in member.model.parameters()]
    states = [g.get_state() for g in (member.rng, member.orders)]
    before = torch.get_rng_state()
    found = trials.trial(*recipe(member))
    assert found.ratio > 0 and found.stacked > 0 and found.solo > 0
    assert all(torch.equal(a, b) for a, b in zip(weights, member.model.parameters(), strict=True))
    assert all(torch.equal(a, g.get_state()) for a, g in zip(states, (member.rng, member.orders), strict=True))
    assert torch.equal(before, torch.get_rng_state()) and member.batches == 0 and not member.history


def test_a_wrong_rule_is_seen_and_the_job_is_not_stacked(monkeypatch: pytest.MonkeyPatch) -> None:
    right = _product.product
    monkeypatch.setattr(_product, "product", lambda a, b, bias=None: 1.1 * right(a, b, bias))
    made = planned(members())
    assert [part.tier for part in made.parts] == ["serial"] * 3
    assert "its own step does something else: the loss differs" in made.parts[0].reason


def test_a_result_is_remembered_in_the_process_and_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = TrialResult(stacked=2.0, solo=1.0, ratio=0.5)
    calls: list[int] = []

    def trial(recipe: Recipe, trace_cache: TraceCache) -> TrialResult:
        calls.append(1)
        return slow

    monkeypatch.setattr(trials, "trial", trial)
    for _ in range(2):
        made = planned(members())
        assert {part.tier for part in made.parts} == {"serial"} and "0.50 times" in made.parts[0].reason
        assert made.parts[0].predicted["step_seconds"] == 1.0
    monkeypatch.setattr(trials, "_trial_results", {})  # as in another process
    planned(members())
    assert len(calls) == 1
    perf_cache.cache_file().write_text('{"damaged')
    monkeypatch.setattr(trials, "_trial_results", {})
    planned(members())
    assert len(calls) == 2 and trials._stored_result(trials.digest(recipe(members(1)[0])[0])) == slow


@pytest.mark.parametrize("fast", [True, False])
def test_the_tier_depends_on_the_job_alone(monkeypatch: pytest.MonkeyPatch, fast: bool) -> None:
    monkeypatch.setattr(trials, "trial", lambda *_: TrialResult(1e-3, 1e-3, 1.0 if fast else 0.9))
    short, long = members(2, steps=trials.FEW_STEPS - 1), members(2)
    long[0].index, long[1].index = 2, 3
    for chosen in (short, long, short + long, long[1:] + short[:1], long[:1], short[:1]):
        made = planned(list(chosen))
        tiers = {index: part.tier for part in made.parts for index in part.members}
        for index, tier in tiers.items():
            assert tier == ("stacked" if fast or index < 2 else "serial")


@pytest.mark.parametrize(("ratio", "tiers"), [(1.2, ["stacked", "stacked"]), (1.0, ["serial"] * 6)])
def test_large_networks_must_gain_and_are_stacked_in_the_rows_that_were_tried(
    monkeypatch: pytest.MonkeyPatch, ratio: float, tiers: list[str]
) -> None:
    monkeypatch.setattr(trials, "trial", lambda *_: TrialResult(1.0, 1.0, ratio))
    made = planned(members(6))
    assert [part.tier for part in made.parts] == tiers
    assert max(len(part.members) for part in made.parts) <= trials.LARGE_ROWS


def test_times_are_predicted_on_a_line_through_two_stacks() -> None:
    found = TrialResult(stacked=1e-4, solo=1e-3, ratio=10.0, pair=5e-4)
    assert found.curve.at(2) == 5e-4 and found.curve.at(8) == pytest.approx(8e-4)
    assert found.curve.at(64) == pytest.approx(3.6e-3), "not 64 times the time of one row among eight"
    assert TrialResult(1e-4, 1e-3, 10.0).curve.at(16) == pytest.approx(1.6e-3)


def test_a_packs_own_size_is_tried_where_it_is_far_and_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    own, trace_cache = recipe(members(1)[0])
    tried: list[int] = []

    def step_seconds(recipe: Recipe, trace_cache: TraceCache, rows: int) -> float:
        tried.append(rows)
        return 7e-3

    monkeypatch.setattr(trials, "step_seconds", step_seconds)
    small = TrialResult(stacked=1e-4, solo=1e-3, ratio=10.0, pair=5e-4)
    for rows in (4, 12, 40, 40, 60):
        trials.refine(own, trace_cache, rows, small)
    assert tried == [40], "once, and not for packs near one that is known"
    curve = trials.seconds_curve(own, small)
    assert curve is not None and curve.at(40) == 7e-3
    trials.refine(own, trace_cache, 64, TrialResult(stacked=1e-2, solo=1e-2, ratio=1.2, pair=2e-2))
    assert tried == [40], "a step that takes long is not worth it"


def test_without_the_clock_no_trial_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def trial(*_: object) -> TrialResult:
        raise AssertionError("a trial")

    monkeypatch.setattr(trials, "trial_result", trial)
    made = planned(members(), timed=False)
    assert [part.tier for part in made.parts] == ["stacked"]


def test_a_product_has_the_same_bits_in_every_place() -> None:
    g = torch.Generator().manual_seed(0)
    for rows, inner, columns in ((17, 9, 3), (5, 13, 7), (22, 131, 10), (1, 50, 3), (32, 64, 10), (16, 16, 16)):
        a, b = torch.randn(9, rows, inner, generator=g), torch.randn(9, columns, inner, generator=g)
        whole = _product.product(a, b.mT)
        assert torch.allclose(whole, torch.bmm(a, b.mT), atol=1e-4)
        for start, end in ((0, 2), (3, 5), (1, 9), (7, 9)):
            own: Tensor = _product.product(a[start:end].clone(), b[start:end].clone().mT)
            assert torch.equal(own, whole[start:end])
