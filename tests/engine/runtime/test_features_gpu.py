"""Averages, DataLoaders, frozen weights, searches, clones and test sets on a GPU, against the reference loop there."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests import test_clone_changes as clones
from tests import test_evaluation as evaluation
from tests.data import test_loader as loaders
from tests.engine.equality import assert_as_alone, assert_close, distance, numbers, train, whole
from tests.engine.loop import run
from tests.engine.runtime import test_elastic_gpu as elastic
from tests.engine.tiers import test_averages as averages
from tests.engine.tiers import test_frozen as frozen
from tests.engine.tiers import test_settings as cases
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.engine.planning.policy import RoundRobin
from shoal.engine.proof.group import group
from shoal.engine.recipes.recipe import TraceCache
from shoal.engine.stack.stack import Stack
from shoal.engine.tiers.captured.executor import CapturedExecutor
from shoal.engine.tiers.captured.unit import CapturedUnit
from shoal.preparation.checks import prepare
from shoal.reference import solo

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
GPU = torch.device("cuda", 0)
BASES = pytest.mark.parametrize(
    ("model", "x"),
    [(frozen.Backbone, frozen.IMAGES), (frozen.Adapted, frozen.TOKENS), (frozen.Masked, frozen.TOKENS)],
)


# --- averages -----------------------------------------------------------------------------------------------------


def test_averages_of_their_own_in_one_stack() -> None:
    jobs = [averages.job(seed, average) for seed, average in enumerate(averages.AVERAGES)]
    results = train(jobs, "cuda", False)
    assert {result.tier for result in results} == {"stacked"}
    assert results.plan is not None and "it averages its weights" in results.plan.parts[0].reason
    for result, one in zip(results, jobs, strict=True):
        averages.assert_both_weights(result, solo(one, "cuda"))


@pytest.mark.parametrize("setting", averages.SETTINGS)
def test_averages_with_other_settings(setting: str) -> None:
    rules = [shoal.EMA(decay=0.8), shoal.EMA(decay=0.5, every=2), shoal.SWA(every=1)]
    jobs = [averages.job(seed, rule, **averages.SETTINGS[setting]) for seed, rule in enumerate(rules)]
    for result, one in zip(train(jobs, "cuda", False), jobs, strict=True):
        averages.assert_both_weights(result, solo(one, "cuda"))


@pytest.mark.parametrize("model", [averages.net, averages.Branch])
def test_averaged_buffers(model: Callable[[], nn.Module]) -> None:
    rules = [shoal.EMA(decay=0.7, use_buffers=True), shoal.SWA(use_buffers=True)]
    jobs = [averages.job(seed, rule, model=model) for seed, rule in enumerate(rules)]
    results = train(jobs, "cuda", False)
    assert {result.tier for result in results} == {"serial" if model is averages.Branch else "stacked"}
    for result, one in zip(results, jobs, strict=True):
        averages.assert_both_weights(result, solo(one, "cuda"))


def test_averages_of_members_that_come_and_go() -> None:
    jobs = [elastic.job(i, epochs=3, average=shoal.EMA(decay=0.9, every=1 + i % 2)) for i in range(5)]
    for member in elastic.run_jobs(jobs, 2, RoundRobin(slice_seconds=5e-3)):
        elastic.assert_as_solo(member)


# --- DataLoaders --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("pinned", [False, True])
def test_stacked_jobs_read_a_dataloader(workers: int, pinned: bool) -> None:
    """The last batch of an epoch is shorter than the others, so that its step is learned on the way."""
    loader = DataLoader(loaders.Noisy(), batch_size=8, shuffle=True, num_workers=workers, pin_memory=pinned)
    val = DataLoader(loaders.Noisy(20), batch_size=6, shuffle=True, pin_memory=pinned)
    results = shoal.train(loaders.jobs(loader, val=val), device="cuda", compile=False)
    assert [result.tier for result in results] == ["stacked"] * 3
    for result in results:
        assert_close(result, solo(result.job, "cuda"))


def test_serial_jobs_read_a_dataloader() -> None:
    def step(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        x.add_(float(x.sum().item() > 0))  # no trace can follow it, and it writes to its batch
        return F.cross_entropy(model(x), y)

    loader = DataLoader(loaders.Noisy(), batch_size=8, shuffle=True, pin_memory=True)
    results = shoal.train(loaders.jobs(loader, loss=None, step=step), device="cuda", compile=False)
    assert [result.tier for result in results] == ["serial"] * 3
    for result in results:
        assert_close(result, solo(result.job, "cuda"))


# --- weights that members share -----------------------------------------------------------------------------------


@BASES
@pytest.mark.parametrize("data_seed", [None, 5])
def test_members_over_one_base_are_as_alone(model: Callable[[], nn.Module], x: Tensor, data_seed: int | None) -> None:
    listed = frozen.jobs(lambda _: model(), x, data_seed=data_seed, keep="best", metrics={"hits": frozen._accuracy})
    assert_as_alone(listed, tier=None, device="cuda", compile=False)


@BASES
@pytest.mark.parametrize(("data_seed", "compiled"), [(None, False), (5, False), (5, True)])
def test_captured_stacks_over_one_base(
    model: Callable[[], nn.Module], x: Tensor, data_seed: int | None, compiled: bool
) -> None:
    listed, trace_cache = frozen.jobs(lambda _: model(), x, data_seed=data_seed), TraceCache(share=True)
    members = prepare(listed, GPU)
    (alike,) = group(members, trace_cache)
    assert alike.recipes[0].shared
    unit = CapturedUnit(alike.recipes, trace_cache, {}, chunk=4, compiled=compiled)
    run([unit], CapturedExecutor())
    assert compiled or all(chunk.step(8).fused is not None for chunk in unit.chunks)
    for member, own in zip(members, listed, strict=True):
        alone = solo(own, "cuda").model.state_dict()
        for name, value in member.model.state_dict().items():
            assert distance(value, alone[name]) < 1e-9, name


class Wide(nn.Module):
    """A large frozen layer and a small head."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.base = nn.Linear(2048, 2048).requires_grad_(False)
        self.head = nn.Linear(2048, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.base(x)))
        return out


