"""Studies on real networks: the table is trained, nobody twice; the packed scores are those of training alone."""

from __future__ import annotations

import dataclasses
import inspect
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tune.simulation import simulate
from tests.tune.studies.problems import DATA, SPACE, VAL, accuracy, make_job, tune
from torch import nn

import shoal
from shoal.errors import JobError, OutError, TuneError
from shoal.tune import PBT, Study, SuccessiveHalving, Trial
from shoal.tune.schedulers import Goal, Hyperband


@pytest.fixture(scope="module")
def study() -> Study:
    return tune()


def test_the_table_is_trained_and_no_epoch_twice(study: Study) -> None:
    assert [bracket.size for bracket in study.brackets] == [9, 5, 3]
    for bracket in study.brackets:
        epochs = [t.epochs for t in study.trials if t.bracket == bracket.number]
        for rung in bracket.rungs:
            assert sum(count >= rung.epochs for count in epochs) == rung.trials
    planned = sum(bracket.epochs for bracket in study.brackets)
    assert study.epochs == planned == 69
    assert sum(result.steps for result in study.results) == planned * 10  # batches of an epoch
    assert all(len(study.result(trial).history) == trial.epochs for trial in study.trials)


def test_scores_are_those_of_training_alone(study: Study) -> None:
    """Bit for bit, whichever trials ran beside, paused and left."""
    for trial in study.trials:
        job = dataclasses.replace(make_job(trial.params, epochs=trial.epochs), name=trial.name)
        (alone,) = shoal.train([job], device="cpu", deterministic=True)
        assert {int(row["epoch"]): row["accuracy"] for row in alone.history} == trial.values
        weights = zip(alone.model.parameters(), study.result(trial).model.parameters(), strict=True)
        assert all(torch.equal(x, y) for x, y in weights)


def test_a_trials_other_settings_are_in_its_jobs_config() -> None:
    space = {"lr": [0.01], "momentum": [0.0], "width": [8], "shape": [(1, 2)]}
    study = tune("none", space=space, sampler="grid", num_trials=None)
    assert study.results[0].job.config == {"width": 8, "shape": "(1, 2)"}
    assert study.results.records()[0]["width"] == 8


def test_one_at_a_time_gives_the_same_winner(study: Study) -> None:
    """The same search with trials trained alone, one after another, each from its beginning."""

    def score(trial: Trial, epoch: int) -> float:
        params = study.trials[trial.number].params  # the sampler's, by the trial's number
        (alone,) = shoal.train([make_job(params, epochs=epoch)], device="cpu", deterministic=True)
        trial.values |= {int(row["epoch"]): row["accuracy"] for row in alone.history}
        return float(alone.history[-1]["accuracy"])

    trials = simulate(Hyperband(), Goal(max_epochs=9, mode="max"), score, random.Random(0))
    assert [(t.bracket, t.rung, t.state, t.values) for t in trials] == [
        (t.bracket, t.rung, t.state, t.values) for t in study.trials
    ]


def test_the_best(study: Study) -> None:
    values = {trial.number: trial.value for trial in study.trials}
    assert study.best_value == max(values.values()) and study.best_params == study.best.params
    outputs = study.best_model.eval()(DATA[0])
    assert outputs.shape == (160, 4) and study.best_result.value("accuracy") == study.best_value
    assert f"{study.best_value:.4g}" in study.table() and "5 complete, 12 pruned" in study.table()
    assert study.to_dict()["best"] == study.best.number and len(study.to_dataframe()) == 17


def test_the_same_again(study: Study) -> None:
    assert [t.values for t in tune().trials] == [t.values for t in study.trials]
    assert [t.params for t in tune(seed=1, max_epochs=3).trials] != [t.params for t in study.trials[:3]]


def test_widths_that_differ() -> None:
    study = tune(space={**SPACE, "width": [4, 8, 16]})
    assert study.epochs == 69 and {trial.params["width"] for trial in study.trials} == {4, 8, 16}


@pytest.mark.parametrize("kind", ["in-turn", "asha", "none"])
def test_other_schedulers(kind: str) -> None:
    study = tune(kind)
    assert all(trial.ended for trial in study.trials)
    assert study.epochs == sum(trial.epochs for trial in study.trials)
    assert max(trial.epochs for trial in study.trials) == study.max_epochs


