"""A study written to one of Optuna's storages, for optuna-dashboard and all that reads Optuna's studies.

    storage = OptunaStorage("sqlite:///study.db", "digits", mode="max", space=space, run="2024-05-01/1")
    storage.attach(trials)              # after a restart: those that the study has had
    storage.report(trial, 3, 0.91)      # at once: it is only remembered
    storage.finish(trial)
    storage.close()

Reports are collected and written every few seconds by a thread of their own, all in one transaction where the storage
can do so: training does not wait for a database. What a kill has left unwritten, `attach` adds after the restart. Each
trial carries the key of its run and its number there, written in the same transaction that creates it, so that none is
ever written twice.
"""

from __future__ import annotations

import math
import os
import socket
import threading
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from shoal.errors import JobError, describe, warn
from shoal.storage.lock import alive
from shoal.tune._optuna import (
    close_storage,
    frozen,
    load_optuna,
    open_storage,
    results_of,
    silent_log,
    state_of,
    value_writer,
)
from shoal.tune.distributions import from_optuna
from shoal.tune.space import Space
from shoal.tune.trial import State, Trial

KEY = "shoal:trial"
"""The user attribute that identifies a stored trial: the run's key and the trial's number in it."""


PROCESS = "shoal:process"
"""The user attribute of a trial that nothing resumes: the process that trains it, and its machine."""


HIDDEN = ("space", "sampler", "objectives", "no_job")
"""Names in a trial's attrs that are not written to the storage."""


