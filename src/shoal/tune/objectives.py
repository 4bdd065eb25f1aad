"""The objectives of a study: one metric, or several of equal rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.errors import TuneError
from shoal.jobs.metric_direction import direction
from shoal.tune.schedulers import Mode, NoScheduler, Scheduler
from shoal.tune.trial import Trial


@dataclass(frozen=True, slots=True)
class Objectives:
    """The metrics of a study, and for each whether it is minimised or maximised."""

    names: tuple[str, ...]
    modes: tuple[Mode, ...]

    @property
    def several(self) -> bool:
        return len(self.names) > 1

    @property
    def described(self) -> dict[str, Any]:
        """The objectives as the study's folder stores them."""
        if not self.several:
            return {"metric": self.names[0], "mode": self.modes[0]}
        return {"metric": list(self.names), "mode": list(self.modes)}


def make_objectives(metric: Any, mode: Any, check: Callable[[str], None]) -> Objectives:
    """Create the objectives from the arguments of `tune`. `check` raises if a metric is unknown, since it may be
    misspelt."""
    names = (metric,) if isinstance(metric, str) or not isinstance(metric, Sequence) else tuple(metric)
    for name in names or (metric,):
        if not isinstance(name, str) or not name:
            raise TuneError(f"metric is {metric!r}; name one: 'val_loss', or one of the jobs' metrics")
    if len(set(names)) < len(names):
        raise TuneError(f"metric is {metric!r}; name each metric once")
    modes = [mode] * len(names) if mode is None else [mode] if isinstance(mode, str) else mode
    if not isinstance(modes, Sequence) or len(modes) != len(names):
        raise TuneError(f"mode is {mode!r}, and there are {len(names)} metrics; use one of 'min', 'max' for each")
    pairs = zip(names, modes, strict=True)
    return Objectives(names, tuple(_mode(name, given_mode, check) for name, given_mode in pairs))


def _mode(metric: str, mode: Any, check: Callable[[str], None]) -> Mode:
    """Return whether the metric is minimised or maximised."""
    if mode is None:
        mode = direction(metric)
        if mode is None:
            check(metric)
            raise TuneError(
                f"the name {metric!r} does not say which way is better; set mode='min' or mode='max', or check "
                "its spelling"
            )
    if mode not in ("min", "max"):
        raise TuneError(f"mode is {mode!r}; it says which way is better: use 'min' or 'max'")
    chosen: Mode = mode
    return chosen


def check_rank(objectives: Objectives, scheduler: Scheduler) -> None:
    """Raise a TuneError if the scheduler must rank trials, which several metrics do not allow."""
    if objectives.several and not isinstance(scheduler, NoScheduler):
        raise TuneError(
            f"metric names {len(objectives.names)} metrics, and scheduler {scheduler.name!r} ranks trials by one; use "
            "scheduler='none' with num_trials, or one metric"
        )


def values_of(trial: Trial) -> list[float]:
    """Return a trial's values, one for each of the study's metrics."""
    return [float(value) for value in trial.attrs.get("objectives", [trial.value])]


def pareto_front(trials: Sequence[Trial], modes: Sequence[Mode]) -> list[Trial]:
    """Return the trials that no other trial dominates, in order of their numbers.

    A trial dominates another if it is better in one metric and at least as good in the others.
    """
    candidates = {t.number: (t, values_of(t)) for t in trials if t.state != "failed"}
    costs = {
        number: [-value if mode == "max" else value for value, mode in zip(values, modes, strict=True)]
        for number, (_, values) in candidates.items()
        if not any(map(math.isnan, values))
    }

    def dominated(number: int) -> bool:
        own_costs = costs[number]
        return any(
            other_costs != own_costs and all(a <= b for a, b in zip(other_costs, own_costs, strict=True))
            for other_costs in costs.values()
        )

    return [candidates[number][0] for number in sorted(costs) if not dominated(number)]