def test_successive_halving_with_its_own_number() -> None:
    study = tune(scheduler=SuccessiveHalving(eta=2), num_trials=8, max_epochs=8)
    assert sorted(trial.epochs for trial in study.trials) == [1, 1, 1, 1, 2, 2, 4, 8]


def test_grid() -> None:
    study = tune("none", sampler="grid", space={"lr": [0.1, 0.2, 0.3], "momentum": [0.0, 0.5]}, num_trials=None)
    assert len(study.trials) == 6 and len({tuple(trial.params.values()) for trial in study.trials}) == 6


def test_settings_that_make_job_suggests() -> None:
    def suggesting(trial: Any) -> shoal.Job:
        lr = trial.suggest_float("lr", 1e-3, 1.0, log=True)
        nesterov = trial.suggest_categorical("kind", ["plain", "momentum"]) == "momentum"
        return make_job({"lr": lr, "momentum": trial.suggest_float("momentum", 0, 0.9) if nesterov else 0.0})

    study = tune("none", make_job=suggesting, space=None, num_trials=8)
    assert {frozenset(t.params) for t in study.trials} == {
        frozenset({"lr", "kind"}), frozenset({"lr", "kind", "momentum"}),
    }  # fmt: skip


# --- population-based training ----------------------------------------------------------------------------------------


def test_pbt_records_its_mutations() -> None:
    study = tune("pbt")
    assert all(trial.epochs == 12 and trial.state == "complete" for trial in study.trials)
    mutated = [trial for trial in study.trials if "mutations" in trial.attrs]
    assert mutated
    for trial in mutated:
        history = study.result(trial).history
        settings = dict(trial.params)
        for mutation in trial.attrs["mutations"]:
            assert study.trials[mutation["from"]].value_at(mutation["epoch"]) >= trial.value_at(mutation["epoch"])
            for name, (before, after) in mutation["changed"].items():
                assert settings[name] == before
                settings[name] = after
        assert settings == trial.settings and study.result(trial).job.hparams == settings
        last = trial.attrs["mutations"][-1]["epoch"]  # rows up to there are the source's
        assert {row["lr"] for row in history[last:]} == {settings["lr"]}


def test_pbt_leaves_the_others_alone() -> None:
    study = tune("pbt")
    untouched = [trial for trial in study.trials if "mutations" not in trial.attrs]
    assert 0 < len(untouched) < len(study.trials)
    for trial in untouched:
        (alone,) = shoal.train([make_job(trial.params, epochs=12)], device="cpu", deterministic=True)
        assert {int(row["epoch"]): row["accuracy"] for row in alone.history} == trial.values
        weights = zip(alone.model.parameters(), study.result(trial).model.parameters(), strict=True)
        assert all(torch.equal(x, y) for x, y in weights)


def test_pbt_refuses_what_it_cannot_change() -> None:
    def fixed(params: dict[str, Any]) -> shoal.Job:
        return make_job({"lr": 0.1, "momentum": 0.0})

    with pytest.raises(TuneError, match=r"settings of the optimizer .* and the space has none"):
        tune("pbt", make_job=fixed)
    with pytest.raises(TuneError, match="mutate names 'width', which cannot change while a trial trains"):
        tune("pbt", scheduler=PBT(interval=2, mutate=("width",)), space={**SPACE, "width": ("int", 4, 16)})


def test_pbt_says_of_a_trial_what_its_network_has() -> None:
    """A rate of dropout is the network's, which is copied with the source's weights and not changed."""

    def dropping(params: dict[str, Any]) -> shoal.Job:
        def model() -> nn.Module:
            return nn.Sequential(nn.Linear(10, 8), nn.Dropout(params["rate"]), nn.Linear(8, 4))

        return dataclasses.replace(make_job(params, epochs=12), model=model)

    study = tune("pbt", make_job=dropping, space={**SPACE, "rate": ("uniform", 0.1, 0.5)})
    assert any("mutations" in trial.attrs for trial in study.trials)
    for trial in study.trials:
        assert trial.settings["rate"] == study.result(trial).model[1].p
        assert study.result(trial).job.hparams == {name: trial.settings[name] for name in ("lr", "momentum")}


# --- mistakes ---------------------------------------------------------------------------------------------------------