class OptunaStorage:
    """A mirror of one study's trials in an Optuna storage."""

    def __init__(
        self,
        storage: Any,
        study: str = "shoal",
        *,
        mode: str | Sequence[str] = "min",
        metric: str | None = None,
        space: Space | None = None,
        run: str | None = None,
        every: float = 2.0,
    ) -> None:
        """Open the storage, and the study of this name in it; it is created if there is none.

        Args:
            storage: A URL such as "sqlite:///study.db", "postgresql+psycopg://user@host/database" or
                "journal:///study.log", an Optuna storage object, or an Optuna study.
            study: The study's name in the storage.
            mode: "min" or "max", for each metric; an existing study must have the same.
            metric: The name of the values, for people.
            space: The search space; None if make_job suggests its settings.
            run: Identifies the trials of this run, also after a restart. None: nothing resumes this run, and trials
                that it leaves running are marked as failed by the next one that opens the study on this machine.
            every: Seconds between two writes.
        """
        if space is not None:
            space.check_storable()
        self.space, self.every, self.run = space, every, run if run is not None else uuid.uuid4().hex[:12]
        self._marks = {} if run is not None else {PROCESS: this_process()}
        self.study = _open(storage, study, mode, metric)
        _check_compatible(self.study, space)
        self._storage, self._id = self.study._storage, self.study._study_id
        self._write_values = value_writer(self._storage)
        self._trials: dict[int, Trial] = {}  # trials with something to write
        self._stored: dict[int, _Stored] = {}
        self._begun: dict[int, datetime] = {}  # when this run first saw each trial
        self._lock = threading.Lock()  # guards _trials and _begun
        self._writing = threading.Lock()
        self._wake, self._closed, self._failed = threading.Event(), False, False
        self._unsure = False  # whether a write was interrupted, so that the storage has to be read again
        self._thread: threading.Thread | None = None
        fail_orphans(self.study)

    def previous(self) -> list[Trial]:
        """Return ended trials of the study that are not this run's, for a sampler to learn from.

        Their numbers are negative, so that none is mistaken for a trial of this run.
        """
        trials = self.study.get_trials(deepcopy=False)
        others = [each for each in trials if each.state.is_finished() and self._number(each) is None]
        return [_as_trial(each, i - len(others)) for i, each in enumerate(others)]

    def attach(self, trials: Iterable[Trial]) -> None:
        """Update the storage with these trials of a restarted study: nothing is lost or written twice.

        Trials of this run that are running in the storage and are not among them have failed, since nothing trains them
        any more.
        """
        by_number = {trial.number: trial for trial in trials}
        unknown = {number: each for number, each in self._synchronise().items() if number not in by_number}
        for number, each in unknown.items():
            del self._stored[number]  # a trial of this number would be another one
            if not each.state.is_finished():
                _abandon(self._storage, each._trial_id)
        with self._lock:
            self._trials |= {n: t for n, t in by_number.items() if not (n in self._stored and self._stored[n].finished)}
        self.flush()

    def _synchronise(self) -> dict[int, Any]:
        """Read what the storage has of this run, and return its trials by number."""
        by_number = {}
        for each in self.study.get_trials(deepcopy=False):
            number = self._number(each)
            if number is not None:
                self._stored[number] = _Stored(each._trial_id, set(each.intermediate_values), each.state.is_finished())
                by_number[number] = each
        return by_number

    def begin(self, trial: Trial) -> None:
        """Show a trial as running."""
        self._note(trial)

    def report(self, trial: Trial, epoch: int, value: float) -> None:
        """Report a trial's value after an epoch; it is, or will be, in `trial.values` too."""
        with self._lock:
            trial.values.setdefault(epoch, value)
        self._note(trial)

    def finish(self, trial: Trial) -> None:
        """Report that a trial has ended: complete, pruned or failed."""
        self._note(trial)

    def flush(self) -> None:
        """Write everything that has been reported, now.

        Raises what the storage raises; nothing is lost then, and the next call tries again.
        """
        with self._writing:
            with self._lock:
                to_write = [_copy(trial) for trial in self._trials.values()]
                self._trials.clear()
            try:
                if self._unsure:
                    self._synchronise()
                self._unsure = True
                self._write(to_write)
                self._unsure = False
            except BaseException:
                with self._lock:
                    self._trials = {trial.number: trial for trial in to_write} | self._trials
                raise

    def close(self) -> None:
        """Write what is left, and end the thread. Trials in progress stay as running, since the study may be resumed.

        If the storage cannot be written, it only warns: the trained networks are worth more than this copy.
        """
        with self._lock:
            self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        try:
            self.flush()
        except Exception as error:
            with self._lock:
                missing = len(self._trials)
            line = f"the storage lacks the last reports of {missing} trials: {_cause(error)}; with out=, run it again"
            warn(line)
        close_storage(self._storage)

    def __enter__(self) -> OptunaStorage:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _note(self, trial: Trial) -> None:
        with self._lock:
            self._trials[trial.number] = trial
            self._begun.setdefault(trial.number, datetime.now())
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._flush_often, name="shoal storage", daemon=True)
                self._thread.start()

    def _flush_often(self) -> None:
        while not self._wake.wait(self.every):
            try:
                self.flush()
                self._failed = False
            except Exception as error:
                if not self._failed:
                    line = f"the storage cannot be written: {_cause(error)}; training continues, and it is tried again"
                    warn(line)
                self._failed = True

    def _write(self, trials: list[Trial]) -> None:
        rows: list[tuple[int, int, float]] = []
        for trial in trials:
            if trial.number not in self._stored:
                self._create(trial)
            stored = self._stored[trial.number]
            if not stored.finished:
                missing = [epoch for epoch in trial.values if epoch not in stored.epochs]
                rows += [(stored.id, epoch, trial.values[epoch]) for epoch in missing]
        self._write_values(rows)
        written = {(id, epoch) for id, epoch, _ in rows}
        for trial in trials:
            stored = self._stored[trial.number]
            stored.epochs |= {epoch for epoch in trial.values if (stored.id, epoch) in written}
            state = state_of(trial)
            if state.is_finished() and not stored.finished:
                for name, value in _notes(trial).items():
                    self._storage.set_trial_user_attr(stored.id, name, value)
                self._storage.set_trial_state_values(stored.id, state, results_of(trial))
                stored.finished = True

    def _create(self, trial: Trial) -> None:
        """Create the trial as it is, in one transaction."""
        notes = {KEY: f"{self.run}/{trial.number}", **self._marks, "bracket": trial.bracket, **_notes(trial)}
        template = frozen(trial, self.space, user_attrs=notes)
        template.datetime_start = self._begun.get(trial.number, template.datetime_start)
        id = self._storage.create_new_trial(self._id, template_trial=template)
        self._stored[trial.number] = _Stored(id, set(trial.values), state_of(trial).is_finished())

    def _number(self, stored: Any) -> int | None:
        """Return the trial's number in this run; None if it belongs to another run."""
        run, _, number = str(stored.user_attrs.get(KEY, "")).rpartition("/")
        return int(number) if run == self.run and number.isdigit() else None


class _Stored:
    """What the storage has of a trial."""

    __slots__ = ("epochs", "finished", "id")

    def __init__(self, id: int, epochs: set[int], finished: bool) -> None:
        self.id, self.epochs, self.finished = id, epochs, finished


