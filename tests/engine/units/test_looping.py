"""Jobs for which packing does not pay are looped, without a trace, and give what the plain loop gives."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoal
from shoal.engine.processes.sharing import movable, predicted_seconds, processes_for
from shoal.engine.proof import group
from shoal.engine.recipes.recipe import TraceCache
from shoal.engine.runtime.planning_context import PlanningContext
from shoal.engine.units import looping
from shoal.engine.units.looping import StepTiming, looped
from shoal.preparation.checks import prepare

CPU = torch.device("cpu")
X, Y = torch.randn(64, 6), torch.randint(3, (64,))


@pytest.fixture(autouse=True)
def decided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOAL_PACK")


def net(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 3))


def job(width: int = 8, **more: Any) -> shoal.Job:
    settings = {"loss": F.cross_entropy, "optimizer": torch.optim.Adam, "batch_size": 16, "epochs": 2, **more}
    settings["hparams"] = {"fused": False}  # torch's plain update, which has the reference's very bits
    return shoal.Job(model=lambda: net(width), data=(X, Y), **settings)


def same_as_solo(results: shoal.Results, jobs: list[shoal.Job]) -> None:
    for result, one in zip(results, jobs, strict=True):
        alone = shoal.solo(one)
        assert result.status == "done"
        assert [row["loss"] for row in result.history] == [row["loss"] for row in alone.history]
        for name, value in alone.model.state_dict().items():
            assert torch.equal(result.model.state_dict()[name], value)


def test_a_lone_job_and_jobs_of_unlike_shapes_are_looped_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TraceCache, "graph", lambda *_, **__: pytest.fail("it was traced"))
    widths, batch_sizes = [job(width) for width in (4, 8, 12)], [job(), job(batch_size=8)]
    differ = ": the most similar one differs in "
    for jobs, more in (
        ([job()], ""),
        (widths, differ + "weights (shapes, dtypes or which are frozen)"),
        (batch_sizes, differ + "batch_size"),
        ([*widths, job(4, batch_size=8)], differ + "batch_size"),
    ):
        results = shoal.train(jobs, device="cpu")
        assert [result.tier for result in results] == ["serial"] * len(jobs)
        assert results.plan is not None and results.plan.parts[-1].reason == "no other job is like it" + more
        same_as_solo(results, jobs)


def test_a_short_list_is_looped_and_a_long_one_packed() -> None:
    short = [job(seed=seed) for seed in range(3)]
    results = shoal.train(short, device="cpu")
    assert results.plan is not None and "longer to set up" in results.plan.parts[0].reason
    same_as_solo(results, short)
    long = prepare([job(seed=seed, epochs=100_000) for seed in range(16)], CPU)
    assert looped(long, {}) == {}
    assert looped([*long, *prepare([job(5)], CPU)], {}).keys() == {0}  # the one of another width


def test_long_lists_of_unlike_jobs_are_traced_to_be_shared_among_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looping.os, "cpu_count", lambda: 2)
    short, long = (prepare([job(w, epochs=n) for w in (4, 8, 12)], CPU) for n in (2, 100_000))
    assert looping.worth_sharing(long) and not looping.worth_sharing(long[:1])
    assert not looping.worth_sharing(short)
    planning = PlanningContext(long, may_loop=True, may_share=True)
    assert all(movable(member, planning) for member in long)
    assert {planning.request(member).tier for member in long} == {"serial"}
    monkeypatch.setattr(looping, "_time_step", lambda member: StepTiming(1.0, 0, 1e-6, False))
    slow = PlanningContext(long, may_loop=True, may_share=True)
    steps = sum(looping.num_steps(member) for member in long)
    assert predicted_seconds(slow, long) == pytest.approx(steps), "by what a step takes, not by the size of the network"
    alone = PlanningContext(long, may_loop=True)
    assert not any(movable(member, alone) for member in long) and processes_for(long, alone, None) == 1
    monkeypatch.setenv("SHOAL_WORKERS", "2")
    assert looping.worth_sharing(short)


def test_a_looped_job_is_traced_once_and_not_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looping.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(group, "prove_training", lambda *_, **__: pytest.fail("it was proven"))
    members = prepare([job(w, epochs=100_000, batch_size=24) for w in (4, 8, 12)], CPU)
    planning = PlanningContext(members, may_loop=True, may_share=True)
    assert [list(planning.recipes[m.index].steps) for m in members] == [[24]] * 3  # and not the last batch of 16


def test_steps_that_a_search_will_hardly_take_are_not_counted() -> None:
    (member,) = prepare([job(epochs=81)], CPU)
    whole = looping.expected_steps(member)
    assert whole == 81 * 4
    member.pause_at = 1
    assert looping.expected_steps(member) == round(4 * (1 + 4 * 2 / 3))  # 81 at 1 epoch, 27 at 3 ...: 297 / 81
    member.pause_at = 81
    assert looping.expected_steps(member) == whole


def test_what_explain_says_is_what_train_does() -> None:
    plan = shoal.explain([job(), job(5), job(seed=1)], device="cpu").plan
    assert {part.tier for part in plan.parts} == {"serial"}
    assert "no other job is like it" in sorted(part.reason for part in plan.parts)[-1]
    assert all(part.predicted["memory_bytes"] > 0 for part in plan.parts)


def test_a_deterministic_run_does_not_look_at_companions() -> None:
    assert shoal.train([job()], device="cpu", deterministic=True)[0].tier == "stacked"


def test_a_resumed_run_has_its_tiers_again() -> None:
    members = prepare([job(seed=seed) for seed in range(4)], CPU)
    assert looped(members, {0: "serial", 1: "stacked", 2: "stacked", 3: "stacked"}).keys() == {0}


def test_a_step_that_no_trace_can_record_is_looped_for_that_reason() -> None:
    def slope(model: nn.Module, batch: Any) -> torch.Tensor:
        x = batch[0].requires_grad_()
        return torch.autograd.grad(model(x).sum(), x, create_graph=True)[0].square().mean()

    members = prepare([job(loss=None, step=slope, seed=seed, epochs=100_000) for seed in range(8)], CPU)
    assert set(looped(members, {}).values()) == {"it uses torch.autograd.grad inside the step"}


def test_timing_a_step_leaves_nothing_behind() -> None:
    calls = []

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        calls.append(1)
        return F.cross_entropy(model(batch[0]), batch[1])

    members = prepare([job(loss=None, step=step, seed=seed, val=None, epochs=100) for seed in range(4)], CPU)
    before, state = torch.get_rng_state(), [m.rng.get_state() for m in members]
    weights = [p.detach().clone() for p in members[0].model.parameters()]
    assert set(looped(members, {})) == {0, 1, 2, 3}
    assert calls == []
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(m.rng.get_state(), a) for m, a in zip(members, state, strict=True))
    params = list(members[0].model.parameters())
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(weights, params, strict=True))


def test_few_steps_are_looped_without_timing_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looping, "_time_step", lambda member: pytest.fail("a step was timed"))
    assert set(looped(prepare([job(seed=seed) for seed in range(8)], CPU), {}).values()) == {looping.NO_GAIN}


@pytest.mark.parametrize("validated", [False, True])
def test_lists_that_are_not_timed_could_not_gain(validated: bool) -> None:
    undecided = 0
    for members, steps, nodes in itertools.product((2, 3, 8, 32, 1000), (1, 8, 40, 100, 1000), (1, 20, 3000)):
        gains = [
            StepTiming(seconds, nodes, 2e-6, reads=False).gain([steps] * members, validated)
            for seconds in (0.0, 1e-4, 1e-2, 10.0)
        ]
        if not looping.can_gain([steps] * members, validated):
            undecided += 1
            assert max(gains) <= 0
    assert 10 < undecided < 70


def test_a_step_that_raises_in_its_backward_pass_is_left_to_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looping, "_num_nodes", lambda loss: 1 / 0)
    assert looped(prepare([job(epochs=1000, seed=seed) for seed in range(8)], CPU), {}) == {}


@pytest.mark.parametrize(
    ("seconds", "nodes", "members", "steps", "packed"),
    [
        (0.6e-3, 16, 64, 128, True),  # small networks: nearly all of it is calling operators
        (0.6e-3, 16, 8, 64, False),  # half a second of plain work
        (40e-3, 161, 4, 32, False),  # transformers: nearly all of it is computing
        (0.3e-3, 6, 1000, 8, True),
    ],
)
def test_the_gain_of_a_stack(seconds: float, nodes: int, members: int, steps: int, packed: bool) -> None:
    assert (StepTiming(seconds, nodes, 2.4e-6, reads=False).gain([steps] * members) > 0) is packed
