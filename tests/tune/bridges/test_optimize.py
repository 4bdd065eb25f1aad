"""An Optuna objective for one trial, packed."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.errors import JobError

optuna = pytest.importorskip("optuna")

from shoal.tune.bridges import optimize as module  # noqa: E402
from shoal.tune.bridges.optimize import TrainingFailed, optimize, train_trial  # noqa: E402

State = optuna.trial.TrialState
X = torch.randn(48, 3, generator=torch.Generator().manual_seed(1))
Y = X @ torch.tensor([[1.0], [-2.0], [0.5]])


@pytest.fixture(autouse=True)
def _quiet() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)


def job(lr: float, **more: Any) -> shoal.Job:
    common: dict[str, Any] = {
        "model": lambda: nn.Linear(3, 1), "data": (X[:32], Y[:32]), "val": (X[32:], Y[32:]), "loss": F.mse_loss,
        "optimizer": torch.optim.SGD, "hparams": {"lr": lr}, "batch_size": 8, "epochs": 4,
    }  # fmt: skip
    return shoal.Job(**common | more)


def objective(trial: Any) -> float | None:
    lr = trial.suggest_float("lr", 1e-3, 0.3, log=True)
    return train_trial(trial, job(lr), "val_loss").value("val_loss")


def make_study(**more: Any) -> Any:
    return optuna.create_study(**{"sampler": optuna.samplers.RandomSampler(seed=1), "pruner": None} | more)


def test_the_same_study_packed_and_one_after_another() -> None:
    """One changed line: the same configurations, the same curves."""
    alone, packed = (make_study(pruner=optuna.pruners.NopPruner()) for _ in range(2))
    alone.optimize(lambda trial: objective(trial), n_trials=7)
    sizes = []
    real = shoal.training.train
    with mock.patch.object(module, "train", lambda jobs, **more: sizes.append(len(jobs)) or real(jobs, **more)):
        optimize(packed, objective, n_trials=7, at_once=5, device="cpu", deterministic=True)
    assert sizes == [5, 2]
    assert [t.params for t in packed.trials] == [t.params for t in alone.trials]
    for one, other in zip(packed.trials, alone.trials, strict=True):
        assert one.state == State.COMPLETE and set(one.intermediate_values) == {1, 2, 3, 4}
        assert one.values == pytest.approx(other.values, rel=1e-5)


class PruneOdd(optuna.pruners.BasePruner):
    """After two epochs, every trial with an odd number."""

    def prune(self, study: Any, trial: Any) -> bool:
        return trial.number % 2 == 1 and trial.last_step >= 2


def test_pruned_trials_leave_the_pack() -> None:
    study = make_study(pruner=PruneOdd())
    optimize(study, objective, n_trials=6, device="cpu")
    assert [t.state for t in study.trials] == [State.COMPLETE, State.PRUNED] * 3
    assert [max(t.intermediate_values) for t in study.trials] == [4, 2] * 3


def test_alone_it_prunes_too() -> None:
    study = make_study(pruner=PruneOdd())
    study.optimize(objective, n_trials=2)
    assert [t.state for t in study.trials] == [State.COMPLETE, State.PRUNED]


def test_objectives_run_one_at_a_time_and_may_train_twice() -> None:
    """Folds of a trial: each call of train_trial is a pack of all trials'. Random numbers are drawn as if alone."""
    inside, drawn, threads = 0, [], set()

    def folds(trial: Any) -> float:
        nonlocal inside
        losses = []
        for fold in range(2):
            inside += 1
            assert inside == 1
            torch.manual_seed(trial.number)
            drawn.append(float(torch.rand(())))
            threads.add(threading.get_ident())
            inside -= 1
            result = train_trial(trial, job(0.1, seed=fold, epochs=2), "val_loss")
            losses.append(result.value("val_loss"))
        return float(sum(losses)) / 2

    study = make_study()
    optimize(study, folds, n_trials=3, device="cpu")
    torch.manual_seed(0)
    assert len(threads) == 3 and len(drawn) == 6 and drawn[:3] == drawn[3:]
    assert [t.state for t in study.trials] == [State.COMPLETE] * 3
    assert all(set(t.intermediate_values) == {1, 2, 3, 4} for t in study.trials), "two epochs of two folds"


