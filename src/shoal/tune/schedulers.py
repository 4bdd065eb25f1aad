"""Schedulers: decide which trials begin, continue and stop, from plain data.

    actions = scheduler.decide(goal, trials)

A decision is a pure function of the trials: their brackets, rungs, states and values. A study that was killed reads its
trials again and decides the same, and tests need no network. A rung keeps the best trials: NaN comes last, and among
equals the trial with the lower number comes first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from shoal.errors import TuneError
from shoal.tune import brackets as tables
from shoal.tune.brackets import Bracket
from shoal.tune.trial import Trial

Mode = Literal["min", "max"]
TRAINING = ("waiting", "running")


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What a study requires of its scheduler."""

    max_epochs: int
    mode: Mode
    num_trials: int | None = None
    """How many configurations there are; None: as many as the scheduler chooses."""
    seed: int = 0
    space: Any = None
    """The search space, for schedulers that change parameters during training."""
    changeable: tuple[str, ...] | None = None
    """The parameters that may be changed while a trial trains; None: all."""


@dataclass(frozen=True, slots=True)
class Start:
    """Begin a new trial in this bracket."""

    bracket: int


@dataclass(frozen=True, slots=True)
class Promote:
    """Let a trial continue to its next rung."""

    number: int


@dataclass(frozen=True, slots=True)
class Stop:
    """End a trial at its rung."""

    number: int


@dataclass(frozen=True, slots=True)
class Exploit:
    """Give a trial the state of another one and these parameters, and let it continue to its next rung."""

    number: int
    source: int
    params: dict[str, Any]


Action = Start | Promote | Stop | Exploit


class Scheduler(Protocol):
    """Decides which trials begin, continue and stop."""

    name: ClassVar[str]

    def check(self, goal: Goal) -> None:
        """Raise a TuneError if the scheduler cannot be used for this goal."""

    def brackets(self, goal: Goal) -> list[Bracket]:
        """Return the planned brackets, for display; empty if there is no plan beforehand."""

    def until(self, goal: Goal, trial: Trial) -> int:
        """Return the epoch at which a trial pauses for the next decision, or ends."""

    def decide(self, goal: Goal, trials: Sequence[Trial]) -> list[Action]:
        """Return what to do now. Paused trials without an action stay paused."""


def best_first(trials: Sequence[Trial], epoch: int, mode: Mode) -> list[Trial]:
    """Sort trials by their values at an epoch, the best first; a trial that ended before it by its last value."""

    def key(trial: Trial) -> tuple[bool, float, int]:
        value = trial.value_at(min(epoch, trial.epochs))
        missing = math.isnan(value)
        return missing, 0.0 if missing else -value if mode == "max" else value, trial.number

    return sorted(trials, key=key)


def thin(bracket: Bracket, trials: Sequence[Trial], mode: Mode) -> list[Action]:
    """Return the decisions at those rungs of a bracket that all trials have reached. A failed trial does not
    survive."""
    actions: list[Action] = []
    for rung_index, (rung, next_rung) in enumerate(zip(bracket.rungs, bracket.rungs[1:], strict=False)):
        at_rung = [trial for trial in trials if trial.rung == rung_index]
        paused = [trial for trial in at_rung if trial.state == "paused"]
        if any(trial.state in TRAINING for trial in at_rung):
            break
        if not paused:
            continue
        entered = [trial for trial in at_rung if trial.state in ("paused", "complete")]
        survivors = {trial.number for trial in best_first(entered, rung.epochs, mode)[: next_rung.trials]}
        actions += [Promote(t.number) if t.number in survivors else Stop(t.number) for t in paused]
    return actions


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyperband:
    """Brackets of successive halving, from many short trainings to few long ones."""

    eta: int = 3
    """Keep one in eta at each rung."""
    together: bool = True
    """Train all brackets at the same time; False: one after another, so that a sampler learns from earlier ones."""
    name: ClassVar[str] = "hyperband"

    def check(self, goal: Goal) -> None:
        tables.check(goal.max_epochs, self.eta)

    def brackets(self, goal: Goal) -> list[Bracket]:
        return tables.hyperband(goal.max_epochs, self.eta, goal.num_trials)

    def until(self, goal: Goal, trial: Trial) -> int:
        bracket = next(bracket for bracket in self.brackets(goal) if bracket.number == trial.bracket)
        return bracket.rungs[trial.rung].epochs

    def decide(self, goal: Goal, trials: Sequence[Trial]) -> list[Action]:
        actions: list[Action] = []
        for bracket in self.brackets(goal):
            members = [trial for trial in trials if trial.bracket == bracket.number]
            missing = bracket.size - len(members)
            actions += [Start(bracket.number)] * missing or thin(bracket, members, goal.mode)
            finished = not missing and all(t.state not in (*TRAINING, "paused") for t in members)
            if not self.together and not finished:
                break
        return actions


