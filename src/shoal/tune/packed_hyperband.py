"""Hyperband as grouped in Pack's paper, for comparison: within a rung, packs of a few trials train one after another.

Shoal itself trains all trials of all brackets at the same time. The paper's packs have as many networks as fit on its
GPU, and are formed at random, of equal batch size, or of nearest neighbours in the search space.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from shoal.errors import TuneError
from shoal.tune import brackets as tables
from shoal.tune.brackets import Bracket, Rung
from shoal.tune.distributions import Choice
from shoal.tune.schedulers import TRAINING, Action, Goal, Promote, Start, Stop, best_first
from shoal.tune.trial import Trial

Packs = list[list[Trial]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedHyperband:
    """Brackets one after another; within a rung, packs of `pack_size` trials one after another. For comparison."""

    grouping: str
    """How packs are formed: "random", "batch" (equal `batch_size`) or "nearest" (neighbours in the search space)."""
    pack_size: int = 8
    eta: int = 3
    """Keep one in eta at each rung."""
    name: ClassVar[str] = "packed-hyperband"

    def check(self, goal: Goal) -> None:
        tables.check(goal.max_epochs, self.eta)
        if self.grouping not in GROUPINGS:
            raise TuneError(f"grouping is {self.grouping!r}; use one of {', '.join(map(repr, GROUPINGS))}")
        if not tables.is_count(self.pack_size):
            raise TuneError(
                f"pack_size is {self.pack_size!r}; it is how many trials train at once: use a whole number, 1 or more"
            )
        if self.grouping == "nearest" and goal.space is None:
            raise TuneError("grouping is 'nearest', which needs a search space to measure distances in; pass space")

    def brackets(self, goal: Goal) -> list[Bracket]:
        """Return Hyperband's brackets, each with an additional first rung at epoch 0, from which its packs begin."""
        plain = tables.hyperband(goal.max_epochs, self.eta, goal.num_trials)
        return [replace(bracket, rungs=(Rung(bracket.size, 0), *bracket.rungs)) for bracket in plain]

    def until(self, goal: Goal, trial: Trial) -> int:
        bracket = next(bracket for bracket in self.brackets(goal) if bracket.number == trial.bracket)
        return bracket.rungs[trial.rung].epochs

    def decide(self, goal: Goal, trials: Sequence[Trial]) -> list[Action]:
        for bracket in self.brackets(goal):
            members = [trial for trial in trials if trial.bracket == bracket.number]
            if len(members) < bracket.size:
                return [Start(bracket.number)] * (bracket.size - len(members))
            resting = [trial for trial in members if _waits_at_rung(trial)]
            if any(trial.state in TRAINING for trial in members if trial not in resting):
                return []
            if resting:
                return self._next_pack(goal, bracket, members, min(trial.rung for trial in resting))
        return []

    def _next_pack(self, goal: Goal, bracket: Bracket, members: Sequence[Trial], rung_index: int) -> list[Action]:
        """At a rung that all trials have reached, stop those that are not among its best, and promote a pack of the
        best."""
        at_rung = [trial for trial in members if trial.rung == rung_index and _waits_at_rung(trial)]
        entered = [
            t
            for t in members
            if t.rung > rung_index or t in at_rung or (t.rung == rung_index and t.state == "complete")
        ]
        best = best_first(entered, bracket.rungs[rung_index].epochs, goal.mode)[: bracket.rungs[rung_index + 1].trials]
        actions: list[Action] = [Stop(trial.number) for trial in at_rung if trial not in best]
        packs = GROUPINGS[self.grouping](sorted(best, key=lambda trial: trial.number), self.pack_size, goal)
        for pack in packs:
            if promoted := [Promote(trial.number) for trial in pack if trial in at_rung]:
                return [*actions, *promoted]
        return actions


def _waits_at_rung(trial: Trial) -> bool:
    """Return whether a trial waits at a rung. At the first rung, before its first epoch, a trial does so from its
    start."""
    return trial.state == "paused" or (trial.state == "waiting" and not trial.rung)


def at_random(trials: Sequence[Trial], size: int, goal: Goal) -> Packs:
    """Form packs at random, the same for the same trials and seed."""
    drawn = list(trials)
    random.Random(f"{goal.seed}/{[trial.number for trial in trials]}").shuffle(drawn)
    return _chunks(drawn, size)


def by_batch_size(trials: Sequence[Trial], size: int, goal: Goal) -> Packs:
    """Form packs of trials with the same `batch_size`; of all trials if the search has no such setting."""
    by_size: dict[Any, list[Trial]] = {}
    for trial in trials:
        by_size.setdefault(trial.params.get("batch_size"), []).append(trial)
    return [pack for group in by_size.values() for pack in _chunks(group, size)]


def by_neighbours(trials: Sequence[Trial], size: int, goal: Goal) -> Packs:
    """Form packs of the first trial and its nearest neighbours, then of the first remaining one and its own, and so
    on."""
    remaining, packs = list(trials), list[list[Trial]]()
    while remaining:
        remaining.sort(key=lambda trial, first=remaining[0]: (_distance(first, trial, goal.space), trial.number))  # type: ignore[misc]
        packs.append(remaining[:size])
        remaining = sorted(remaining[size:], key=lambda trial: trial.number)
    return packs


GROUPINGS: dict[str, Callable[[Sequence[Trial], int, Goal], Packs]] = {
    "random": at_random, "batch": by_batch_size, "nearest": by_neighbours,
}  # fmt: skip
"""The paper's three rules, by name."""


def _chunks(trials: list[Trial], size: int) -> Packs:
    return [trials[start : start + size] for start in range(0, len(trials), size)]


def _distance(a: Trial, b: Trial, space: Any) -> float:
    """Return the distance of two configurations, with every range scaled to length 1; different choices have distance
    1."""
    total = 0.0
    for name, drawn_from in space.items():
        x, y = a.params[name], b.params[name]
        if isinstance(drawn_from, Choice):
            total += x != y
        elif drawn_from.high > drawn_from.low:
            scale = math.log if drawn_from.log else float
            total += ((scale(x) - scale(y)) / (scale(drawn_from.high) - scale(drawn_from.low))) ** 2
    return math.sqrt(total)