def test_several_objectives() -> None:
    def two(trial: Any) -> tuple[float, float]:
        lr = trial.suggest_float("lr", 1e-3, 0.3, log=True)
        result = train_trial(trial, job(lr), "val_loss")
        return float(result.value("val_loss") or 0), lr

    study = optuna.create_study(directions=["minimize", "minimize"], sampler=optuna.samplers.NSGAIISampler(seed=1))
    optimize(study, two, n_trials=4, device="cpu")
    assert all(len(t.values) == 2 for t in study.trials) and study.best_trials


def test_a_mistake_costs_its_trial_alone() -> None:
    def step(model: nn.Module, batch: Any) -> Tensor:
        raise RuntimeError("no such layer")

    def faulty(trial: Any) -> Any:
        number = trial.number
        if number == 1:
            raise KeyError("data")
        if number == 2:
            return train_trial(trial, job(0.1, val=(X[32:, :2], Y[32:])), "val_loss").value("val_loss")
        if number == 3:
            return math.nan
        if number == 4:
            return train_trial(trial, job(0.1), "accuracy")
        if number == 5:
            return train_trial(trial, {"lr": 0.1}, "val_loss")  # type: ignore[arg-type]
        return objective(trial)

    study = make_study()
    optimize(study, faulty, n_trials=7, catch=(KeyError, JobError, TrainingFailed), device="cpu")
    assert [t.state for t in study.trials] == [State.COMPLETE, *[State.FAIL] * 5, State.COMPLETE]
    assert study.trials[1].user_attrs["error"] == "KeyError: 'data'"
    assert study.trials[3].user_attrs["error"] == "its value is nan"
    assert "has no 'accuracy'" in study.trials[4].user_attrs["error"]
    assert "dict is not a job; pass a shoal.Job" in study.trials[5].user_attrs["error"]


def test_what_is_not_caught_ends_the_study_after_the_group() -> None:
    def faulty(trial: Any) -> Any:
        if trial.number == 1:
            raise KeyError("data")
        return objective(trial)

    study = make_study()
    with pytest.raises(KeyError, match="data"):
        optimize(study, faulty, n_trials=6, at_once=3, device="cpu")
    assert [t.state for t in study.trials] == [State.COMPLETE, State.FAIL, State.COMPLETE]


def test_an_interruption_leaves_no_trial_running() -> None:
    cleaned = []

    def careful(trial: Any) -> Any:
        try:
            return objective(trial)
        finally:
            cleaned.append(trial.number)

    study = make_study()
    with mock.patch.object(module, "train", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        optimize(study, careful, n_trials=3, device="cpu")
    assert [t.state for t in study.trials] == [State.FAIL] * 3 and cleaned == [0, 1, 2]
    assert study.trials[0].user_attrs["error"] == "the study was interrupted"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("trial ")]


def test_callbacks_see_trials_that_ended() -> None:
    seen = []
    optimize(make_study(), objective, 2, callbacks=[lambda study, trial: seen.append(trial.state)], device="cpu")
    assert seen == [State.COMPLETE] * 2


@pytest.mark.parametrize("packed", [True, False])
def test_a_job_that_diverges_is_a_pruned_trial(packed: bool) -> None:
    """In both loops, and the study continues: large learning rates are usual in a search."""

    def wild(trial: Any) -> Any:
        lr = 1e30 if trial.number == 1 else 0.01
        return train_trial(trial, job(lr), "val_loss").value("val_loss")

    study = make_study()
    if packed:
        optimize(study, wild, n_trials=3, device="cpu")
    else:
        study.optimize(wild, n_trials=3)
    assert [t.state for t in study.trials] == [State.COMPLETE, State.PRUNED, State.COMPLETE]
    assert study.trials[1].user_attrs["error"].startswith("it diverged: the loss became")


