"""What a job watches over its epochs: when it has improved, and when to stop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.jobs.job import EarlyStop, Job


def watched(job: Job) -> EarlyStop:
    """What the job goes by: its `stop`, else the smallest val_loss, else (without validation) the smallest loss."""
    if job.stop is not None:
        return job.stop
    return EarlyStop("val_loss" if job.val is not None else "loss")


@dataclass(slots=True)
class Monitor:
    """Follows one job's watched value, epoch by epoch."""

    rule: EarlyStop
    stops: bool
    best: float | None = None
    misses: int = 0

    @classmethod
    def of(cls, job: Job) -> Monitor:
        return cls(rule=watched(job), stops=job.stop is not None)

    def value(self, row: Mapping[str, float]) -> float | None:
        """The watched value in a history row; None where it was not measured in that epoch."""
        return row.get(self.rule.metric)

    def missing(self, row: Mapping[str, float], validated: bool) -> str | None:
        """Of a job that may stop: why its watched value, which was never measured, will not be; None where it may."""
        never = self.best is None and not self.misses
        if not (self.stops and never and validated) or self.rule.metric in row:
            return None
        names = ", ".join(name for name in row if name not in ("epoch", "step", "lr", "seconds"))
        return f"stop watches {self.rule.metric!r}, which this job does not have; it has {names}"

    def see(self, row: Mapping[str, float]) -> tuple[bool, bool]:
        """Take in a row: (it is the best so far, the job should stop)."""
        value = self.value(row)
        if value is None:
            return False, False
        if self.rule.better(value, self.best):
            self.best, self.misses = value, 0
            return True, False
        self.misses += 1
        return False, self.stops and self.misses >= self.rule.patience


def best_row(job: Job, history: Sequence[Mapping[str, float]]) -> Mapping[str, float] | None:
    """The history's row of the job's best epoch, by what it watches; None where that was never measured."""
    monitor, best = Monitor.of(job), None
    for row in history:
        if monitor.see(row)[0]:
            best = row
    return best


def kept_row(job: Job, history: Sequence[Mapping[str, float]]) -> Mapping[str, float] | None:
    """The history's row of the epoch whose weights the job keeps: the last one, or with keep="best" its best."""
    best = best_row(job, history) if job.keep == "best" else None
    return best if best is not None else history[-1] if history else None


def in_order(
    history: Sequence[Mapping[str, float]], validations: Sequence[Mapping[str, float]]
) -> list[Mapping[str, float]]:
    """The rows of epochs and those of validations within epochs, as they came."""
    return sorted([*validations, *history], key=lambda row: row["step"]) if validations else list(history)


def validates(job: Job, epoch: int, last: bool) -> bool:
    """Whether the job validates after this epoch (counted from 1): every `val_every`, and after the last."""
    return job.val is not None and (last or epoch % job.val_every == 0)
