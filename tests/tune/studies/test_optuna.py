"""`shoal.tune` with Optuna's samplers and storages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.tune.studies.problems import make_job, tune

import shoal
from shoal.errors import JobError
from shoal.tune.samplers import make_sampler
from shoal.tune.space import parse

optuna = pytest.importorskip("optuna")

SPACE = {"lr": ("log", 1e-3, 1.0), "momentum": ("uniform", 0.0, 0.9)}
ENDS = {"COMPLETE", "PRUNED"}


@pytest.fixture(autouse=True)
def _quiet() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)


def read(url: str) -> Any:
    return optuna.load_study(study_name="s", storage=url)


def test_a_study_is_in_the_storage(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/study.db"
    study = tune("asha", sampler="tpe", storage=url, study_name="s", out=tmp_path / "out")
    tune("asha", sampler="tpe", storage=url, study_name="s", out=tmp_path / "out")  # it has ended: nothing is added
    stored = read(url).trials
    assert len(stored) == len(study.trials) == 14 and {each.state.name for each in stored} == ENDS
    for trial, each in zip(
        study.trials, sorted(stored, key=lambda t: int(t.user_attrs["shoal:trial"].split("/")[1])), strict=True
    ):
        assert (trial.params, trial.values, trial.value) == (each.params, each.intermediate_values, each.value)
    assert (tmp_path / "out" / "report.html").stat().st_size > 5000


def test_a_study_of_optunas_continues(tmp_path: Path) -> None:
    """Its trials are in the way of none of ours, and its sampler has learned from them."""
    url = f"sqlite:///{tmp_path}/study.db"
    before = optuna.create_study(
        study_name="s", storage=url, direction="maximize", sampler=optuna.samplers.RandomSampler(seed=3)
    )

    def objective(trial: Any) -> float:
        trial.suggest_categorical("other", ["a", "b"])  # a setting that ours does not have
        return -abs(trial.suggest_float("lr", 1e-3, 1.0, log=True) - 0.1) + trial.suggest_float("momentum", 0.0, 0.9)

    before.optimize(objective, n_trials=20)
    study = tune("none", sampler="tpe", storage=url, study_name="s")
    stored = read(url).trials
    assert len(stored) == 20 + 4 and stored[:20] == before.trials[:20]
    assert [t.params for t in stored[20:]] == [t.params for t in study.trials]
    assert stored[20].params != make_sampler("tpe", parse(SPACE), mode="max").ask(0), "it has learned from the twenty"
    with pytest.raises(JobError, match="is to maximize, this one to minimize"):
        tune("none", metric="val_loss", storage=url, study_name="s")


def test_settings_that_make_job_suggests(tmp_path: Path) -> None:
    def by_trial(trial: Any) -> shoal.Job:
        lr = trial.suggest_float("lr", 1e-3, 1.0, log=True)
        return make_job({"lr": lr, "momentum": trial.suggest_categorical("momentum", [0.0, 0.5])})

    url = f"sqlite:///{tmp_path}/study.db"
    for sampler in ("random", "tpe"):
        tune("none", make_job=by_trial, space=None, sampler=sampler, storage=url, study_name="s")
    stored = read(url).trials
    assert len(stored) == 8 and {each.state.name for each in stored} == {"COMPLETE"}
    assert all(set(each.params) == {"lr", "momentum"} for each in stored)


def test_a_make_job_that_raises_is_a_failed_trial(tmp_path: Path) -> None:
    def faulty(params: dict[str, Any]) -> shoal.Job:
        if params["lr"] < 0.03:
            raise KeyError("data")
        return make_job(params)

    url = f"sqlite:///{tmp_path}/study.db"
    study = tune("hyperband", make_job=faulty, storage=url, study_name="s")
    failed = [each for each in read(url).trials if each.state.name == "FAIL"]
    assert len(failed) == sum(trial.params["lr"] < 0.03 for trial in study.trials) > 0
    assert all(str(each.user_attrs["error"]).startswith("make_job raised KeyError: 'data' (test_o") for each in failed)
    assert "no_job" not in failed[0].user_attrs
