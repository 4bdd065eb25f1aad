"""Follows the value that a job watches over its epochs, and decides when the job has improved and when it stops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.jobs.job import EarlyStop, Job


def watched(job: Job) -> EarlyStop:
    """Return the rule that the job follows: its `stop`, else the smallest val_loss or, without validation, the
    smallest loss."""
    if job.stop is not None:
        return job.stop
    return EarlyStop("val_loss" if job.val is not None else "loss")


@dataclass(slots=True)
class Monitor:
    """Follows one job's watched value from measurement to measurement."""

    rule: EarlyStop
    stops: bool
    best: float | None = None
    misses: int = 0

    @classmethod
    def of(cls, job: Job) -> Monitor:
        return cls(rule=watched(job), stops=job.stop is not None)

    def value(self, row: Mapping[str, float]) -> float | None:
        """Return the watched value in a history row, or None if it was not measured in that epoch."""
        return row.get(self.rule.metric)

    def missing(self, row: Mapping[str, float], validated: bool) -> str | None:
        """Return why a watched value can never be measured, or None if it was or may be. Only jobs with `stop` need
        it."""
        never_measured = self.best is None and not self.misses
        if not (self.stops and never_measured and validated) or self.rule.metric in row:
            return None
        names = ", ".join(name for name in row if name not in ("epoch", "step", "lr", "seconds"))
        return f"stop watches {self.rule.metric!r}, which this job does not have; it has {names}"

    def see(self, row: Mapping[str, float]) -> tuple[bool, bool]:
        """Record a row and return whether it is the best so far, and whether the job should stop."""
        value = self.value(row)
        if value is None:
            return False, False
        if self.rule.better(value, self.best):
            self.best, self.misses = value, 0
            return True, False
        self.misses += 1
        return False, self.stops and self.misses >= self.rule.patience


def best_row(job: Job, history: Sequence[Mapping[str, float]]) -> Mapping[str, float] | None:
    """Return the history row of the job's best epoch by the watched value, or None if that was never measured."""
    monitor, best = Monitor.of(job), None
    for row in history:
        if monitor.see(row)[0]:
            best = row
    return best


def kept_row(job: Job, history: Sequence[Mapping[str, float]]) -> Mapping[str, float] | None:
    """Return the history row of the epoch whose weights the job keeps: the last one, or with keep="best" the best
    one."""
    best = best_row(job, history) if job.keep == "best" else None
    return best if best is not None else history[-1] if history else None


def in_order(
    history: Sequence[Mapping[str, float]], validations: Sequence[Mapping[str, float]]
) -> list[Mapping[str, float]]:
    """Return the rows of epochs and of validations within epochs in the order of their steps."""
    return sorted([*validations, *history], key=lambda row: row["step"]) if validations else list(history)


def validates(job: Job, epoch: int, last: bool) -> bool:
    """Return whether the job validates after this epoch (counted from 1): every `val_every` epochs, and after the
    last."""
    return job.val is not None and (last or epoch % job.val_every == 0)
