"""The distributions of settings: a range of floats, a range of whole numbers, or a list of choices."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from shoal.errors import JobError
from shoal.utils.numpy_values import plain_int, plain_number


@dataclass(frozen=True, slots=True)
class Float:
    """A float between `low` and `high`, both included; drawn evenly, on a logarithmic scale, or in steps from `low`.

    If the steps do not reach `high`, it is replaced by the last value that they reach.
    """

    low: float
    high: float
    log: bool = False
    step: float | None = None

    def __post_init__(self) -> None:
        for name in ("low", "high", "step"):
            value = plain_number(getattr(self, name))
            if name == "step" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise JobError(f"{name} is {value!r}; use a finite number")
            object.__setattr__(self, name, float(value))
        _check_range(self.low, self.high, self.log, smallest="above 0")
        if self.step is not None and self.log:
            raise JobError(f"step is {self.step!r} on a logarithmic scale; leave the step out, or log")
        if self.step is not None and self.step <= 0:
            raise JobError(f"step is {self.step!r}; use a number above 0")
        if self.step is not None:
            object.__setattr__(self, "high", self._after(self.step, self._steps(self.step)))

    def sample(self, generator: random.Random) -> float:
        """Draw a value with the generator."""
        if self.step is not None:
            return self._after(self.step, generator.randint(0, self._steps(self.step)))
        if self.log:
            drawn = math.exp(generator.uniform(math.log(self.low), math.log(self.high)))
        else:
            drawn = generator.uniform(self.low, self.high)
        return min(max(drawn, self.low), self.high)

    def contains(self, value: Any) -> bool:
        """Return whether the value could be drawn."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not self.low <= value <= self.high:
            return False
        if self.step is None:
            return True
        steps = (value - self.low) / self.step
        return abs(steps - round(steps)) < 1e-8

    def values(self) -> Sequence[float]:
        """Return all values, if they are finitely many."""
        if self.step is None:
            return [self.low] if self.low == self.high else _no_values(self.text())
        return [self._after(self.step, count) for count in range(self._steps(self.step) + 1)]

    def _steps(self, step: float) -> int:
        """Return how many steps fit between the ends. Computed in decimals, so that from 0 to 0.3 there are 3 of
        0.1."""
        return int((Decimal(repr(self.high)) - Decimal(repr(self.low))) // Decimal(repr(step)))

    def _after(self, step: float, count: int) -> float:
        """Return the value after `count` steps."""
        return float(Decimal(repr(self.low)) + count * Decimal(repr(step)))

    def text(self) -> str:
        """Return a description of the distribution."""
        step = f" in steps of {self.step:g}" if self.step is not None else ""
        return f"a number from {self.low:g} to {self.high:g}{step}"

    def to_json(self) -> dict[str, list[float]]:
        """Return the short form of the distribution."""
        return {"log" if self.log else "uniform": [self.low, self.high, *([] if self.step is None else [self.step])]}


@dataclass(frozen=True, slots=True)
class Int:
    """A whole number between `low` and `high`, both included; steps as in `Float`."""

    low: int
    high: int
    log: bool = False
    step: int = 1

    def __post_init__(self) -> None:
        for name in ("low", "high", "step"):
            value = plain_int(getattr(self, name))
            if isinstance(value, bool) or not isinstance(value, int):
                raise JobError(f"{name} is {value!r}; use a whole number, or the form 'uniform' or 'log' for floats")
            object.__setattr__(self, name, value)
        _check_range(self.low, self.high, self.log, smallest="1 or more")
        if self.step < 1:
            raise JobError(f"step is {self.step}; use a whole number, 1 or more")
        if self.log and self.step != 1:
            raise JobError(f"step is {self.step} on a logarithmic scale; leave the step out, or log")
        object.__setattr__(self, "high", self.values()[-1])

    def sample(self, generator: random.Random) -> int:
        """Draw a value with the generator. On a logarithmic scale each has the share of [value - 0.5, value + 0.5]."""
        if not self.log:
            return generator.choice(self.values())
        drawn = math.exp(generator.uniform(math.log(self.low - 0.5), math.log(self.high + 0.5)))
        return min(max(round(drawn), self.low), self.high)

    def contains(self, value: Any) -> bool:
        """Return whether the value could be drawn."""
        return isinstance(value, int) and not isinstance(value, bool) and value in self.values()

    def values(self) -> range:
        """Return all values."""
        return range(self.low, self.high + 1, self.step)

    def text(self) -> str:
        """Return a description of the distribution."""
        step = f" in steps of {self.step}" if self.step != 1 else ""
        return f"a whole number from {self.low} to {self.high}{step}"

    def to_json(self) -> dict[str, list[int]]:
        """Return the short form of the distribution."""
        return {"log-int" if self.log else "int": [self.low, self.high, *([] if self.step == 1 else [self.step])]}


@dataclass(frozen=True, slots=True)
class Choice:
    """One of some values, each equally likely."""

    choices: tuple[Any, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "choices", tuple(map(plain_number, self.choices)))
        if not self.choices:
            raise JobError("the list of choices is empty; give at least one value")
        for index, value in enumerate(self.choices):
            first = _position(value, self.choices)
            if first is not None and first != index:
                raise JobError(f"the choice {value!r} equals the choice {self.choices[first]!r}; give each value once")

    def sample(self, generator: random.Random) -> Any:
        """Draw a value with the generator."""
        return generator.choice(self.choices)

    def contains(self, value: Any) -> bool:
        """Return whether the value could be drawn."""
        return _position(value, self.choices) is not None

    def values(self) -> Sequence[Any]:
        """Return all values."""
        return self.choices

    def text(self) -> str:
        """Return a description of the distribution."""
        return f"one of {', '.join(map(repr, self.choices))}"

    def to_json(self) -> list[Any]:
        """Return the short form of the distribution."""
        return list(self.choices)


Distribution = Float | Int | Choice


def to_optuna(given: Distribution) -> Any:
    """Convert a distribution to Optuna's."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(given, Choice):
        return CategoricalDistribution(given.choices)
    if isinstance(given, Int):
        return IntDistribution(given.low, given.high, log=given.log, step=given.step)
    return FloatDistribution(given.low, given.high, log=given.log, step=given.step)


def from_optuna(given: Any) -> Distribution:
    """Convert one of Optuna's distributions."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(given, CategoricalDistribution):
        return Choice(tuple(given.choices))
    if isinstance(given, IntDistribution):
        return Int(given.low, given.high, log=given.log, step=given.step)
    if isinstance(given, FloatDistribution):
        return Float(given.low, given.high, log=given.log, step=given.step)
    raise JobError(f"{given!r} is not a distribution that Shoal knows; use one for floats, whole numbers or choices")


def _check_range(low: float, high: float, log: bool, *, smallest: str) -> None:
    if log and low <= 0:
        raise JobError(f"low is {low:g}, which has no logarithm; use a low end {smallest}, or a scale that is not log")
    if low > high:
        raise JobError(f"low is {low:g} and high is {high:g}; the low end comes first: swap them")


def _position(value: Any, choices: Sequence[Any]) -> int | None:
    """Return the index of the value among the choices, compared as in Optuna: 1, 1.0 and True are equal, and NaN equals
    NaN."""
    for index, choice in enumerate(choices):
        if choice is value or bool(choice == value) or (choice != choice and value != value):
            return index
    return None


def _no_values(text: str) -> Sequence[float]:
    raise JobError(f"{text} has no end of values; list those to try, or give a step")