def _cause(error: BaseException) -> str:
    """Return the underlying database error in one line, since Optuna's own message is the same for all errors."""
    while error.__cause__ is not None:
        error = error.__cause__
    return describe(error)


def _open(storage: Any, name: str, mode: str | Sequence[str], metric: str | None) -> Any:
    optuna = load_optuna("a storage")
    wanted_directions = [f"{item}imize" for item in ([mode] if isinstance(mode, str) else mode)]
    if isinstance(storage, optuna.Study):
        study = storage
    else:
        with silent_log():
            study = optuna.create_study(
                storage=open_storage(storage), study_name=name, directions=wanted_directions, load_if_exists=True
            )
    directions = [item.name.lower() for item in study.directions]
    if directions != wanted_directions:
        raise JobError(
            f"the study {study.study_name!r} in the storage is to {' and '.join(directions)}, this one to "
            f"{' and '.join(wanted_directions)}; use another study name"
        )
    if metric is not None and study.user_attrs.get("metric") != metric:
        study.set_user_attr("metric", metric)  # set_metric_names would rename the column of data frames
    return study


def _check_compatible(study: Any, space: Space | None) -> None:
    """Raise a JobError if trials of the study had a distribution for a setting that Optuna cannot combine with this
    one."""
    from optuna.distributions import check_distribution_compatibility

    lines = []
    for name, new in (space.to_optuna() if space is not None else {}).items():
        old = next((t.distributions[name] for t in study.get_trials(deepcopy=False) if name in t.distributions), None)
        try:
            if old is not None:
                check_distribution_compatibility(old, new)
        except ValueError:
            lines.append(
                f"{name}: the study {study.study_name!r} has it from {old}; use the same, or another study name"
            )
    if lines:
        raise JobError(*lines)


def _notes(trial: Trial) -> dict[str, Any]:
    """Return what people see of a trial that has ended, in addition to its values."""
    if not state_of(trial).is_finished():
        return {}
    value = trial.value
    error = trial.error or (f"its value is {value}" if trial.state == "complete" and math.isnan(value) else None)
    more = {name: value for name, value in trial.attrs.items() if name not in HIDDEN}
    return {"rung": trial.rung, **more} | ({"error": error} if error else {})


def this_process() -> str:
    """Return the value of the user attribute PROCESS for trials of this process."""
    return f"{os.getpid()} {socket.gethostname()}"


def fail_orphans(study: Any) -> None:
    """Mark trials that a killed process on this machine has left running as failed."""
    for each in study.get_trials(deepcopy=False):
        if not each.state.is_finished() and _is_orphaned(each.user_attrs.get(PROCESS)):
            _abandon(study._storage, each._trial_id)


def _abandon(storage: Any, id: int) -> None:
    from optuna.trial import TrialState

    storage.set_trial_user_attr(id, "error", "the run that trained it ended")
    storage.set_trial_state_values(id, TrialState.FAIL)


def _is_orphaned(process: Any) -> bool:
    """Return whether the process that trained a trial has ended; False for one on another machine, where it is not
    known."""
    pid, _, host = str(process or "").partition(" ")
    return pid.isdigit() and host == socket.gethostname() and not alive(int(pid))


def _copy(trial: Trial) -> Trial:
    """Return a copy of the trial, since its study may change it while it is written."""
    return replace(trial, params=dict(trial.params), values=dict(trial.values), attrs=dict(trial.attrs))


def _as_trial(stored: Any, number: int) -> Trial:
    """Convert an Optuna trial; the values of several objectives are in its attrs."""
    states: dict[str, State] = {"COMPLETE": "complete", "PRUNED": "pruned"}
    values = {int(step): float(value) for step, value in sorted(stored.intermediate_values.items())}
    if stored.state.name == "COMPLETE" and stored.values is not None and len(stored.values) == 1:
        values[max(values, default=1)] = float(stored.values[0])
    attrs: dict[str, Any] = {
        "space": {name: from_optuna(each).to_json() for name, each in stored.distributions.items()}
    }
    if stored.values is not None and len(stored.values) > 1:
        attrs["objectives"] = list(stored.values)
    return Trial(
        number,
        dict(stored.params),
        states.get(stored.state.name, "failed"),
        values,
        int(stored.user_attrs.get("bracket", 0)),
        int(stored.user_attrs.get("rung", 0)),
        stored.user_attrs.get("error"),
        attrs,
    )
