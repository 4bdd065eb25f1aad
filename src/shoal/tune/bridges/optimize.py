"""Run an Optuna objective that trains one network for many trials at a time.

    def objective(trial):
        job = shoal.Job(..., hparams={"lr": trial.suggest_float("lr", 1e-4, 1e-1, log=True)})
        return train_trial(trial, job, "accuracy").value("accuracy")

    study.optimize(objective, n_trials=100)         # one after another
    optimize(study, objective, n_trials=100)        # packed

Each objective has a thread, and only one of them runs at any time: up to its call of `train_trial`, where it waits
until all others have reached theirs. Their jobs are then trained as one pack, and the objectives continue, one after
another. Code in an objective needs no locks, and its random numbers do not depend on how threads are scheduled.
"""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from shoal.errors import JobError, describe
from shoal.jobs.job import Job
from shoal.results import Result, Results
from shoal.training import train
from shoal.tune.bridges.reports import Reports, Request
from shoal.tune.bridges.reports import TrainingFailed as TrainingFailed
from shoal.tune.optuna_storage import PROCESS, fail_orphans, this_process

AT_ONCE = 32
"""The default number of trials that train together."""
SETTINGS = [name for name in inspect.signature(train).parameters if name not in ("jobs", "callbacks")]
"""Arguments that `optimize` passes to `shoal.train`."""
INSTEAD = {
    "timeout": "n_trials says when it ends",
    "n_jobs": "at_once says how many trials train together",
    "show_progress_bar": "use progress=True",
    "gc_after_trial": "leave it out",
}
"""Arguments of `study.optimize` that `optimize` does not have, and what to do instead."""


class _Interrupted(BaseException):
    """Ends an objective whose study is interrupted."""


def train_trial(trial: Any, job: Job, metric: str, *, first_step: int = 1, **settings: Any) -> Result:
    """Train a job for an Optuna trial, report `metric` after each epoch that has it, and stop if the pruner says so.

    An objective may train several jobs one after another; their epochs are reported as one sequence. Under `optimize`,
    the jobs of many trials are trained together, with the settings given there. Elsewhere, as under `study.optimize`,
    the job is trained alone with `settings`, those of `shoal.train`.

    Args:
        trial: The Optuna trial.
        job: What it trains.
        metric: The value to report: "loss", "val_loss", or one of the job's metrics.
        first_step: The step that the first epoch is reported as. Pruners compare values of the same step: use 0 to
            continue a study whose own loop reported its first epoch as step 0.
        settings: Settings of `shoal.train`, if the trial is trained alone.

    Raises:
        optuna.TrialPruned: If the study's pruner ended the training, or the job diverged before it had a value.
        TrainingFailed: If the job failed.
    """
    if not isinstance(job, Job):
        raise JobError(f"train_trial: {type(job).__name__} is not a job; pass a shoal.Job")
    if isinstance(first_step, bool) or not isinstance(first_step, int) or first_step < 0:
        raise ValueError(f"train_trial: first_step is {first_step!r}; use a whole number, 0 or more")
    objective = _current.objective
    if objective is None:
        request = Request(trial, replace(job, name=f"trial {trial.number}"), metric, first_step)
        _train([request], settings)
    else:
        if settings:
            names = ", ".join(settings)
            raise ValueError(f"train_trial: {names} would apply to one trial of a pack; pass {names} to optimize")
        request = objective.wait(Request(trial, replace(job, name=f"trial {trial.number}"), metric, first_step))
    return request.outcome()


def optimize(
    study: Any,
    objective: Callable[[Any], Any],
    n_trials: int,
    *,
    at_once: int = AT_ONCE,
    catch: Iterable[type[Exception]] | type[Exception] = (),
    callbacks: Sequence[Callable[[Any, Any], None]] = (),
    **settings: Any,
) -> None:
    """Run `study.optimize` with the jobs of many trials trained together.

    Args:
        study: An Optuna study: its sampler, pruner and storage are used as they are.
        objective: A function of a trial that calls `train_trial`, and returns its value or values.
        n_trials: How many trials to run.
        at_once: How many of them are drawn, and trained, at the same time. The sampler learns from a group when it
            has ended.
        catch: Exceptions that fail only their trial. Others end the study when the current trials have ended.
        callbacks: Called with the study and the trial when a trial has ended. `study.stop()` in one of them, in an
            objective or in a sampler ends the study after the current group.
        settings: Settings of `shoal.train`, such as device or memory.
    """
    if not callable(getattr(study, "ask", None)) or not callable(getattr(study, "tell", None)):
        raise ValueError(f"study is {study!r}; pass an Optuna study: optuna.create_study(direction='maximize')")
    for name, value in (("n_trials", n_trials), ("at_once", at_once)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}; use a whole number, 1 or more")
    _check_settings(settings)
    if settings.get("out") is not None and n_trials > at_once:
        raise ValueError(
            f"out is one folder for one group of trials, and there are {-(-n_trials // at_once)} groups; leave it out "
            "(an Optuna storage has the values), or set at_once=n_trials"
        )
    fail_orphans(study)
    caught = (catch,) if isinstance(catch, type) else tuple(catch)
    study._stop_flag = False
    with _stoppable(study):
        for first in range(0, n_trials, at_once):
            group = [_Objective(_ask(study), objective) for _ in range(min(at_once, n_trials - first))]
            _run_group(study, group, settings, caught, callbacks)
            if study._stop_flag:
                break


