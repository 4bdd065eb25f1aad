"""Loggers: the base that finds new rows and steps, and files of comma-separated values."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal

X, Y = torch.randn(40, 4), torch.randn(40, 1)


def step(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    loss = F.mse_loss(model(batch[0]), batch[1])
    return loss, {"root": loss.detach().sqrt()}


def job(**changes: Any) -> shoal.Job:
    settings: dict[str, Any] = {"model": lambda: nn.Linear(4, 1), "data": (X, Y), "step": step, "batch_size": 8}
    return shoal.Job(**(settings | {"hparams": {"lr": 0.01}, "epochs": 3, "accumulate": 2} | changes))


class Memory(shoal.Logger):
    """Keeps what it is given."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.seen: list[tuple[Any, ...]] = []

    def begin(self, view: shoal.MemberView) -> None:
        self.seen.append((view.name, "begin"))

    def log(self, view: shoal.MemberView, values: dict[str, float], step: int) -> None:
        self.seen.append((view.name, step, values))

    def end(self, view: shoal.MemberView) -> None:
        self.seen.append((view.name, view.status))


def test_epochs_and_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    for workers in ("1", "2"):
        monkeypatch.setenv("SHOAL_WORKERS", workers)
        logger = Memory(every_step=2)
        results = shoal.train([job(name="a"), job(name="b", seed=1)], "cpu", callbacks=[logger])
        for result in results:
            seen = [entry[1:] for entry in logger.seen if entry[0] == result.name]
            assert seen[0] == ("begin",) and seen[-1] == ("done",)
            epochs = [entry for entry in seen[1:-1] if "epoch" in entry[1]]
            rows = [(row["step"], {k: v for k, v in row.items() if k != "step"}) for row in result.history]
            assert epochs == rows
            steps = [entry for entry in seen[1:-1] if "epoch" not in entry[1]]
            assert [number for number, _ in steps] == [2, 4, 6, 8], "three steps an epoch, every second one"
            losses = shoal.replay(result.job).losses
            for number, values in steps:
                assert values["step_loss"] == pytest.approx(losses[number - 1], rel=1e-4)
                assert set(values) == {"step_loss", "step_root"}
    with pytest.raises(ValueError, match="every_step is 0"):
        Memory(every_step=0)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_files_of_comma_separated_values(tmp_path: Path) -> None:
    jobs = [job(name="a/b"), job(name="c", seed=1, val=(X, Y), val_every=2, accumulate=1)]
    results = shoal.train(jobs, "cpu", callbacks=[shoal.CSVLogger(tmp_path, every_step=1)])
    for result, folder in zip(results, ("a_b-0", "c"), strict=True):
        rows = read(tmp_path / folder / "metrics.csv")
        assert [{k: float(v) for k, v in row.items() if v} for row in rows] == result.history
        assert len(read(tmp_path / folder / "steps.csv")) == result.steps
        assert json.loads((tmp_path / folder / "config.json").read_text())["lr"] == 0.01


def test_a_resumed_run_continues_its_files(tmp_path: Path) -> None:
    class Enough(Exception):
        pass

    def interrupt(event: shoal.Event) -> None:
        if event.kind == "epoch" and event.data["epoch"] == 2:
            raise KeyboardInterrupt

    def train(**more: Any) -> shoal.Results:
        logger = shoal.CSVLogger(tmp_path / "logs", every_step=1)
        return shoal.train([job(name="a", epochs=4)], "cpu", tmp_path / "run", callbacks=[logger], **more)

    with pytest.raises(KeyboardInterrupt):
        train(events=interrupt)
    path = tmp_path / "logs" / "a" / "metrics.csv"
    path.write_text(path.read_text() + "12,4,0.3")  # a later row that a killed run could not finish
    (result,) = train()
    assert [int(row["step"]) for row in read(path)] == [3, 6, 9, 12]
    assert [float(row["loss"]) for row in read(path)] == [row["loss"] for row in result.history]
    assert [int(row["step"]) for row in read(tmp_path / "logs" / "a" / "steps.csv")] == list(range(1, 13))
    with pytest.raises(ValueError, match="cannot be made"):
        shoal.CSVLogger(path)