def test_a_make_job_that_raises_costs_that_trial_alone() -> None:
    def picky(params: dict[str, Any]) -> shoal.Job:
        if params["momentum"] > 0.6:
            raise ZeroDivisionError("momentum is too large")
        return make_job(params, **({"batch_size": 0} if params["momentum"] < 0.1 else {}))

    study = tune(make_job=picky)
    failed = {t.number: t.error for t in study.trials if t.state == "failed"}
    raised = {t.number for t in study.trials if t.params["momentum"] > 0.6}
    refused = {t.number for t in study.trials if t.params["momentum"] < 0.1}
    assert raised and refused and failed.keys() == raised | refused
    line = inspect.getsourcelines(picky)[1] + 2
    why = f"make_job raised ZeroDivisionError: momentum is too large (test_studies.py:{line})"
    assert all(failed[n] == why for n in raised)
    assert all(failed[n] == "batch_size is 0; use a whole number, 1 or more" for n in refused)
    assert study.best.number not in failed and all(t.ended for t in study.trials)


def test_why_a_trial_failed_is_one_line_without_its_name() -> None:
    def picky(params: dict[str, Any]) -> shoal.Job:
        if params["momentum"] > 0.6:
            return dataclasses.replace(make_job(params), model=lambda: nn.Linear(3, 4))
        return make_job(params, **({"batch_size": 0, "clip_norm": -1.0} if params["momentum"] < 0.1 else {}))

    study = tune(make_job=picky)
    errors = {str(t.error) for t in study.trials if t.state == "failed"}
    assert all(not error.startswith(("trial", "job")) and "\n" not in error for error in errors)
    assert any(error.startswith("forward raised RuntimeError: mat1 and mat2") for error in errors)
    assert any(error.endswith("(and 1 more)") for error in errors)


def test_too_few_trials_for_asha_is_a_warning() -> None:
    """Of 8 one in 3 continues, which is 2, and then none: no trial would train for the 9 epochs."""
    with pytest.warns(shoal.ShoalWarning, match="num_trials=8 is less than 9: .* to reach max_epochs=9; use more"):
        study = tune(scheduler="asha", num_trials=8)
    assert all(trial.state == "pruned" for trial in study.trials)
    assert any(trial.state == "complete" for trial in tune(scheduler="asha", num_trials=9).trials)


def test_a_trial_that_diverges_costs_that_trial_alone() -> None:
    study = tune(space={**SPACE, "lr": [0.1, 1e30]})
    failed = [trial for trial in study.trials if trial.state == "failed"]
    assert failed and all("the loss became" in str(t.error) and t.params["lr"] == 1e30 for t in failed)
    assert study.best.params["lr"] == 0.1