def _run_group(
    study: Any,
    group: Sequence[_Objective],
    settings: dict[str, Any],
    caught: tuple[type[Exception], ...],
    callbacks: Sequence[Callable[[Any, Any], None]],
) -> None:
    """Run some objectives together, and tell Optuna how they ended. Raise the first exception that is not caught."""
    try:
        _advance_all(group, settings)
    except BaseException:
        for each in group:
            each.interrupt()
            each.finish(study)
        raise
    errors = [each.finish(study, callbacks) for each in group]
    for error in errors:
        if error is not None and not isinstance(error, caught):
            raise error


@contextmanager
def _stoppable(study: Any) -> Iterator[None]:
    """Let this thread call `study.stop()`, as callbacks, objectives and samplers do under `study.optimize`."""
    flags = getattr(study, "_thread_local", None)
    before = getattr(flags, "in_optimize_loop", False)
    if flags is not None:
        flags.in_optimize_loop = True
    try:
        yield
    finally:
        if flags is not None:
            flags.in_optimize_loop = before


def _ask(study: Any) -> Any:
    """Ask for a trial, and note the process that trains it, so that a later one knows if it was killed."""
    trial = study.ask()
    trial.set_user_attr(PROCESS, this_process())
    return trial


def _check_settings(settings: dict[str, Any]) -> None:
    """Raise a TypeError for arguments that `shoal.train` does not take, such as other ones of `study.optimize`."""
    for name in settings:
        if name not in SETTINGS:
            hint = INSTEAD.get(name, f"its settings are those of shoal.train: {', '.join(SETTINGS)}")
            raise TypeError(f"optimize: there is no argument {name!r}; {hint}")


def _advance_all(group: Sequence[_Objective], settings: dict[str, Any]) -> None:
    """Run the objectives to their ends, and train the jobs that they request on the way."""
    for each in group:
        each.advance()
    while waiting := [each for each in group if each.request is not None]:
        _train([each.request for each in waiting if each.request is not None], settings)
        for each in waiting:
            each.advance()


def _train(requests: Sequence[Request], settings: dict[str, Any]) -> None:
    """Train the jobs as one pack. Each request then has its result, or the error of its job."""
    reports = Reports(requests, together=settings.get("placement") is None)

    def run(group: Sequence[Request]) -> Results:
        callbacks = [*settings.get("callbacks", ()), reports]
        try:
            return train([request.job for request in group], **{**settings, "callbacks": callbacks})
        finally:
            reports.write()

    try:
        good: Sequence[Request] = requests
        results = run(good)
    except JobError:  # an error of one job, which must not affect the others
        good = [request for request in requests if request.check()]
        if len(good) == len(requests):
            raise
        results = run(good) if good else Results([])
    for request, result in zip(good, results, strict=True):
        request.result = result


class _Current(threading.local):
    """The objective that this thread runs."""

    objective: _Objective | None = None


_current = _Current()


class _Objective:
    """One trial's objective, in a thread that only runs while `advance` waits."""

    def __init__(self, trial: Any, function: Callable[[Any], Any]) -> None:
        self.trial, self._function = trial, function
        self.request: Request | None = None
        self._value: Any = None
        self._error: BaseException | None = None
        self._interrupted, self._ended = False, False
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name=f"trial {trial.number}", daemon=True)

    def advance(self) -> None:
        """Let it run until it requests a training, or ends."""
        self.request = None
        if self._thread.ident is None:
            self._thread.start()
        self._turn.release()
        self._back.acquire()

    def wait(self, request: Request) -> Request:
        """Called in the objective's thread: request a training, and return when it is done."""
        self.request = request
        self._back.release()
        self._turn.acquire()
        if self._interrupted:
            raise _Interrupted
        return request

    def interrupt(self) -> None:
        """End it if it waits."""
        self._interrupted = True
        while self._thread.ident is not None and not self._ended:
            self.advance()

    def _run(self) -> None:
        self._turn.acquire()
        _current.objective = self
        try:
            if not self._interrupted:
                with _stoppable(getattr(self.trial, "study", None)):
                    self._value = self._function(self.trial)
        except BaseException as error:
            self._error = error
        finally:
            self._ended = True
            self._back.release()

    def finish(self, study: Any, callbacks: Sequence[Callable[[Any, Any], None]] = ()) -> BaseException | None:
        """Report the outcome to Optuna, and return what the objective raised, unless it was pruned."""
        from optuna import TrialPruned
        from optuna.trial import TrialState

        if self._ended:
            self._thread.join()
        error = self._error
        if isinstance(error, TrialPruned):
            stored = study.tell(self.trial, state=TrialState.PRUNED)
            error = None
        elif error is not None or not self._ended or self._is_nan():
            interrupted = isinstance(error, _Interrupted) or not self._ended
            why = (
                "the study was interrupted"
                if interrupted
                else describe(error)
                if error
                else f"its value is {self._value}"
            )
            self.trial.set_user_attr("error", why)
            stored = study.tell(self.trial, state=TrialState.FAIL)
        else:
            stored = study.tell(self.trial, self._value)
        for callback in callbacks:
            callback(study, stored)
        return error

    def _is_nan(self) -> bool:
        values = self._value if isinstance(self._value, Sequence) else [self._value]
        return any(isinstance(value, float) and math.isnan(value) for value in values)