def test_stop_ends_the_study_after_its_group() -> None:
    def stopping(trial: Any) -> Any:
        if trial.number == 1:
            trial.study.stop()
        return objective(trial)

    by_objective, by_callback = make_study(), make_study()
    optimize(by_objective, stopping, n_trials=6, at_once=2, device="cpu")
    assert [t.state for t in by_objective.trials] == [State.COMPLETE] * 2
    most = optuna.study.MaxTrialsCallback(4, states=(State.COMPLETE,))
    optimize(by_callback, objective, n_trials=8, at_once=2, callbacks=[most], device="cpu")
    assert len(by_callback.trials) == 4
    optimize(by_callback, objective, n_trials=2, device="cpu")  # a stop before does not count
    assert len(by_callback.trials) == 6


def test_a_grid_of_optuna_ends_the_study() -> None:
    study = make_study(sampler=optuna.samplers.GridSampler({"lr": [0.01, 0.1]}, seed=1))
    optimize(study, objective, n_trials=6, at_once=2, device="cpu")
    assert sorted(t.params["lr"] for t in study.trials) == [0.01, 0.1]


@pytest.mark.parametrize(
    ("name", "words"),
    [("timeout", "n_trials says"), ("n_jobs", "at_once says"), ("show_progress_bar", "progress=True"),
     ("devise", "its settings are those of shoal.train: device, ")],
)  # fmt: skip
def test_unknown_arguments(name: str, words: str) -> None:
    study = make_study()
    with pytest.raises(TypeError, match=f"^optimize: there is no argument '{name}'; .*{words}"):
        optimize(study, objective, 2, **{name: 3})
    assert not study.trials


def test_mistakes_in_the_call() -> None:
    with pytest.raises(ValueError, match="n_trials is 0; use a whole number, 1 or more"):
        optimize(make_study(), objective, 0)
    with pytest.raises(ValueError, match="study is None; pass an Optuna study"):
        optimize(None, objective, 1)
    with pytest.raises(ValueError, match="out is one folder for one group of trials, and there are 2 groups"):
        optimize(make_study(), objective, 5, at_once=4, out="nowhere")

    def own_settings(trial: Any) -> Any:
        return train_trial(trial, job(0.1), "val_loss", device="cpu")

    with pytest.raises(ValueError, match="device would apply to one trial of a pack; pass device to optimize"):
        optimize(make_study(), own_settings, 1)


@pytest.mark.parametrize("first_step", [0, 1])
def test_the_step_of_the_first_epoch(first_step: int) -> None:
    """A study whose loop counted epochs from 0 continues with the same steps."""
    study = make_study()

    def folds(trial: Any) -> float | None:
        for lr in (0.1, 0.01):
            result = train_trial(trial, job(lr, epochs=2), "val_loss", first_step=first_step)
        return result.value("val_loss")

    optimize(study, folds, n_trials=2, device="cpu")
    assert all(sorted(t.intermediate_values) == [n + first_step for n in range(4)] for t in study.trials)
    with pytest.raises(ValueError, match="first_step is -1"):
        train_trial(study.ask(), job(0.1), "val_loss", first_step=-1)


KILLED = """
import os, signal, sys
import optuna, torch.nn.functional as F
from torch import nn, zeros
import shoal
from shoal.tune.bridges.optimize import optimize, train_trial

def objective(trial):
    trial.suggest_float("lr", 1e-3, 0.3, log=True)
    if trial.number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    job = shoal.Job(model=nn.Linear(3, 1), data=(zeros(8, 3), zeros(8, 1)), loss=F.mse_loss, epochs=1)
    return train_trial(trial, job, "loss").value("loss")

optimize(optuna.load_study(study_name="s", storage=sys.argv[1]), objective, n_trials=4)
"""


def test_trials_that_a_killed_process_left_running_are_marked_as_failed(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path / 'study.db'}"
    study = make_study(storage=storage, study_name="s")
    other = study.ask()  # another process may train it
    killed = subprocess.run([sys.executable, "-c", KILLED, storage], capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert [t.state for t in study.trials] == [State.RUNNING] * 5
    optimize(study, objective, n_trials=2, device="cpu")
    states = [t.state for t in study.trials]
    assert states == [State.RUNNING, *[State.FAIL] * 4, *[State.COMPLETE] * 2]
    assert study.trials[1].user_attrs["error"] == "the run that trained it ended"
    assert study.trials[other.number].user_attrs == {}
