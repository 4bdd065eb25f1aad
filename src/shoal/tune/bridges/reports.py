"""Reports to Optuna of trials that train as one pack: those of all trials that end an epoch in a round are written
together, and the pruner is asked when they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from shoal.errors import JobError, ShoalError, describe_with_place
from shoal.jobs.job import Job
from shoal.reporting.callbacks import Ending, MemberView
from shoal.results import Result

REPORT = "its report to Optuna"
"""What raised, in the message of a trial that failed."""


class TrainingFailed(ShoalError, RuntimeError):
    """Raised if a job of an objective failed; the message is the job's error."""


_steps: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""The last step that each trial has reported."""


@dataclass(slots=True, eq=False)
class Request:
    """A job that an objective requests to be trained."""

    trial: Any
    job: Job
    metric: str
    first_step: int = 1
    result: Result | None = None
    error: Exception | None = None
    pruned_at: int | None = None
    reported: set[int] = field(default_factory=set)
    before: int = 0
    """Epochs that the trial has reported for earlier jobs, such as other folds, since Optuna accepts each step once."""

    def __post_init__(self) -> None:
        self.before = _steps.get(self.trial, 0)

    def take(self, view: MemberView) -> Report | None:
        """Return what is to be reported to Optuna of the member's last epoch, if anything."""
        row = view.metrics
        epoch = int(row.get("epoch", 0))
        if self.metric not in row or epoch in self.reported:
            return None
        self.reported.add(epoch)
        if len(getattr(getattr(self.trial, "study", None), "directions", ())) > 1:
            return None  # with several objectives Optuna accepts no reports and does not prune
        _steps[self.trial] = self.before + epoch
        step = self.before + epoch - 1 + self.first_step
        return Report(self, view.index, epoch, step, row[self.metric], view.status == "running")

    def fail(self, error: Exception, doing: str) -> None:
        """Note an exception that Optuna raised about this trial."""
        self.error = TrainingFailed(f"{self.job.name}: {doing} raised {describe_with_place(error)}")
        self.error.__cause__ = error

    def ask(self, epoch: int) -> None:
        """Ask the study's pruner whether the trial ends after this epoch."""
        try:
            if self.trial.should_prune():
                self.pruned_at = epoch
        except Exception as error:
            self.fail(error, "the study's pruner")

    def ending(self) -> Ending | None:
        """Return how the member must end, if it must."""
        if self.error is not None:
            return Ending("failed", str(self.error))
        return Ending("stopped", "pruned") if self.pruned_at is not None else None

    def check(self) -> bool:
        """Return whether the job can be prepared by itself."""
        from torch import device

        from shoal.preparation.checks import prepare

        try:
            prepare([self.job], device("cpu"))
        except JobError as error:
            self.error = error
        return self.error is None

    def outcome(self) -> Result:
        """Return the result, or raise what the objective should get."""
        if self.error is not None:
            raise self.error
        assert self.result is not None
        if self.pruned_at is not None and self.result.status == "stopped":
            from optuna import TrialPruned

            raise TrialPruned(f"pruned after epoch {self.pruned_at}")
        if self.result.status in ("failed", "cancelled"):
            raise TrainingFailed(f"{self.job.name}: {self.result.error or self.result.status}")
        if self.result.last(self.metric) is None and self.result.status == "diverged":
            from optuna import TrialPruned

            why = f"it diverged: {self.result.error}"
            self.trial.set_user_attr("error", why)
            raise TrialPruned(why)
        if self.result.last(self.metric) is None:
            names = ", ".join(name for row in self.result.history[:1] for name in row)
            raise JobError(f"{self.job.name} has no {self.metric!r}; its history has {names}")
        return self.result


@dataclass(slots=True, frozen=True)
class Report:
    """A value that a trial has reached."""

    request: Request
    index: int
    """The index of its member."""
    epoch: int
    step: int
    value: float
    ask: bool
    """Whether the pruner may end the trial now."""


class Reports:
    """A callback of `shoal.train` that reports the epochs of many trials to Optuna, those of a round together."""

    def __init__(self, requests: Sequence[Request], *, together: bool) -> None:
        """`together`: a round ends when `after_round` is called, and otherwise after each epoch."""
        self._requests = {request.job.name: request for request in requests}
        self._together = together
        self._round: list[Report] = []

    def __call__(self, view: MemberView) -> None:
        report = self._requests[view.name].take(view)
        if report is None:
            return
        self._round.append(report)
        if not self._together:
            for ending in self.after_round().values():
                view.stop(ending.error or "")

    def after_round(self) -> dict[int, Ending]:
        """Report the values of this round, then ask the pruner about each trial; return which members must end."""
        reports, self._round = self._round, []
        with _reported(reports):
            for report in reports:
                if report.ask and report.request.error is None:
                    report.request.ask(report.epoch)
        return {report.index: ending for report in reports if (ending := report.request.ending()) is not None}

    def write(self) -> None:
        """Report what is left of a round that was interrupted."""
        reports, self._round = self._round, []
        with _reported(reports):
            pass


@contextmanager
def _reported(reports: Sequence[Report]) -> Iterator[None]:
    """Report these values. Inside this context, the trials of an Optuna study are read once for all."""
    trials = [report.request.trial for report in reports]
    if len(trials) > 1 and _of_one_study(trials):
        from shoal.tune.round_storage import together

        with together(trials) as storage:
            _report(reports)
            errors = storage.write()
            for report in reports:
                if report.request.trial._trial_id in errors:
                    report.request.fail(errors[report.request.trial._trial_id], REPORT)
            yield
    else:
        _report(reports)
        yield


def _report(reports: Sequence[Report]) -> None:
    for report in reports:
        try:
            report.request.trial.report(report.value, report.step)
        except Exception as error:
            report.request.fail(error, REPORT)


def _of_one_study(trials: Sequence[Any]) -> bool:
    """Return whether these are Optuna's own trials, which write to their study's storage."""
    from optuna.trial import Trial

    return all(type(trial) is Trial and trial.study is trials[0].study for trial in trials)
