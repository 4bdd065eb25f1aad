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
from shoal.reporting.loggers import folder_name

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
    for result, folder in zip(results, (folder_name("a/b"), "c"), strict=True):
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


def test_a_resumed_run_writes_rows_that_are_missing(tmp_path: Path) -> None:
    """A run may be killed after a checkpoint and before its row is written."""
    logs = tmp_path / "logs"

    def train(epochs: int, names: list[str]) -> shoal.Results:
        jobs = [job(name=name, epochs=epochs) for name in names]
        return shoal.train(jobs, "cpu", tmp_path / "run", callbacks=[shoal.CSVLogger(logs)], progress=False)

    train(3, ["a/b", "c"])
    path = logs / folder_name("a/b") / "metrics.csv"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    (logs / "c" / "metrics.csv").unlink()
    results = train(5, ["new", "c", "a/b"])
    assert sorted(path.name for path in logs.iterdir()) == sorted([folder_name("a/b"), "c", "new"])
    for result in results:
        rows = read(logs / folder_name(result.name) / "metrics.csv")
        assert [int(row["step"]) for row in rows] == [3, 6, 9, 12, 15]
        assert [float(row["loss"]) for row in rows] == [row["loss"] for row in result.history]


def test_a_stop_within_an_epoch_is_logged(tmp_path: Path) -> None:
    stop = shoal.EarlyStop("val_loss", patience=1, min_delta=100.0)
    stopped = job(name="a", accumulate=1, val=(X, Y), val_every_steps=2, stop=stop)
    memory = Memory()
    (result,) = shoal.train([stopped], "cpu", callbacks=[memory, shoal.CSVLogger(tmp_path)])
    assert result.status == "stopped" and not result.history and len(result.validations) == 2
    expected = [
        ("a", row["step"], {k: row[k] for k in row if k not in ("epoch", "step")}) for row in result.validations
    ]
    assert memory.seen == [("a", "begin"), *expected, ("a", "stopped")]
    assert [int(row["step"]) for row in read(tmp_path / "a" / "steps.csv")] == [2, 4]


def test_members_do_not_share_a_folder(tmp_path: Path) -> None:
    names = ["a/b", "a_b-0", "a:b", "a_b"]
    shoal.train([job(name=name) for name in names], "cpu", callbacks=[shoal.CSVLogger(tmp_path)])
    assert len(list(tmp_path.iterdir())) == 4
