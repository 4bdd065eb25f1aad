"""An Optuna storage during one round of a pack, in which many trials report an epoch and their pruner is asked.

    with together(trials) as storage:
        for trial in trials:
            trial.report(value, step)                # collected
        errors = storage.write()                     # one transaction, if it is a database
        stop = [trial for trial in trials if trial.should_prune()]      # all trials of the study are read once

Trials and their pruner are Optuna's own, and use this in place of the study's storage.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from optuna.storages import BaseStorage

from shoal.tune._optuna import insert_values


def _delegate(name: str) -> Callable[..., Any]:
    """Return a method that calls the study's storage; what was read is read again after a write."""

    def method(self: RoundStorage, *args: Any, **more: Any) -> Any:
        result = getattr(self.storage, name)(*args, **more)
        if not name.startswith("get_"):
            self.forget()
        return result

    return method


_Delegating: Any = type("_Delegating", (BaseStorage,), {n: _delegate(n) for n in BaseStorage.__abstractmethods__})


class RoundStorage(_Delegating):  # type: ignore[misc]
    """Collects reports, and reads the study's trials once, in addition to what its pruner notes about them."""

    def __init__(self, storage: Any, study_id: int, trials: Sequence[Any] = ()) -> None:
        self.storage, self._study_id = storage, study_id
        self._reporting = {trial._trial_id: trial for trial in trials}
        self._values: list[tuple[int, int, float]] = []
        self.forget()

    def forget(self) -> None:
        """Read everything again when it is needed."""
        self._trials: dict[int, Any] | None = None
        self._answers: dict[tuple[str, Any], Any] = {}

    def write(self) -> dict[int, Exception]:
        """Write what was reported. Returns the errors by the trials' ids: of a trial that has been ended, say."""
        values, self._values = self._values, []
        self.forget()
        errors: dict[int, Exception] = {}
        if len(values) > 1 and insert_values(self.storage, values):
            return errors
        for id, step, value in values:
            try:
                self.storage.set_trial_intermediate_value(id, step, value)
            except Exception as error:
                errors[id] = error
                self._reporting[id]._cached_frozen_trial.intermediate_values.pop(step, None)  # as if it had raised
        return errors

    def set_trial_intermediate_value(self, trial_id: int, step: int, intermediate_value: float) -> None:
        self._values.append((trial_id, step, intermediate_value))

    def set_trial_system_attr(self, trial_id: int, key: str, value: Any) -> None:
        self.storage.set_trial_system_attr(trial_id, key, value)
        if self._trials is not None and trial_id in self._trials:
            changed = copy.copy(self._trials[trial_id])
            changed.system_attrs = {**changed.system_attrs, key: value}
            self._trials[trial_id] = changed

    def get_all_trials(self, study_id: int, deepcopy: bool = True, states: Container[Any] | None = None) -> list[Any]:
        if study_id != self._study_id:
            return self.storage.get_all_trials(study_id, deepcopy=deepcopy, states=states)  # type: ignore[no-any-return]
        trials = [trial for trial in self._read().values() if states is None or trial.state in states]
        return copy.deepcopy(trials) if deepcopy else trials

    def get_trial(self, trial_id: int) -> Any:
        trial = self._read().get(trial_id)
        return self.storage.get_trial(trial_id) if trial is None else copy.deepcopy(trial)

    def get_trial_system_attrs(self, trial_id: int) -> dict[str, Any]:
        trial = self._read().get(trial_id)
        return dict(self.storage.get_trial_system_attrs(trial_id) if trial is None else trial.system_attrs)

    def get_best_trial(self, study_id: int) -> Any:
        return self._once("get_best_trial", study_id)

    def get_study_id_from_name(self, study_name: str) -> Any:
        return self._once("get_study_id_from_name", study_name)

    def get_study_directions(self, study_id: int) -> Any:
        return self._once("get_study_directions", study_id)

    def _read(self) -> dict[int, Any]:
        if self._trials is None:
            trials = self.storage.get_all_trials(self._study_id, deepcopy=False)
            self._trials = {trial._trial_id: trial for trial in trials}
        return self._trials

    def _once(self, name: str, argument: Any) -> Any:
        if (name, argument) not in self._answers:
            self._answers[name, argument] = getattr(self.storage, name)(argument)
        return self._answers[name, argument]


@contextmanager
def together(trials: Sequence[Any]) -> Iterator[RoundStorage]:
    """Let these trials of one study, and its pruner, use a RoundStorage inside this context."""
    study = trials[0].study
    storage = RoundStorage(study._storage, study._study_id, trials)
    shared = copy.copy(study)
    shared._storage = storage
    before = [(trial, trial.study, trial.storage) for trial in trials]
    try:
        for trial in trials:
            trial.study, trial.storage = shared, storage
        yield storage
    finally:
        for trial, own_study, own_storage in before:
            trial.study, trial.storage = own_study, own_storage
