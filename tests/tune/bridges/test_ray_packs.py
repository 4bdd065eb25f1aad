"""A pack of configurations as one trial of Ray Tune's; with Ray itself in tests/integrations."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoal
from shoal.errors import TuneError
from shoal.tune.bridges.ray_packs import _Pack, best_first, pack_trainable, packs

X = torch.randn(48, 3, generator=torch.Generator().manual_seed(1))
Y = X @ torch.tensor([[1.0], [-2.0], [0.5]])


def make_job(config: dict[str, Any]) -> shoal.Job:
    return shoal.Job(
        model=lambda: nn.Linear(3, 1), data=(X[:32], Y[:32]), val=(X[32:], Y[32:]), loss=F.mse_loss,
        optimizer=torch.optim.SGD, hparams={"lr": config["lr"]}, batch_size=8, epochs=config.get("epochs", 3),
    )  # fmt: skip


def reports_of(configs: list[dict[str, Any]], mode: str = "min") -> list[dict[str, Any]]:
    reports: list[dict[str, Any]] = []
    _Pack(configs, make_job, "val_loss", mode, reports.append).train({"device": "cpu"})
    reports[-1]["results"] = json.loads(reports[-1]["results"])
    return reports


def test_a_report_an_epoch_and_all_configurations_at_the_end() -> None:
    configs = [{"lr": 1e-3}, {"lr": 0.1}, {"lr": 0.03}]
    reports = reports_of(configs)
    assert [report["epoch"] for report in reports] == [1, 2, 3]
    assert all("results" not in report for report in reports[:-1])
    rows = reports[-1]["results"]
    assert [row["config"] for row in rows] == configs and {row["status"] for row in rows} == {"done"}
    alone = [shoal.solo(make_job(config)).value("val_loss") for config in configs]
    assert [row["value"] for row in rows] == pytest.approx(alone, rel=1e-5)
    assert reports[-1]["val_loss"] == min(row["value"] for row in rows) and reports[-1]["best_config"] == {"lr": 0.1}


def test_configurations_of_different_lengths() -> None:
    reports = reports_of([{"lr": 0.1, "epochs": 1}, {"lr": 0.1, "epochs": 4}])
    assert [report["epoch"] for report in reports] == [1, 2, 3, 4]
    assert [row["epochs"] for row in reports[-1]["results"]] == [1, 4]


def test_one_that_cannot_be_made_costs_itself() -> None:
    reports = reports_of([{"rate": 1e-3}, {"lr": 0.1}, {"lr": 1e30}])
    rows = reports[-1]["results"]
    assert [row["status"] for row in rows] == ["failed", "done", "diverged"]
    assert rows[0]["error"].startswith("make_job raised KeyError: 'lr' (test_ray_packs.py:")
    assert rows[0]["value"] == "nan"
    assert reports[-1]["best_config"] == {"lr": 0.1}
    with pytest.raises(TuneError, match="no configuration of the pack has a job: make_job raised KeyError"):
        reports_of([{}])


def test_the_best_of_all_packs() -> None:
    results = [
        SimpleNamespace(metrics={"results": '[{"value": 0.5, "config": 1}, {"value": "nan", "config": 2}]'}),
        SimpleNamespace(metrics={"results": '[{"value": 0.9, "config": 3}]'}),
        SimpleNamespace(metrics=None),
    ]
    assert [row["config"] for row in best_first(results, "accuracy")][:2] == [3, 1]
    assert [row["config"] for row in best_first(results, "val_loss")][:2] == [1, 3]


def test_mistakes() -> None:
    with pytest.raises(TuneError, match="size is 0; use a whole number"):
        packs([], 0)
    with pytest.raises(TuneError, match="mode is None, and 'gap' does not say which way is better"):
        pack_trainable(make_job, "gap")
    pytest.importorskip("ray")
    with pytest.raises(TuneError, match='the trial has no configurations under "pack"; set param_space='):
        pack_trainable(make_job, "val_loss")({"lr": 0.1})