def test_nan_scores_come_last() -> None:
    def odd(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        return math.nan

    study = tune(make_job=lambda p: make_job(p, metrics={"accuracy": odd}))
    assert {t.number for t in study.trials if t.bracket == 2 and t.epochs > 1} == {0, 1, 2}
    with pytest.raises(TuneError, match="no trial has a value of 'accuracy'"):
        study.best  # noqa: B018


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"space": {"lr": [], "momentum": [0.1]}}, "lr: "),
        ({"space": {"lr": ("log", -1.0, 1.0)}}, "lr: "),
        ({"space": {}}, "the search space is empty"),
        ({"make_job": lambda p: 3}, "trial 0: make_job returned a value of type int; return a shoal.Job"),
        ({"make_job": lambda p: None}, "trial 0: make_job returned None; return a shoal.Job"),
        ({"make_job": 3}, "make_job is 3; pass a function"),
        ({"make_job": lambda p: make_job(p, epochs=5)}, "epochs=5, and the study trains up to max_epochs=9; leave"),
        ({"make_job": lambda p: make_job(p, steps=5)}, "steps=5, and the study trains up to max_epochs=9"),
        ({"make_job": lambda p: p["nope"]}, r"no trial could be made: make_job raised KeyError: 'nope' \(test_stu"),
        ({"metric": "acuracy", "mode": "max"}, "metric is 'acuracy', which trial 0 does not have; it has loss"),
        ({"metric": "acuracy"}, "metric is 'acuracy', which trial 0 does not have; it has loss, val_loss, accuracy"),
        ({"metric": "gap", "make_job": lambda p: 1 / 0}, "does not say which way is better; .* check its spelling"),
        ({"study_name": "mine"}, "study_name is 'mine', and there is no storage; set storage='sqlite:///study.db', or"),
        ({"make_job": lambda t: t.suggest_float("lr", 0, 1)}, "called with a dict of settings; leave space out"),
        ({"space": None}, "no space was given, so make_job is called with a trial"),
        ({"seed": None}, "seed is None; use a whole number"),
        ({"seed": "7"}, "seed is '7'; use a whole number"),
        ({"mode": "up"}, "mode is 'up'"),
        ({"max_epochs": 0}, "max_epochs is 0"),
        ({"eta": 1}, "eta is 1"),
        ({"num_trials": 5}, "follows from max_epochs and eta"),
        ({"scheduler": "asha", "num_trials": 0}, "num_trials is 0; use a whole number"),
        ({"scheduler": "hyperbandit"}, "scheduler is 'hyperbandit'; use one of 'hyperband'"),
        ({"scheduler": PBT}, "or shoal.tune.ASHA()"),
        ({"scheduler": shoal.tune.Hyperband(), "eta": 2}, "eta is 2, and the scheduler is an object"),
        ({"scheduler": "none", "eta": 2, "num_trials": 3}, "eta is 2, and scheduler 'none' does not use it"),
        ({"sampler": "grid", "scheduler": "none", "num_trials": 7, "space": {"lr": [1.0], "momentum": [0.1, 0.2]}},
         "the sampler has 2 configurations"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(changes: dict[str, Any], words: str) -> None:
    with pytest.raises((TuneError, JobError), match=words) as caught:
        tune(**changes)
    assert len(str(caught.value).splitlines()) == 1


def test_a_metric_of_a_step_that_is_not_there() -> None:
    def step(model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, dict[str, float]]:
        loss = torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
        return loss, {"norm": 1.0}

    def with_step(params: dict[str, Any]) -> shoal.Job:
        return dataclasses.replace(make_job(params), loss=None, step=step, metrics={})

    assert tune(make_job=with_step, metric="norm", mode="min", max_epochs=3).best.value == 1.0
    with pytest.raises(TuneError, match="metric is 'norms', which trial 0 does not have; it has loss, norm, val_loss"):
        tune(make_job=with_step, metric="norms", mode="min", max_epochs=3)


def test_ranges_that_changed_before_a_resume_are_refused(tmp_path: Path) -> None:
    def suggesting(high: float, more: bool = False) -> Any:
        def make(trial: Any) -> shoal.Job:
            if more:
                trial.suggest_int("width", 4, 8)
            return make_job({"lr": trial.suggest_float("lr", 1e-3, high, log=True), "momentum": 0.0})

        return make

    first = tune("none", make_job=suggesting(1.0), space=None, out=tmp_path)
    assert tune("none", make_job=suggesting(1.0), space=None, out=tmp_path).best_params == first.best_params
    with pytest.raises(OutError, match=r"trial 0 was begun with lr suggested from .*1.0.*, and now .*0.5.*put"):
        tune("none", make_job=suggesting(0.5), space=None, out=tmp_path)
    with pytest.raises(OutError, match="with width suggested from nothing, and now"):
        tune("none", make_job=suggesting(1.0, more=True), space=None, out=tmp_path)


def test_with_keep_best_trials_are_compared_by_the_weights_that_they_keep() -> None:
    """Values are those of a plain loop over the networks that come out."""
    jobs = {"keep": "best", "stop": shoal.EarlyStop("accuracy", mode="max", patience=99)}
    study = tune("none", make_job=lambda params: make_job(params, **jobs), max_epochs=7, num_trials=6)
    for trial, result in zip(study.trials, study.results, strict=True):
        result.model.eval()
        with torch.no_grad():
            assert trial.value == pytest.approx(float(accuracy(result.model(VAL[0]), VAL[1])))
        assert trial.value == max(trial.values.values())
    assert any(trial.value != trial.values[7] for trial in study.trials)
    assert study.best_value == max(trial.value for trial in study.trials)


def test_with_keep_best_a_study_that_is_read_again_has_the_same_values(tmp_path: Path) -> None:
    jobs = {"keep": "best", "stop": shoal.EarlyStop("accuracy", mode="max", patience=99)}
    search = {"make_job": lambda params: make_job(params, **jobs), "max_epochs": 7, "num_trials": 6}
    first = tune("none", out=tmp_path / "study", **search)
    again = tune("none", out=tmp_path / "study", **search)
    assert any(trial.value != trial.values[7] for trial in first.trials)
    assert [trial.value for trial in again.trials] == [trial.value for trial in first.trials]
    assert again.best_params == first.best_params
