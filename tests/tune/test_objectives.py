"""Several metrics in one study: no rank, but trials that no other beats."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tests.tune.studies.problems import SPACE, make_job, tune

import shoal
from shoal.errors import JobError, TuneError
from shoal.tune.objectives import Objectives, make_objectives, pareto_front
from shoal.tune.trial import Trial

BOTH: dict[str, Any] = {"metric": ["accuracy", "val_loss"]}


def trial(number: int, *values: float, state: Any = "complete") -> Trial:
    return Trial(number, {}, state, {1: values[0]}, attrs={"objectives": list(values)})


def no_check(name: str) -> None:
    """Whatever it is called."""


def test_trials_that_no_other_beats() -> None:
    trials = [
        trial(0, 0.9, 0.5),
        trial(1, 0.9, 0.4),  # better than 0
        trial(2, 0.5, 0.1),
        trial(3, 0.5, 0.1),  # as good as 2
        trial(4, 0.99, math.nan),
        trial(5, 1.0, 0.0, state="failed"),
    ]
    assert [t.number for t in pareto_front(trials, ("max", "min"))] == [1, 2, 3]
    assert pareto_front([], ("max", "min")) == []


def test_directions_are_those_of_the_names_unless_they_are_given() -> None:
    assert make_objectives(["accuracy", "val_loss"], None, no_check).modes == ("max", "min")
    assert make_objectives("val_loss", "max", no_check) == Objectives(("val_loss",), ("max",))
    assert make_objectives(["a", "b"], ["max", "min"], no_check).modes == ("max", "min")


@pytest.mark.parametrize(
    ("metric", "mode", "words"),
    [
        ([], None, "metric is \\[\\]; name one"),
        (["val_loss", 3], None, "name one"),
        (["val_loss", "val_loss"], None, "name each metric once"),
        (["accuracy", "val_loss"], "max", "there are 2 metrics"),
        (["accuracy", "val_loss"], ["max", "up"], "mode is 'up'"),
        (["accuracy", "speed"], None, "'speed' does not say which way is better"),
    ],
)
def test_mistakes(metric: Any, mode: Any, words: str) -> None:
    with pytest.raises(TuneError, match=words):
        make_objectives(metric, mode, no_check)


def test_a_scheduler_that_ranks_refuses_several_metrics() -> None:
    for kind in ("hyperband", "asha", "pbt"):
        with pytest.raises(TuneError, match="ranks trials by one; use scheduler='none'"):
            tune(kind, **BOTH)
    with pytest.raises(TuneError, match="metric is 'val_recall', which trial 0 does not have"):
        tune("none", metric=["accuracy", "val_recall"], mode=["max", "max"])


def test_a_study_has_the_best_trials(tmp_path: Path) -> None:
    study = tune("none", num_trials=8, out=tmp_path / "s", **BOTH)
    front = study.best_trials
    assert front == pareto_front(study.trials, ("max", "min")) and front
    for each in study.trials:
        row = study.result(each).history[-1]
        assert each.attrs["objectives"] == [row["accuracy"], row["val_loss"]]
    with pytest.raises(TuneError, match="several metrics \\(accuracy, val_loss\\)"):
        print(study.best)
    assert study.to_dict()["best"] is None
    assert study.to_dict()["best_trials"] == [each.number for each in front]
    assert study.table().splitlines()[0].split()[4:6] == ["accuracy", "val_loss"]
    page = (tmp_path / "s" / "report.html").read_text()
    assert "<th>accuracy</th><th>val_loss</th>" in page and "Best configuration by accuracy" in page
    assert f"{len(front)} that no other beats" in repr(study)
    assert all(each.name in (tmp_path / "s" / "report.html").read_text() for each in front)
    again = tune("none", num_trials=8, out=tmp_path / "s", **BOTH)
    assert [each.attrs["objectives"] for each in again.trials] == [each.attrs["objectives"] for each in study.trials]
    with pytest.raises(ValueError, match="metric was"):
        tune("none", num_trials=8, out=tmp_path / "s", metric=["val_loss", "accuracy"])


def test_values_that_are_no_numbers() -> None:
    def job(params: dict[str, Any]) -> shoal.Job:
        return make_job(params, metrics={"accuracy": lambda outputs, targets: float("nan")})

    study = tune("none", make_job=job, metric="accuracy")
    assert study.best_trials == [] and repr(study) == "Study(4 trials)"
    with pytest.raises(TuneError, match="no trial has a value of 'accuracy': all values are NaN"):
        print(study.best)


def test_hyperband_of_one_trial_is_no_search() -> None:
    with pytest.warns(shoal.ShoalWarning, match="max_epochs=2 is less than eta=3, so that Hyperband has one trial"):
        assert len(tune("hyperband", max_epochs=2).trials) == 1


def test_the_weights_that_are_kept_count() -> None:
    def job(params: dict[str, Any]) -> shoal.Job:
        return make_job(params, keep="best")

    study = tune("none", make_job=job, **BOTH)
    for each in study.trials:
        best = min(study.result(each).history, key=lambda row: row["val_loss"])
        assert each.attrs["objectives"] == [best["accuracy"], best["val_loss"]]


@pytest.mark.parametrize("sampler", ["nsga2", "tpe"])
def test_samplers_and_storages_of_optuna(sampler: str, tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")
    url = f"sqlite:///{tmp_path}/study.db"
    study = tune("none", num_trials=6, sampler=sampler, storage=url, **BOTH)
    stored = optuna.load_study(study_name="shoal", storage=url)
    assert [one.name for one in stored.directions] == ["MAXIMIZE", "MINIMIZE"]
    assert [each.values for each in stored.trials] == [each.attrs["objectives"] for each in study.trials]
    assert sorted(each.number for each in stored.best_trials) == [each.number for each in study.best_trials]
    with pytest.raises(JobError, match="is to maximize and minimize, this one to minimize"):
        tune("none", num_trials=6, storage=url, metric="val_loss")
    with pytest.raises(JobError, match="'cma', which has one metric"):
        tune("none", num_trials=6, sampler="cma", **BOTH)
    json.dumps(study.to_dict())
    assert set(SPACE) == set(study.best_trials[0].params)