def test_a_frozen_base_is_on_the_device_once() -> None:
    data = (numbers(1, 24, 2048, dtype=torch.float32), whole(2, 3, 24))
    jobs = [
        shoal.Job(model=Wide, data=data, loss=F.cross_entropy, batch_size=8, epochs=1, seed=seed) for seed in range(8)
    ]
    (alike,) = group(prepare(jobs, GPU), TraceCache(share=True))
    base = 2048 * 2048 * 4
    gc.collect()
    before = torch.cuda.memory_allocated()
    stack = Stack(alike.recipes, size=8)
    assert base <= torch.cuda.memory_allocated() - before < 1.5 * base
    assert all(tensor.is_cuda for tensor in stack.state)


# --- searches and clones ------------------------------------------------------------------------------------------


def make_job(params: dict[str, Any], **more: Any) -> shoal.Job:
    return shoal.Job(
        model=elastic.net, data=(elastic.X, elastic.Y), val=(elastic.X[:20], elastic.Y[:20]), loss=F.cross_entropy,
        optimizer=torch.optim.SGD, hparams={"lr": params["lr"]}, batch_size=16, seed=3, **more,
    )  # fmt: skip


def test_scores_of_a_search_are_those_of_training_alone() -> None:
    """Batch norm and dropout, and trials that pause, leave and come back."""
    study = shoal.tune(make_job, {"lr": ("log", 1e-3, 0.1)}, max_epochs=9, device="cuda", compile=False)
    assert len(study.trials) > 9 and all(trial.ended for trial in study.trials)
    for trial in study.trials:
        alone = solo(make_job(trial.params, epochs=trial.epochs), "cuda")
        values = {int(row["epoch"]): row["val_loss"] for row in alone.history}
        assert trial.values == pytest.approx(values, rel=1e-7), trial.name


def test_a_population() -> None:
    study = shoal.tune(
        make_job, {"lr": ("log", 1e-3, 0.1)}, max_epochs=6, device="cuda", compile=False, num_trials=6,
        scheduler=shoal.tune.PBT(interval=2),
    )  # fmt: skip
    assert [trial.state for trial in study.trials] == ["complete"] * 6
    assert any(trial.attrs.get("mutations") for trial in study.trials)
    assert all(len(result.history) == 6 for result in study.results)


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


