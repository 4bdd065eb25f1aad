"""`shoal.tune.optimize` on SQLite, on a journal file and on PostgreSQL."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoal

optuna = pytest.importorskip("optuna")

from shoal.tune import _optuna  # noqa: E402
from shoal.tune.round_storage import together  # noqa: E402

State = optuna.trial.TrialState
X = torch.randn(32, 3, generator=torch.Generator().manual_seed(1))


def objective(trial: Any) -> Any:
    job = shoal.Job(
        model=lambda: nn.Linear(3, 1), data=(X, X.sum(1, keepdim=True)), loss=F.mse_loss, optimizer=torch.optim.SGD,
        hparams={"lr": trial.suggest_float("lr", 1e-3, 0.3, log=True)}, batch_size=8, epochs=4,
    )  # fmt: skip
    return shoal.tune.train_trial(trial, job, "loss").value("loss")


def test_values_and_decisions(url: str) -> None:
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2)
    with _optuna.silent_log():
        study = optuna.create_study(
            storage=_optuna.open_storage(url), sampler=optuna.samplers.RandomSampler(seed=1), pruner=pruner
        )
        memory = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1), pruner=pruner)
    for each in (study, memory):
        shoal.tune.optimize(each, objective, n_trials=8, device="cpu", deterministic=True)
    assert {t.state for t in study.trials} == {State.COMPLETE, State.PRUNED}
    for stored, expected in zip(study.trials, memory.trials, strict=True):
        assert stored.state == expected.state and stored.intermediate_values == expected.intermediate_values
        assert stored.system_attrs == expected.system_attrs
    trials = [study.ask() for _ in range(3)]
    study.tell(trials[1].number, state=State.FAIL)
    with together(trials) as storage:
        for trial in trials:
            trial.report(0.5, 1)
        errors = storage.write()
    assert [type(error) for error in errors.values()] == [optuna.exceptions.UpdateFinishedTrialError]
    assert [len(t.intermediate_values) for t in study.trials[-3:]] == [1, 0, 1]
    _optuna.close_storage(study._storage)
