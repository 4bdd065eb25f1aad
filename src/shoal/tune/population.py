"""Population-based training (Jaderberg et al., 2017): the worst trials take over the state and the parameters of the
best.

All trials train together and pause every `interval` epochs. Then each of the worst takes the weights, optimizer and
random state of one of the best (exploit), and its parameters with some of them changed a little (explore).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from shoal.errors import TuneError
from shoal.tune import brackets as tables
from shoal.tune.brackets import Bracket
from shoal.tune.distributions import Choice, Float, Int
from shoal.tune.schedulers import TRAINING, Action, Exploit, Goal, Promote, Start, best_first
from shoal.tune.trial import Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class PBT:
    """Population-based training: every `interval` epochs the worst trials become copies of the best, and continue with
    slightly changed settings of the optimizer."""

    interval: int | None = None
    """Epochs between two decisions; None: a tenth of `max_epochs`."""
    share: float = 0.25
    """The share of the population that is replaced at each decision, and the share that it is copied from."""
    mutate: tuple[str, ...] | None = None
    """Parameters that are changed. They must be settings of the optimizer: the job's `hparams` or `clip_norm`. None:
    all of these that have a range in the space."""
    factors: tuple[float, ...] = (0.8, 1.2)
    """A number is multiplied by one of these, chosen at random."""
    resample: float = 0.25
    """The probability that a parameter is taken from another trial of the population instead."""
    name: ClassVar[str] = "pbt"

    def check(self, goal: Goal) -> None:
        tables.check(goal.max_epochs, 2)
        if goal.num_trials is None or goal.num_trials < 2:
            raise TuneError(f"num_trials is {goal.num_trials!r}; 'pbt' trains a population: use 2 or more")
        self._check_numbers(goal.max_epochs)
        if goal.space is None:
            raise TuneError("'pbt' changes settings within their space, and there is none; pass space=")
        if isinstance(self.mutate, str):
            raise TuneError(f"mutate is {self.mutate!r}; pass a tuple of names: mutate=({self.mutate!r},)")
        if self.mutate is not None and not isinstance(self.mutate, tuple | list):
            raise TuneError(f"mutate is {self.mutate!r}; pass a tuple of names, such as mutate=('lr',)")
        unknown = sorted(set(self.mutate or ()) - set(goal.space))
        if unknown:
            names = ", ".join(goal.space)
            raise TuneError(f"mutate names {unknown[0]!r}, which the space does not have; it has {names}")

    def _check_numbers(self, max_epochs: int) -> None:
        if self.interval is not None and not (tables.is_count(self.interval) and self.interval <= max_epochs):
            raise TuneError(f"interval is {self.interval!r}; use a whole number, 1 to max_epochs={max_epochs}")
        if not _is_number(self.share) or not 0 < self.share <= 0.5:
            raise TuneError(f"share is {self.share!r}; use a number above 0 and at most 0.5")
        factors: Any = self.factors
        if not isinstance(factors, tuple | list) or not factors or not all(_is_number(f) and f > 0 for f in factors):
            raise TuneError(f"factors is {factors!r}; pass a tuple of numbers above 0, such as (0.8, 1.2)")
        if not _is_number(self.resample) or not 0 <= self.resample <= 1:
            raise TuneError(f"resample is {self.resample!r}; it is a probability: use a number from 0 to 1")

    def brackets(self, goal: Goal) -> list[Bracket]:
        return []

    def until(self, goal: Goal, trial: Trial) -> int:
        interval = self.interval or max(1, goal.max_epochs // 10)
        return min(goal.max_epochs, (trial.rung + 1) * interval)

    def decide(self, goal: Goal, trials: Sequence[Trial]) -> list[Action]:
        assert goal.num_trials is not None
        if len(trials) < goal.num_trials:
            return [Start(0)] * (goal.num_trials - len(trials))
        paused = [trial for trial in trials if trial.state == "paused"]
        if not paused or any(trial.state in TRAINING for trial in trials):
            return []
        ranked = best_first(paused, self.until(goal, paused[0]), goal.mode)
        count = min(int(self.share * goal.num_trials + 0.5) or 1, len(ranked) // 2)
        best, worst = ranked[:count], {trial.number for trial in ranked[len(ranked) - count :]}
        actions: list[Action] = []
        for trial in paused:
            if trial.number in worst:
                draw = random.Random(f"{goal.seed} {trial.rung} {trial.number}")
                source = draw.choice(best)
                actions.append(Exploit(trial.number, source.number, self._explore(goal, source, paused, draw)))
            else:
                actions.append(Promote(trial.number))
        return actions

    def _explore(self, goal: Goal, source: Trial, population: Sequence[Trial], draw: random.Random) -> dict[str, Any]:
        """Return the source's parameters, some of them changed."""
        params = dict(source.settings)
        for name in self.mutated(goal):
            distribution = goal.space[name]
            if draw.random() < self.resample or isinstance(distribution, Choice):
                params[name] = draw.choice(population).settings[name]
            else:
                params[name] = _changed(distribution, params[name], draw.choice(self.factors))
        return params

    def mutated(self, goal: Goal) -> list[str]:
        """Return the names of the parameters that are changed."""
        if self.mutate is not None:
            return list(self.mutate)
        ranges = [name for name, distribution in goal.space.items() if not isinstance(distribution, Choice)]
        return [name for name in ranges if goal.changeable is None or name in goal.changeable]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _changed(distribution: Float | Int, value: Any, factor: float) -> Any:
    """Return a value times a factor, inside its range and on its steps."""
    changed = min(distribution.high, max(distribution.low, value * factor))
    step = distribution.step if isinstance(distribution, Float) else distribution.step or 1
    if step is None:
        return changed
    changed = distribution.low + step * round((changed - distribution.low) / step)
    return round(changed) if isinstance(distribution, Int) else changed