@dataclass(frozen=True, slots=True, kw_only=True)
class SuccessiveHalving:
    """One bracket: all start together, and one in eta continues from each rung."""

    eta: int = 3
    """Keep one in eta at each rung."""
    min_epochs: int = 1
    """The earliest epoch of the first rung."""
    name: ClassVar[str] = "successive-halving"

    def check(self, goal: Goal) -> None:
        _check_rungs(goal.max_epochs, self.eta, self.min_epochs)

    def brackets(self, goal: Goal) -> list[Bracket]:
        cuts = tables.most_cuts(goal.max_epochs // self.min_epochs, self.eta)
        return [tables.make_bracket(goal.num_trials or self.eta**cuts, cuts, goal.max_epochs, self.eta, number=0)]

    def until(self, goal: Goal, trial: Trial) -> int:
        return self.brackets(goal)[0].rungs[trial.rung].epochs

    def decide(self, goal: Goal, trials: Sequence[Trial]) -> list[Action]:
        (bracket,) = self.brackets(goal)
        return [Start(0)] * (bracket.size - len(trials)) or thin(bracket, trials, goal.mode)


@dataclass(frozen=True, slots=True, kw_only=True)
class ASHA:
    """Successive halving without waiting: a trial continues as soon as it is among the best one in eta of those that
    have reached its rung; otherwise new trials begin. Its decisions depend on which trials arrive first."""

    eta: int = 3
    """Keep one in eta at each rung."""
    min_epochs: int = 1
    """The earliest epoch of the first rung."""
    parallel: int = 32
    """How many trials train at the same time."""
    name: ClassVar[str] = "asha"

    def check(self, goal: Goal) -> None:
        _check_rungs(goal.max_epochs, self.eta, self.min_epochs)
        if not tables.is_count(self.parallel):
            raise TuneError(
                f"parallel is {self.parallel!r}; it is how many trials train at once: use a whole number, 1 or more"
            )
        _need_trials(goal, self.name)

    def brackets(self, goal: Goal) -> list[Bracket]:
        return []

    def _rungs(self, goal: Goal) -> list[int]:
        cuts = tables.most_cuts(goal.max_epochs // self.min_epochs, self.eta)
        return [rung.epochs for rung in tables.make_bracket(1, cuts, goal.max_epochs, self.eta).rungs]

    def enough(self, goal: Goal) -> int:
        """Return the fewest trials of which one certainly reaches `max_epochs`, if none fails."""
        return int(self.eta ** (len(self._rungs(goal)) - 1))

    def until(self, goal: Goal, trial: Trial) -> int:
        return self._rungs(goal)[trial.rung]

    def decide(self, goal: Goal, trials: Sequence[Trial]) -> list[Action]:
        assert goal.num_trials is not None
        training = sum(trial.state in TRAINING for trial in trials)
        free, new = self.parallel - training, goal.num_trials - len(trials)
        promoted = self._promotable(goal, trials)[:free]
        actions: list[Action] = [Promote(number) for number in promoted]
        actions += [Start(0)] * max(0, min(free - len(promoted), new))
        if not actions and not training:  # no more trials will arrive
            actions += [Stop(trial.number) for trial in trials if trial.state == "paused"]
        return actions

    def _promotable(self, goal: Goal, trials: Sequence[Trial]) -> list[int]:
        """Return the trials that may continue, those at the highest rung first."""
        numbers: list[int] = []
        rungs = self._rungs(goal)
        for rung_index in range(len(rungs) - 2, -1, -1):
            arrived = [
                t
                for t in trials
                if t.rung > rung_index or (t.rung == rung_index and t.state not in (*TRAINING, "failed"))
            ]
            top = best_first(arrived, rungs[rung_index], goal.mode)[: len(arrived) // self.eta]
            numbers += [t.number for t in top if t.state == "paused" and t.rung == rung_index]
        return numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class NoScheduler:
    """Every trial trains to its end."""

    name: ClassVar[str] = "none"

    def check(self, goal: Goal) -> None:
        tables.check(goal.max_epochs, 2)
        _need_trials(goal, self.name)

    def brackets(self, goal: Goal) -> list[Bracket]:
        return [tables.make_bracket(goal.num_trials or 1, 0, goal.max_epochs, 2)]

    def until(self, goal: Goal, trial: Trial) -> int:
        return goal.max_epochs

    def decide(self, goal: Goal, trials: Sequence[Trial]) -> list[Action]:
        assert goal.num_trials is not None
        return [Start(0)] * (goal.num_trials - len(trials))


def _check_rungs(max_epochs: int, eta: int, min_epochs: int) -> None:
    tables.check(max_epochs, eta)
    if not tables.is_count(min_epochs) or min_epochs > max_epochs:
        raise TuneError(f"min_epochs is {min_epochs!r}; the first rung is between 1 and max_epochs={max_epochs}")


def _need_trials(goal: Goal, name: str) -> None:
    if goal.num_trials is None:
        raise TuneError(f"scheduler {name!r} does not say how many trials there are; set num_trials (--trials)")
