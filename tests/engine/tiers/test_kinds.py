"""Members with different optimizers in one stack: each is what it is alone, whoever joins, leaves or ends beside it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.engine.equality import assert_close, assert_same_bits, numbers, planned, train, whole
from tests.engine.runtime.test_elastic import Seats, assert_same
from torch import Tensor, nn, optim
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, ReduceLROnPlateau

import shoal
from shoal.engine.members.member import Member
from shoal.engine.planning import perf_cache
from shoal.engine.planning.planner import Curve, Plan, Request, plan, stack_bytes, total_bytes
from shoal.engine.planning.policy import Policy, Ticket
from shoal.engine.proof.group import group
from shoal.engine.recipes.recipe import Recipe, TraceCache
from shoal.engine.runtime.planning_context import PlanningContext
from shoal.engine.runtime.run import Run
from shoal.engine.runtime.unit_runner import UnitRunner
from shoal.engine.tiers.stacked.unit import StackedUnit
from shoal.engine.units import trials
from shoal.engine.units.trials import TrialResult
from shoal.preparation.checks import prepare
from shoal.reference import solo
from shoal.reporting.events import Event

CPU = torch.device("cpu")
N, D, C = 45, 6, 3
X, Y = numbers(1, N, D), whole(2, C, N)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Halves(optim.SGD):
    """A user's own class: no rule knows what it does."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for own in self.param_groups:
            for p in own["params"]:
                if p.grad is not None:
                    seen = self.state[p].setdefault("seen", torch.zeros_like(p))
                    seen.mul_(0.5).add_(p.grad)
                    p.sub_(own["lr"] * seen)


def net(width: int = 8, dtype: torch.dtype = torch.float64) -> nn.Module:
    body = [nn.Linear(D, width, bias=False), nn.BatchNorm1d(width), nn.Tanh(), nn.Dropout(0.2), nn.Linear(width, C)]
    return nn.Sequential(*body).to(dtype)


def groups(model: Any) -> list[dict[str, Any]]:
    return [{"params": model[4].parameters(), "lr": 0.001}, {"params": [model[0].weight]}]


def decay(o: optim.Optimizer) -> Any:
    return CosineAnnealingLR(o, 40)


ADAM, SGD, RMS = {"optimizer": optim.Adam}, {"optimizer": optim.SGD}, {"optimizer": optim.RMSprop}
CHANGES: list[dict[str, Any]] = [
    {**ADAM, "clip_norm": 0.5},
    {**SGD, "hparams": {"lr": 0.1}, "schedule": decay},
    {"optimizer": Halves, "hparams": {"lr": 0.05}, "schedule": lambda t: 0.97**t, "clip_norm": 0.2},
    {"optimizer": optim.AdamW, "hparams": {"lr": 0.02, "weight_decay": 0.1}},
    {**SGD, "hparams": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}, "clip_norm": 1.0},
    {**RMS, "schedule": lambda t: 0.8**t, "schedule_every": "epoch"},
    {**ADAM, "hparams": {"lr": 0.03}, "schedule": lambda o: OneCycleLR(o, 0.05, total_steps=60), "epochs": 2},
    {"optimizer": Halves, "hparams": {"lr": 0.02}, "epochs": 7},
    {**RMS, "hparams": {"lr": 0.002, "momentum": 0.5}, "clip_norm": 0.1, "epochs": None, "steps": 11},
    {**ADAM, "params": groups, "epochs": 3},
    {"optimizer": optim.AdamW, "schedule": lambda o: ReduceLROnPlateau(o, patience=0), "schedule_every": "epoch"},
    {"optimizer": optim.Adagrad, "hparams": {"lr": 0.1, "initial_accumulator_value": 0.5}, "epochs": 4},
]
KINDS = 7
"""Adam, the same with its own groups, AdamW, SGD, RMSprop, Adagrad, and all classes without a rule."""


def job(i: int, **changes: Any) -> shoal.Job:
    settings: dict[str, Any] = {
        "model": net, "data": (X, Y), "val": (X[:9], Y[:9]), "loss": F.cross_entropy, "hparams": {"lr": 0.01},
        "batch_size": 8, "epochs": 5, "seed": i, "name": f"{i}",
    }  # fmt: skip
    return shoal.Job(**(settings | changes))


def mixed(**more: Any) -> list[shoal.Job]:
    return [job(i, **(changes | more)) for i, changes in enumerate(CHANGES)]


def single() -> list[shoal.Job]:
    """In float32, where rounding shows."""
    return mixed(model=lambda: net(7, torch.float32), data=(X.float(), Y), val=(X[:9].float(), Y[:9]))


