"""A study without networks: trials whose values are known beforehand, reported in any order."""

from __future__ import annotations

import random
from collections.abc import Callable

from shoal.tune.schedulers import Exploit, Goal, Promote, Scheduler, Start
from shoal.tune.trial import Trial

Score = Callable[[Trial, int], float]


def simulate(scheduler: Scheduler, goal: Goal, score: Score, order: random.Random, at_once: int = 1) -> list[Trial]:
    """Run a scheduler to its end; between two decisions `at_once` trials, drawn by chance, arrive at their rungs."""
    trials: list[Trial] = []
    for _ in range(100_000):
        for action in scheduler.decide(goal, trials):
            if isinstance(action, Start):
                trials.append(Trial(len(trials), {"lr": 1.0 + len(trials)}, "running", bracket=action.bracket))
                continue
            trial = trials[action.number]
            assert trial.state == "paused"
            if isinstance(action, Promote | Exploit):
                trial.state, trial.rung = "running", trial.rung + 1
                if isinstance(action, Exploit):
                    trial.attrs["params"] = action.params
                    trial.attrs.setdefault("from", []).append(action.source)
            else:
                trial.state = "pruned"
        training = [trial for trial in trials if trial.state == "running"]
        if not training:
            return trials
        for trial in order.sample(training, min(at_once, len(training))):
            epoch = scheduler.until(goal, trial)
            trial.values[epoch] = score(trial, epoch)
            trial.state = "complete" if epoch == goal.max_epochs else "paused"
    raise AssertionError("it does not end")
