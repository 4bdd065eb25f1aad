"""Samplers: which configuration the next trial uses.

A study asks for the configuration of each trial by its number, and reports each trial that has ended. The answer
depends only on the seed, the number, and the trials reported before. A restarted study reports its earlier trials to
the sampler, and continues as it would have.
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
    """Provides configurations for trials."""

    @property
    def limit(self) -> int | None:
        """How many different configurations it has; None: unlimited."""
        ...

    def ask(self, number: int) -> dict[str, Any]:
        """Return the configuration of trial `number`."""
        ...

    def suggest(self, number: int) -> Any:
        """Return the suggestions for trial `number`, for a make_job that suggests its settings itself: an object with
        the `number`, `params` and `suggest_...` of Optuna's trials."""
        ...

    def tell(self, trial: Trial) -> None:
        """Learn from a trial that has ended: complete, pruned or failed.

        After a restart, all trials of the study are given in order of their numbers, ended or not.
        """
        ...


def make_sampler(sampler: Any, space: Space | None, *, mode: str | Sequence[str] = "min", seed: int = 0) -> Sampler:
    """Return the sampler for "random", "grid", a name or an object of Optuna's samplers, or the given object."""
    if sampler == "random":
        return RandomSampler(space, seed)
    if sampler == "grid":
        return GridSampler(space)
    if all(callable(getattr(sampler, name, None)) for name in ("ask", "tell", "suggest")):
        return sampler  # type: ignore[no-any-return]
    from shoal.tune._optuna_sampler import OptunaSampler

    return OptunaSampler(sampler, space, mode=mode, seed=seed)


class RandomSampler:
    """Draws every trial at random, independently of other trials."""

    limit = None

    def __init__(self, space: Space | None, seed: int = 0) -> None:
        self.space, self.seed = space, seed

    def ask(self, number: int) -> dict[str, Any]:
        """Return the configuration of trial `number`."""
        return _require_space(self.space).sample(self.seed, number)

    def suggest(self, number: int) -> DrawnSuggestions:
        """Return suggestions that are drawn when a name is first used."""
        return DrawnSuggestions(number, self.seed)

    def tell(self, trial: Trial) -> None:
        """Ignore the trial: there is nothing to learn."""


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
        """The number of combinations."""
        return math.prod(map(len, self._values.values()))

    def ask(self, number: int) -> dict[str, Any]:
        """Return combination `number`."""
        if not 0 <= number < self.limit:
            raise JobError(f"trial {number} is beyond the grid, which has {self.limit} combinations")
        params: dict[str, Any] = {}
        for name, values in reversed(self._values.items()):
            number, index = divmod(number, len(values))
            params[name] = values[index]
        return {name: params[name] for name in self._values}

    def suggest(self, number: int) -> Any:
        """Raise a JobError: a grid cannot make suggestions."""
        raise JobError("grid search needs a search space; a make_job that suggests its settings has none")

    def tell(self, trial: Trial) -> None:
        """Ignore the trial: there is nothing to learn."""


class DrawnSuggestions:
    """Suggestions without Optuna: a setting is drawn at random when its name is first used.

    `fixed` has the settings of a trial that is made again; those names keep their values.
    """

    def __init__(self, number: int, seed: int = 0, fixed: Mapping[str, Any] | None = None) -> None:
        self.number, self._seed, self._fixed = number, seed, dict(fixed or {})
        self.params: dict[str, Any] = {}
        self.distributions: dict[str, Distribution] = {}
        self.user_attrs: dict[str, Any] = {}

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """Suggest a float in a range."""
        return float(self._suggest(name, lambda: Float(low, high, log=log, step=step)))

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        """Suggest a whole number in a range."""
        return int(self._suggest(name, lambda: Int(low, high, log=log, step=step)))

    def suggest_categorical(self, name: str, choices: Any) -> Any:
        """Suggest one of some values."""
        return self._suggest(name, lambda: Choice(tuple(choices)))

    def set_user_attr(self, key: str, value: Any) -> None:
        """Store a value with the trial."""
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


def _require_space(space: Space | None) -> Space:
    if space is None:
        raise JobError("there is no search space to draw from; pass one, or a make_job that suggests its settings")
    return space