def test_all_of_them_are_one_unit_and_equal_the_reference_loop() -> None:
    jobs = mixed()
    members = prepare(jobs, CPU)
    ((unit, _),) = PlanningContext(members).units(members)
    assert isinstance(unit, StackedUnit) and len(unit.members) == len(jobs)
    assert len(unit.stack.optimizer.parts) == KINDS
    for ours, own in zip(train(jobs), jobs, strict=True):
        assert ours.tier == "stacked"
        assert_close(ours, solo(own))


@pytest.mark.parametrize("half", [False, True], ids=["float32", "fp16"])
def test_each_has_the_bits_it_has_alone(half: bool) -> None:
    jobs = single()
    if half:
        jobs = [shoal.Job(**{**_fields(own), "precision": "fp16"}) for own in jobs]
    together = train(jobs)
    for ours, own in zip(together, jobs, strict=True):
        assert_same_bits(ours, train([own])[0])
    backwards = train(jobs[::-1])
    for ours, theirs in zip(together, list(backwards)[::-1], strict=True):
        assert_same_bits(ours, theirs)


def _fields(own: shoal.Job) -> dict[str, Any]:
    return {name: getattr(own, name) for name in own.__dataclass_fields__}


def test_networks_large_enough_for_the_fused_kernel() -> None:
    more = {"model": lambda: net(4096, torch.float32), "data": (X.float(), Y), "val": None, "epochs": None, "steps": 4}
    jobs = [job(i, **(CHANGES[i] | more)) for i in (0, 1, 3, 6, 10, 4)]
    members = prepare(jobs, CPU)
    ((unit, _),) = PlanningContext(members, timed=False).units(members)
    assert isinstance(unit, StackedUnit)
    assert any(any(getattr(part, "_fused", [])) for part in unit.stack.optimizer.parts)
    for ours, own in zip(train(jobs), jobs, strict=True):
        assert_same_bits(ours, train([own])[0])


def test_one_that_diverges_and_one_that_fails_beside_others() -> None:
    def raises(out: Tensor, target: Tensor) -> Tensor:
        if len(out) == 5:
            raise ValueError("five rows")
        return F.cross_entropy(out, target)

    jobs = single()
    jobs[1:1] = [
        job(20, **SGD, hparams={"lr": 1e38}, model=lambda: net(7, torch.float32), data=(X.float(), Y), val=None)
    ]
    jobs.insert(3, shoal.Job(**{**_fields(jobs[0]), "loss": raises, "name": "raises"}))
    results = train(jobs)
    assert [results[1].status, results[3].status] == ["diverged", "failed"]
    for ours, own in zip(results, jobs, strict=True):
        assert_same_bits(ours, train([own])[0])


# --- joining and leaving ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Whim(Policy):
    """Anybody may go before anybody."""

    slice_seconds: float | None = 1e-6
    seed: int = 0

    def order(self, tickets: Sequence[Ticket], now: float) -> list[Ticket]:
        return random.Random(f"{self.seed} {now}").sample(list(tickets), len(tickets))


def ridden(jobs: Sequence[shoal.Job], seats: float, policy: Policy | None = None) -> tuple[list[Member], list[Event]]:
    """A batch a turn, so that members come and go at every one of them."""
    members, told, runners = prepare(jobs, CPU), list[Event](), list[int]()
    planning = Seats(members, timed=False)
    planning.budget = seats
    run = Run(members, planning, policy=policy, notify=told.append, between=lambda: runners.append(len(run.runners)))
    real = UnitRunner.next_batches
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(UnitRunner, "next_batches", lambda runner, seconds: real(runner, 1e-9))
        run.go()
    assert max(runners) == 1, "they are one stack all the time"
    return members, told


@pytest.fixture(scope="module")
def alone() -> list[Member]:
    torch.set_num_threads(1)
    return [ridden([own], 1)[0][0] for own in single()]


@pytest.mark.parametrize("seed", range(3))
def test_they_come_and_go_in_any_order(seed: int, alone: list[Member]) -> None:
    members, told = ridden(single(), 5, Whim(seed=seed))
    for ours, theirs in zip(members, alone, strict=True):
        assert_same(ours, theirs)
    assert sum(event.kind == "preempt" for event in told) > 10


def test_a_queue_behind_few_seats(alone: list[Member]) -> None:
    members, _ = ridden(single()[::-1], 4)
    for ours, theirs in zip(members[::-1], alone, strict=True):
        assert_same(ours, theirs)


