"""How many of torch's threads a run uses: one for small networks, and the same again when it is resumed."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.engine.processes import sharing
from shoal.engine.runtime.planning_context import PlanningContext
from shoal.preparation.checks import prepare
from shoal.storage import atomic

X, Y = torch.randn(64, 6, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 3


@pytest.fixture(autouse=True)
def two_threads(threads_restored: None) -> None:
    torch.set_num_threads(2)


def job(notes: Path | None = None, **settings: Any) -> shoal.Job:
    """A job whose step makes a file in `notes`, named by the number of threads that it has."""
    given = {"model": lambda: nn.Linear(6, 3), "data": (X, Y), "hparams": {"lr": 0.1}, "epochs": 4}

    def step(model: nn.Module, batch: Any) -> Tensor:
        if notes is not None:
            (notes / str(torch.get_num_threads())).touch()
        return F.cross_entropy(model(batch[0]), batch[1])

    return shoal.Job(**given | {"step": step, "batch_size": 8} | settings)


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    folder = tmp_path / "notes"
    folder.mkdir()
    return folder


def noted(notes: Path) -> set[str]:
    return {path.name for path in notes.iterdir()}


def stop_after_two(view: Any) -> None:
    if view.epoch == 2:
        signal.raise_signal(signal.SIGINT)


def test_small_networks_use_one_thread_with_a_folder_too(tmp_path: Path, notes: Path) -> None:
    shoal.train([job(notes)], device="cpu", out=tmp_path / "run")
    assert noted(notes) == {"1"} and torch.get_num_threads() == 2
    assert atomic.read_sealed(tmp_path / "run" / "plan.json")["plan"]["threads"] == 1


@pytest.mark.parametrize("threads", [1, 2])
def test_a_resumed_run_uses_as_many_threads_as_before(threads: int, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        shoal.train([job()], device="cpu", out=tmp_path, callbacks=[stop_after_two])
    saved = atomic.read_sealed(tmp_path / "plan.json")
    saved["plan"]["threads"] = threads
    atomic.write_sealed(tmp_path / "plan.json", saved)
    seen: set[int] = set()
    shoal.train([job()], device="cpu", out=tmp_path, callbacks=[lambda view: seen.add(torch.get_num_threads())])
    assert seen == {threads}


def test_a_live_run_of_small_networks_uses_one_thread(notes: Path) -> None:
    shoal.start([job(notes)], device="cpu").wait()
    assert noted(notes) == {"1"}


def test_an_explanation_is_measured_with_one_thread(notes: Path) -> None:
    shoal.explain([job(notes), job(notes, seed=1)], device="cpu")
    assert noted(notes) == {"1"} and torch.get_num_threads() == 2


@pytest.mark.parametrize(
    ("heavy", "busy", "one", "two", "batches", "threads"),
    [
        (False, False, 1.0, 0.1, 800, 1),
        (True, False, 1.0, 0.6, 800, 2),
        (True, False, 1.0, 1.4, 800, 1),
        (True, False, 1.0, 1.4, 8, 2),  # too short for a trial: as a loop would
        (True, True, 1.0, 0.6, 800, 1),  # steps with several threads could take tens of times as long
        (True, True, 1.0, 0.6, 8, 1),
    ],
)
def test_large_networks_use_several_threads_where_that_is_faster(
    heavy: bool, busy: bool, one: float, two: float, batches: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "busy", lambda threads: busy)
    members = prepare([job(epochs=batches // 8)], torch.device("cpu"))
    planning = PlanningContext(members, timed=False)
    monkeypatch.setattr(sharing, "HEAVY_SECONDS", 0.5 if heavy else 2.0)
    monkeypatch.setattr(sharing, "lone_seconds", lambda member, rounds=2: two if torch.get_num_threads() == 2 else one)
    with sharing.torch_flags(torch.device("cpu"), 1):
        assert sharing.threads_for(members, planning, 2) == threads


@pytest.mark.parametrize(("busy", "threads"), [(False, 2), (True, 1)])
def test_jobs_whose_data_is_read_as_training_goes_are_not_tried(
    busy: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "busy", lambda threads: busy)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=8)
    these = [shoal.Job(model=lambda: nn.Linear(6, 3), data=loader, loss=F.cross_entropy, epochs=1)]
    members = prepare(these, torch.device("cpu"))
    assert sharing.threads_for(members, PlanningContext(members, timed=False), 2) == threads