class Branching(nn.Module):
    """Python looks at a value: it trains alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = plain()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out if float(out.detach().sum()) > -1e9 else out * 2


@pytest.mark.parametrize("model", [plain, Branching])
@pytest.mark.parametrize("steps", [3, 10])
def test_clones_with_changes_equal_a_plain_loop(steps: int, model: Callable[[], nn.Module]) -> None:
    """Other batches for the rest of an epoch, other orders, optimizers and schedules. Nothing is drawn at random, since
    the loop is a CPU's."""
    source = clones.job(model=model)
    listed = [("a", kind, change) for kind, change in clones.CHANGES.items()]
    results = clones.cloned(source, steps, *listed, device="cuda", compile=False)
    for kind, change in clones.CHANGES.items():
        clones.agree(results[kind], clones.by_hand(source, steps, change))
    clones.agree(results["a"], clones.by_hand(source, 0))


# --- logs, clipping, test sets ------------------------------------------------------------------------------------


def test_logs_that_a_batch_does_not_have() -> None:
    def step(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Any]]:
        x, y = batch
        loss = F.cross_entropy(model(x), y)
        return loss, {"full": loss.detach()} if len(x) == 8 else {"rest": loss.detach(), "rows": len(x)}

    jobs = [cases.job(seed, loss=None, step=step) for seed in range(3)]
    results = assert_as_alone(jobs, tier=None, device="cuda", compile=False)
    assert {result.tier for result in results} == {"stacked"}


def test_gradients_clipped_by_value_and_by_norm() -> None:
    limits: list[dict[str, Any]] = [{"clip_value": 0.05}, {"clip_value": 0.2}, {"clip_norm": 0.3}, {}]
    assert_as_alone(
        [cases.job(seed, **limit) for seed, limit in enumerate(limits)], tier=None, device="cuda", compile=False
    )


def test_test_sets_and_ensembles() -> None:
    jobs = [evaluation.job(seed=seed, name=f"{seed}") for seed in range(4)]
    jobs += [evaluation.job(name="branch", model=evaluation.Branch)]
    jobs += [evaluation.job(name="step", loss=None, step=evaluation.step)]
    results = shoal.train(jobs, device="cuda", compile=False)
    scores = results.evaluate(evaluation.TEST, batch_size=10)  # where they were trained
    for result in results:
        assert scores[result.name] == pytest.approx(evaluation.by_hand(result, 10), rel=1e-9)
        assert next(result.model.parameters()).device.type == "cpu"
    some, x = results[:5], evaluation.TEST[0]
    with torch.no_grad():
        expected = torch.stack([result.model(x) for result in some])
    for given in (x, x.cuda()):
        for size in (None, 10):
            outputs = some.predict(given, batch_size=size)
            assert outputs.device.type == given.device.type and distance(outputs, expected) < 1e-9
    loader = DataLoader(TensorDataset(*evaluation.TEST), batch_size=10, pin_memory=True)
    assert distance(some.predict(loader), expected) < 1e-9
    assert distance(some.ensemble(x).mean, expected.mean(0)) < 1e-9
    assert results.evaluate(loader)["0"] == pytest.approx(scores["0"], rel=1e-9)


GUARDED = """
import torch, torch.nn.functional as F, shoal
from tests.engine.members.test_evaluation_weights import Halving
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
x, y = torch.randn(64, 8), torch.randint(4, (64,))
loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True, pin_memory=True)
class Asks(nn.ReLU):
    def forward(self, x):
        assert not torch.cuda.is_current_stream_capturing()  # transformers asks this in every forward pass
        return super().forward(x)

net = lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
asks = lambda: nn.Sequential(nn.Linear(8, 16), Asks(), nn.Linear(16, 4))
common = dict(model=net, loss=F.cross_entropy, epochs=2)
jobs = [shoal.Job(data=loader, seed=i, name=f"loader {i}", **common) for i in range(3)]
jobs += [shoal.Job(data=(x, y), seed=i, optimizer=Halving, hparams={"lr": 0.1, "momentum": 0.9}, name=f"modes {i}",
                   batch_size=16, **common) for i in range(2)]
jobs += [shoal.Job(data=(x, y), seed=i, name=f"asks {i}", batch_size=16, **common | dict(model=asks)) for i in range(2)]
results = shoal.train(jobs, device="cuda", compile=False)
assert [r.status for r in results] == ["done"] * 7, [r.error for r in results]
assert all(r.training_weights for r in results[3:5])
assert not torch.cuda.is_initialized(), "the run had no process of its own, or sent tensors of the GPU"
"""


def test_a_run_in_its_own_process_leaves_the_gpu_alone_here(tmp_path: Path) -> None:
    script = tmp_path / "guarded.py"
    script.write_text(textwrap.dedent(GUARDED))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
