"""Samplers: which configuration the next trial tries.

A study asks for the configuration of each trial by its number, and reports each trial that has ended. The answer
depends on the seed, the number and the trials reported before, on nothing else: a study that is started again reports
to its sampler the trials that it had, and continues as it would have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from shoal.errors import JobError
from shoal.tune.distributions import Choice, Distribution, Float, Int
from shoal.tune.space import Space, generator_for
from shoal.tune.trial import Trial


class Sampler(Protocol):
    """Where configurations come from."""

    @property
    def limit(self) -> int | None:
        """How many different configurations it has; None: no end of them."""
        ...

    def ask(self, number: int) -> dict[str, Any]:
        """The configuration of trial `number`."""
        ...

    def suggest(self, number: int) -> Any:
        """The same for a make_job that suggests its settings itself: what it is given, with the `number`, `params` and
        `suggest_...` of Optuna's trials."""
        ...

    def tell(self, trial: Trial) -> None:
        """Learn from a trial that has ended: complete, pruned or failed.

        After a restart, all trials that the study had are given in the order of their numbers, ended or not.
        """
        ...


def make_sampler(sampler: Any, space: Space | None, *, mode: str | Sequence[str] = "min", seed: int = 0) -> Sampler:
    """The sampler for "random", "grid", a name or an object of Optuna's, or one of your own, which is used as it is."""
    if sampler == "random":
        return RandomSampler(space, seed)
    if sampler == "grid":
        return GridSampler(space)
    if all(callable(getattr(sampler, name, None)) for name in ("ask", "tell", "suggest")):
        return sampler  # type: ignore[no-any-return]
    from shoal.tune._optuna_sampler import OptunaSampler

    return OptunaSampler(sampler, space, mode=mode, seed=seed)


class RandomSampler:
    """Every trial drawn at random, whatever the others gave."""

    limit = None

    def __init__(self, space: Space | None, seed: int = 0) -> None:
        self.space, self.seed = space, seed

    def ask(self, number: int) -> dict[str, Any]:
        """The configuration of trial `number`."""
        return _given(self.space).sample(self.seed, number)

    def suggest(self, number: int) -> DrawnSuggestions:
        """Suggestions that are drawn when a name is first asked for."""
        return DrawnSuggestions(number, self.seed)

    def tell(self, trial: Trial) -> None:
        """Nothing to learn."""


class GridSampler:
    """Every combination once, in order: the last name of the space changes fastest."""

    def __init__(self, space: Space | None) -> None:
        if space is None:
            raise JobError(
                "grid search has no search space; pass one: a make_job that suggests its settings has no grid"
            )
        lines = [
            f"{name}: grid search needs its values, and {each.text()} has no end of them; list them, or give a step"
            for name, each in space.items()
            if isinstance(each, Float) and each.step is None and each.low != each.high
        ]
        if lines:
            raise JobError(*lines)
        self.space = space
        self._values = {name: each.values() for name, each in space.items()}

    @property
    def limit(self) -> int:
        """How many combinations there are."""
        return math.prod(map(len, self._values.values()))

    def ask(self, number: int) -> dict[str, Any]:
        """Combination `number`."""
        if not 0 <= number < self.limit:
            raise JobError(f"trial {number} is beyond the grid, which has {self.limit} combinations")
        params: dict[str, Any] = {}
        for name, values in reversed(self._values.items()):
            number, index = divmod(number, len(values))
            params[name] = values[index]
        return {name: params[name] for name in self._values}

    def suggest(self, number: int) -> Any:
        """A grid suggests nothing."""
        raise JobError("grid search needs a search space; a make_job that suggests its settings has none")

    def tell(self, trial: Trial) -> None:
        """Nothing to learn."""


class DrawnSuggestions:
    """Suggestions without Optuna: a setting is drawn at random when its name is first asked for.

    With `fixed`, the settings of a trial that is made again: those names have their values of then.
    """

    def __init__(self, number: int, seed: int = 0, fixed: Mapping[str, Any] | None = None) -> None:
        self.number, self._seed, self._fixed = number, seed, dict(fixed or {})
        self.params: dict[str, Any] = {}
        self.distributions: dict[str, Distribution] = {}
        self.user_attrs: dict[str, Any] = {}

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """A float between two ends."""
        return float(self._suggest(name, lambda: Float(low, high, log=log, step=step)))

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        """A whole number between two ends."""
        return int(self._suggest(name, lambda: Int(low, high, log=log, step=step)))

    def suggest_categorical(self, name: str, choices: Any) -> Any:
        """One of some values."""
        return self._suggest(name, lambda: Choice(tuple(choices)))

    def set_user_attr(self, key: str, value: Any) -> None:
        """Keep a value with the trial."""
        self.user_attrs[key] = value

    def _suggest(self, name: str, make: Any) -> Any:
        if not isinstance(name, str) or not name:
            raise JobError(f"a setting has the name {name!r}; names are strings that are not empty")
        try:
            distribution = make()
        except JobError as error:
            raise JobError(*(f"{name}: {line}" for line in error.lines)) from None
        if name in self.params:
            if distribution != self.distributions[name]:
                raise JobError(f"{name} is suggested twice, from different values; suggest it once, or under two names")
            return self.params[name]
        value = self._fixed.get(name)
        if name not in self._fixed or not distribution.contains(value):
            value = distribution.sample(generator_for(self._seed, self.number, name))
        self.params[name], self.distributions[name] = value, distribution
        return value


def _given(space: Space | None) -> Space:
    if space is None:
        raise JobError("there is no search space to draw from; pass one, or a make_job that suggests its settings")
    return space
