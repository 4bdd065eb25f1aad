"""Weights & Biases (offline) and MLflow (a folder and a database): what the real libraries have written."""

from __future__ import annotations

import os
import struct
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoal

pytestmark = pytest.mark.integrations

X, Y = torch.randn(40, 4), torch.randn(40, 1)


def jobs(epochs: int = 3) -> list[shoal.Job]:
    made = [
        shoal.Job(
            model=lambda: nn.Linear(4, 1), data=(X, Y), val=(X, Y), loss=F.mse_loss, batch_size=8,
            hparams={"lr": lr}, epochs=epochs, name=f"lr={lr:g}",
        )
        for lr in (0.01, 0.1)
    ]  # fmt: skip
    bad = shoal.Job(
        model=lambda: nn.Linear(4, 1),
        data=(X, Y),
        loss=lambda out, y: F.mse_loss(out, y) / 0,
        epochs=1,
        name="it's bad",
    )
    return [*made, bad]


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # of the libraries' own
        yield


def records(content: bytes) -> Iterator[bytes]:
    """The records of a run's file, a log in LevelDB's format: blocks of 32 KiB, each record in one or more parts."""
    place, whole = 7, b""
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        length, kind = struct.unpack("<HB", content[place + 4 : place + 7])
        whole += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # the only part, or the last one
            yield whole
            whole = b""


def offline_runs(folder: Path) -> dict[str, dict[str, Any]]:
    """What is in the files of offline runs, by the runs' names."""
    from wandb.proto import wandb_internal_pb2

    runs: dict[str, dict[str, Any]] = {}
    for path in folder.glob("wandb/offline-run-*/*.wandb"):
        run: dict[str, Any] = {"history": [], "config": {}, "summary": {}}
        for data in records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                run |= {"name": record.run.display_name, "group": record.run.run_group}
                run["config"] |= {item.key: item.value_json for item in record.run.config.update}
            elif kind == "history":
                run["history"].append({i.key or i.nested_key[0]: i.value_json for i in record.history.item})
            elif kind == "summary":
                run["summary"] |= {i.key or i.nested_key[0]: i.value_json for i in record.summary.update}
            elif kind == "exit":
                run["exit"] = record.exit.exit_code
        runs[str(run.get("name"))] = run
    return runs


def test_weights_and_biases_offline(quiet: None, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    logger = shoal.WandB("shoal-test", group="sweep", mode="offline", dir=str(tmp_path), every_step=1)
    results = shoal.train(jobs(), "cpu", callbacks=[logger])
    until = time.monotonic() + 60  # its own process writes the files
    runs = offline_runs(tmp_path)
    while not all("exit" in run for run in runs.values()):
        assert time.monotonic() < until
        time.sleep(0.1)
        runs = offline_runs(tmp_path)
    assert set(runs) == {"lr=0.01", "lr=0.1", "it's bad"} and {run["group"] for run in runs.values()} == {"sweep"}
    for result in results[:2]:
        run = runs[result.name]
        assert run["exit"] == 0 and float(run["config"]["lr"]) == result.job.hparams["lr"]
        epochs = [row for row in run["history"] if "epoch" in row]
        assert [float(row["val_loss"]) for row in epochs] == pytest.approx([r["val_loss"] for r in result.history])
        assert [int(row["_step"]) for row in epochs] == [row["step"] for row in result.history]
        assert sum("step_loss" in row for row in run["history"]) == result.steps
    assert runs["it's bad"]["exit"] == 1
    with pytest.raises(ValueError, match="WandB sets name for each member itself"):
        shoal.WandB("p", name="x")


@pytest.mark.parametrize("store", ["file", "sqlite"])
def test_mlflow(quiet: None, tmp_path: Path, store: str) -> None:
    tracking = pytest.importorskip("mlflow.tracking")
    uri = (tmp_path / "mlruns").as_uri() if store == "file" else f"sqlite:///{tmp_path / 'mlflow.db'}"

    def train(epochs: int) -> shoal.Results:
        logger = shoal.MLflow("exp", group="sweep", tracking_uri=uri, every_step=1)
        return shoal.train(jobs(epochs), "cpu", tmp_path / "out", callbacks=[logger])

    train(2)
    results = train(3)  # the same runs continue
    client = tracking.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("exp").experiment_id
    runs = {run.info.run_name: run for run in client.search_runs([experiment])}
    assert set(runs) == {"sweep", "lr=0.01", "lr=0.1", "it's bad"} and len(client.search_runs([experiment])) == 4
    for result in results[:2]:
        run = runs[result.name]
        assert run.data.tags["mlflow.parentRunId"] == runs["sweep"].info.run_id
        assert run.info.status == "FINISHED" and run.data.params["lr"] == str(result.job.hparams["lr"])
        points = client.get_metric_history(run.info.run_id, "val_loss")
        assert [(p.step, p.value) for p in points] == [(row["step"], row["val_loss"]) for row in result.history]
        assert len(client.get_metric_history(run.info.run_id, "step_loss")) == result.steps
    assert runs["it's bad"].info.status == "FAILED" and runs["sweep"].info.status == "FINISHED"
    assert not os.path.exists("mlruns") or store == "file"


def test_mlflow_knows_its_runs_again(quiet: None, tmp_path: Path) -> None:
    """By any name, and a job of more steps logs the epoch in which it had ended, once it is whole."""
    tracking = pytest.importorskip("mlflow.tracking")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    names = ['it\'s "q"', "a/b", "a\\b", "\u00fc \u5b66", "100%"]

    def train(steps: int) -> shoal.Results:
        made = [replace(jobs()[0], name=name, epochs=None, steps=steps, val_every_steps=2) for name in names]
        logger = shoal.MLflow("exp", group="a 'sweep'", tracking_uri=uri, every_step=1)
        return shoal.train(made, "cpu", tmp_path / "out", callbacks=[logger], progress=False)

    train(7)
    results = train(13)
    client = tracking.MlflowClient(tracking_uri=uri)
    runs = client.search_runs([client.get_experiment_by_name("exp").experiment_id])
    assert sorted(run.info.run_name for run in runs) == sorted([*names, "a 'sweep'"])
    for run in runs:
        if run.info.run_name in names:
            history = results[run.info.run_name].history
            points = client.get_metric_history(run.info.run_id, "loss")
            assert [point.step for point in points] == [5, 7, 10, 13]
            assert [point.value for point in points if point.step != 7] == [row["loss"] for row in history]
            steps = [point.step for point in client.get_metric_history(run.info.run_id, "step_loss")]
            assert steps == list(range(1, 14))
