"""Stacks that read a DataLoader and capture the steps of its batches, with a recorder that needs no device."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.engine.tiers.captured.test_captured_on_cpu import OnCpu
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.engine.tiers.captured import loader_unit
from shoal.engine.tiers.captured.loader_unit import LoaderUnit
from shoal.engine.tiers.stacked.unit import StackedUnit
from shoal.engine.units import build
from shoal.reference import solo

X = torch.randn(44, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = torch.arange(44) % 3


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> OnCpu:
    recorder = OnCpu()
    monkeypatch.setattr(loader_unit, "RECORDER", recorder)
    monkeypatch.setattr(build, "stacked_units", partial(build.stacked_units, unit_class=LoaderUnit))
    return recorder


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()


def logged(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    x, y = batch
    out = model(x)
    return F.cross_entropy(out, y), {"hits": (out.argmax(1) == y).double().mean()}


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "SGD": {"optimizer": torch.optim.SGD},
    "logs": {"loss": None, "step": logged},
    "a schedule of steps": {"schedule": lambda step: 0.9**step},
    "clipped": {"clip_norm": 0.1},
    "validated": {"val": (X[:10], Y[:10]), "keep": "best"},
    "steps": {"epochs": None, "steps": 40},
}


def jobs(count: int = 3, **more: Any) -> list[shoal.Job]:
    """The last batch of an epoch has 4 rows, the others 8."""
    loader = DataLoader(TensorDataset(X, Y), batch_size=8, shuffle=True)
    settings: dict[str, Any] = {"model": network, "loss": F.cross_entropy, "epochs": 9} | more
    return [shoal.Job(data=loader, hparams={"lr": 0.01 * (i + 1)}, seed=i, **settings) for i in range(count)]


def assert_as_alone(result: shoal.Result) -> None:
    alone = solo(result.job)
    for ours, theirs in zip(result.model.state_dict().values(), alone.model.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    names = result.history[-1].keys() - {"seconds"}
    for row, expected in zip(result.history, alone.history, strict=True):
        assert {n: row[n] for n in names} == pytest.approx({n: expected[n] for n in names}, rel=1e-9, nan_ok=True)


@pytest.mark.parametrize("setting", SETTINGS)
def test_members_are_as_alone(setting: str, recorder: OnCpu) -> None:
    results = shoal.train(jobs(**SETTINGS[setting]), device="cpu", progress=False)
    assert {result.tier for result in results} == {"stacked"}
    assert len(recorder.graphs) == 2, "a step for each of the two shapes"
    assert recorder.graphs[0].replays > 8
    for result in results:
        assert_as_alone(result)


def test_a_member_that_diverges_stops_and_the_others_go_on(recorder: OnCpu) -> None:
    """Its loss is infinite in a batch whose step is replayed; later ones of another shape run operator by operator."""
    listed = jobs(epochs=4)

    def broken(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(model(x), y)
        return loss / (1 - (model[0].weight.abs().max() > 0.53).double())

    listed[1] = shoal.Job(
        data=listed[0].data, model=network, step=broken, hparams={"lr": 0.02}, epochs=4, seed=1, name="broken"
    )
    listed[0], listed[2] = (
        shoal.Job(data=listed[0].data, model=network, step=broken, hparams={"lr": 1e-6}, epochs=4, seed=seed)
        for seed in (0, 2)
    )
    results = shoal.train(listed, device="cpu", progress=False)
    assert [result.status for result in results] == ["done", "diverged", "done"]
    assert loader_unit.FEW < results[1].steps < 20
    for result in results:
        alone = solo(result.job)
        assert result.status == alone.status
        for ours, theirs in zip(result.model.parameters(), alone.model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_without_memory_for_a_graph_the_operators_run(recorder: OnCpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(recorder, "capture", full)
    monkeypatch.setattr(loader_unit, "clear", lambda: None)
    for result in shoal.train(jobs(), device="cpu", progress=False):
        assert_as_alone(result)


def test_when_memory_gets_full_the_graphs_go_and_the_batch_runs_again(
    recorder: OnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The short batch of the second epoch runs operator by operator, and finds no memory beside the graph."""
    advance, full, cleared = StackedUnit.advance, [True], []

    def raising(unit: StackedUnit, program: Any, batch: list[Tensor], *more: Any) -> None:
        if full and recorder.graphs and recorder.graphs[0].replays:
            full.clear()
            raise torch.OutOfMemoryError("CUDA out of memory")
        advance(unit, program, batch, *more)

    monkeypatch.setattr(StackedUnit, "advance", raising)
    monkeypatch.setattr(loader_unit, "clear", lambda: cleared.append(True))
    for result in shoal.train(jobs(), device="cpu", progress=False):
        assert_as_alone(result)
    assert cleared and not full and len(recorder.graphs) == 1


def test_few_batches_are_not_worth_a_graph(recorder: OnCpu) -> None:
    for result in shoal.train(jobs(epochs=1), device="cpu", progress=False):
        assert_as_alone(result)
    assert not recorder.graphs
