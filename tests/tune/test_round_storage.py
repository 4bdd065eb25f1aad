"""Optuna's trials and pruners on a RoundStorage."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

optuna = pytest.importorskip("optuna")

from shoal.tune import _optuna  # noqa: E402
from shoal.tune.round_storage import RoundStorage, together  # noqa: E402

State = optuna.trial.TrialState


@pytest.fixture(params=["memory", "sqlite", "journal"])
def study(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    storage = optuna.storages.InMemoryStorage()
    if request.param != "memory":
        storage = _optuna.open_storage(f"{request.param}:///{tmp_path}/study.{request.param}")
    with _optuna.silent_log():
        return optuna.create_study(storage=storage, pruner=optuna.pruners.NopPruner())


def test_values_are_written_together(study: Any) -> None:
    trials = [study.ask() for _ in range(4)]
    given = [0.5, math.inf, -math.inf, math.nan]
    for step in (3, 1):
        with together(trials) as storage:
            for trial, value in zip(trials, given, strict=True):
                trial.report(value, step)
            assert storage.write() == {}
    for trial, stored, value in zip(trials, study.trials, given, strict=True):
        assert set(stored.intermediate_values) == set(trial._cached_frozen_trial.intermediate_values) == {1, 3}
        assert stored.intermediate_values[1] == pytest.approx(value, nan_ok=True)


def test_afterwards_trials_use_their_storage_again(study: Any) -> None:
    trials = [study.ask() for _ in range(2)]
    held = study._storage
    with pytest.raises(KeyError), together(trials):
        assert trials[0].storage is not held and study._storage is held
        raise KeyError
    assert all(trial.study is study and trial.storage is held for trial in trials)


def test_a_trial_that_was_ended_elsewhere_fails_alone(study: Any) -> None:
    trials = [study.ask() for _ in range(3)]
    study.tell(1, state=State.FAIL)
    with together(trials) as storage:
        for trial in trials:
            trial.report(0.5, 1)
        errors = storage.write()
    assert {id: type(e).__name__ for id, e in errors.items()} == {trials[1]._trial_id: "UpdateFinishedTrialError"}
    assert [list(t.intermediate_values) for t in study.trials] == [[1], [], [1]]


def test_a_value_that_is_stored_already_is_no_error(study: Any) -> None:
    """The database's answer was lost."""
    trials = [study.ask() for _ in range(2)]
    study._storage.set_trial_intermediate_value(trials[0]._trial_id, 1, 0.5)
    with together(trials) as storage:
        for trial in trials:
            trial.report(0.5, 1)
        assert storage.write() == {}
    assert [t.intermediate_values for t in study.trials] == [{1: 0.5}] * 2


def test_what_a_pruner_notes_is_seen_in_the_same_round(study: Any) -> None:
    trials = [study.ask() for _ in range(2)]
    held = study._storage
    with (
        together(trials) as storage,
        mock.patch.object(held, "get_all_trials", side_effect=held.get_all_trials) as reads,
    ):
        shared = trials[0].study
        before = copy.deepcopy(shared.get_trials(deepcopy=False))
        storage.set_trial_system_attr(trials[1]._trial_id, "rung", 0.25)
        assert shared.get_trials()[1].system_attrs == {"rung": 0.25} and before[1].system_attrs == {}
        assert storage.get_trial_system_attrs(trials[1]._trial_id) == {"rung": 0.25}
        assert storage.get_trial(trials[1]._trial_id).system_attrs == {"rung": 0.25}
        assert reads.call_count == 1
        study.ask()  # another process
        assert len(shared.get_trials()) == 2
        shared.set_user_attr("note", 1)
        assert len(shared.get_trials()) == 3 and study.user_attrs == {"note": 1}, "read again after another write"
    assert study.trials[1].system_attrs == {"rung": 0.25}


def test_another_study_of_the_storage(study: Any) -> None:
    with _optuna.silent_log():
        other = optuna.create_study(storage=study._storage, study_name="other")
    other.ask()
    storage = RoundStorage(study._storage, study._study_id)
    assert len(storage.get_all_trials(other._study_id)) == 1 and storage.get_all_trials(study._study_id) == []
    assert storage.get_trial(other.trials[0]._trial_id) == other.trials[0]
    assert storage.get_trial_system_attrs(other.trials[0]._trial_id) == {}
    assert storage.get_study_id_from_name("other") == other._study_id