def test_the_users_own_loop_gives_losses_in_the_order_of_ids() -> None:
    kinds = [optim.SGD, optim.Adam, Halves, optim.SGD, optim.RMSprop, optim.Adam]
    models = [net() for _ in kinds]
    hparams = [{"lr": 0.01 * (i + 1)} for i in range(len(kinds))]
    pack = shoal.Pack(models, optimizer=kinds, hparams=hparams, loss=F.cross_entropy, seeds=range(len(kinds)))
    solos = [
        shoal.Pack([m], optimizer=k, hparams=h, loss=F.cross_entropy, seeds=[i])
        for i, (m, k, h) in enumerate(zip(models, kinds, hparams, strict=True))
    ]
    for start in range(0, 32, 8):
        batch = X[start : start + 8], Y[start : start + 8]
        losses = pack.step(*batch)
        assert losses.tolist() == [float(own.step(*batch)) for own in solos]
        assert torch.equal(pack.eval(X), torch.cat([own.eval(X) for own in solos]))
        if start == 8:
            late = net()
            assert pack.add(late, optimizer=optim.Adam, hparams={"lr": 0.1}, seed=9) == 6
            solos.append(shoal.Pack([late], optimizer=optim.Adam, hparams={"lr": 0.1}, loss=F.cross_entropy, seeds=[9]))
    assert len(pack._units) == 1


# --- what keeps members apart, and what they cost ---------------------------------------------------------------------


APART: dict[str, dict[str, Any]] = {
    "accumulate": {"accumulate": 2},
    "precision": {"precision": "bf16"},
    "batch_size": {"batch_size": 9},
    "rows an epoch": {"data": (X[:40], Y[:40])},
    "frozen": {"model": lambda: _frozen()},
}


def _frozen() -> nn.Module:
    model = net()
    model[0].weight.requires_grad_(False)
    return model


@pytest.mark.parametrize("name", APART)
def test_what_keeps_members_apart(name: str) -> None:
    jobs = [job(0, **ADAM), job(1, **SGD), job(2, **RMS, **APART[name]), job(3, optimizer=Halves)]
    one, other = planned(jobs).parts
    assert (one.members, other.members) == ([0, 1, 3], [2])
    assert name in one.reason and ("against" in one.reason or name == "frozen")


def recipes(jobs: Sequence[shoal.Job]) -> list[Recipe]:
    (found,) = group(prepare(jobs, CPU), TraceCache())
    return found.recipes


def test_what_is_learned_is_learned_of_the_job_with_its_optimizer() -> None:
    own = recipes([job(0, **ADAM), job(1, **SGD), job(2, **ADAM, hparams={"lr": 0.3})])
    assert len({perf_cache.computation(recipe) for recipe in own}) == 1
    adam, sgd, again = map(perf_cache.digest, own)
    assert adam == again != sgd


def tiers(plan: Plan) -> dict[int, str]:
    return {index: part.tier for part in plan.parts for index in part.members}


def test_the_tier_is_that_of_the_job_whatever_its_companions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))
    monkeypatch.setattr(trials, "_trial_results", {})

    def trial(recipe: Recipe, *_: object) -> TrialResult:
        return TrialResult(1e-3, 1e-3, 0.5 if recipe.optimizer.kind is optim.SGD else 2.0)

    monkeypatch.setattr(trials, "trial", trial)
    long = {"epochs": None, "steps": trials.FEW_STEPS}
    jobs = [job(0, **SGD, **long), job(1, **ADAM, **long), job(2, **SGD, **long), job(3, **RMS, **long), job(4, **SGD)]
    made = planned(jobs)
    assert tiers(made) == {0: "serial", 1: "stacked", 2: "serial", 3: "stacked", 4: "stacked"}
    assert [part.members for part in made.parts if part.tier == "stacked"] == [[1, 3, 4]]
    assert [tiers(planned([own]))[0] for own in jobs] == list(dict(sorted(tiers(made).items())).values())


def request(index: int, kind: str, state: float, working: float, **more: Any) -> Request:
    curves = {"state": Curve.line(0.0, state), "working": Curve.line(0.0, working)}
    return Request(index=index, name=f"{index}", key="net", kind=kind, steps=10, **(curves | more))


def test_a_part_of_several_kinds_costs_what_each_of_them_costs() -> None:
    adam = [request(i, "adam", 30, 5, alone=3.0, seconds=Curve.line(1.0, 0.4)) for i in range(3)]
    sgd = [request(i, "sgd", 10, 7, alone=1.0, seconds=Curve.line(1.0, 0.2)) for i in range(3, 6)]
    assert stack_bytes([*adam, *sgd]) == (3 * 30 + 3 * 10, 6 * 7)
    assert stack_bytes([*adam, sgd[0]]) == (3 * 30 + 10, 4 * 7)
    (part,) = plan([*adam, *sgd])
    assert part.predicted["state_bytes"] == 120 and part.predicted["memory_bytes"] == 162
    assert part.predicted["step_seconds"] == pytest.approx(1.0 + 6 * 0.3)
    assert part.predicted["alone_seconds"] == pytest.approx(12.0)
    assert total_bytes([stack_bytes([*adam, *sgd[:2]])], together=False) == 3 * 30 + 2 * 10 + 5 * 7
