"""The search space: which settings a study tries, and from which values each is drawn.

A space is a dict from names to distributions. Each is written in a short form, or as one of Optuna's:

    {
        "lr": ("log", 1e-5, 1e-1),              # a float, drawn evenly on a logarithmic scale
        "dropout": ("uniform", 0, 0.5),         # a float; ("uniform", 0, 0.5, 0.1): in steps of 0.1
        "layers": ("int", 1, 4),                # 1, 2, 3 or 4; ("int", 8, 64, 8): in steps of 8
        "units": ("log-int", 16, 1024),         # a whole number, drawn on a logarithmic scale
        "optimizer": ["sgd", "adam"],           # one of these
    }

Files that have no tuples write {"log": [1e-5, 1e-1]} for ("log", 1e-5, 1e-1). Both ends belong to a range.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.errors import JobError
from shoal.tune.distributions import Choice, Distribution, Float, Int
from shoal.utils.numpy_values import plain_number

_FORMS: dict[str, tuple[Callable[..., Distribution], str]] = {
    "uniform": (lambda low, high, step=None: Float(low, high, step=step), "low, high or low, high, step"),
    "log": (lambda low, high: Float(low, high, log=True), "low, high"),
    "int": (lambda low, high, step=1: Int(low, high, step=step), "low, high or low, high, step"),
    "log-int": (lambda low, high: Int(low, high, log=True), "low, high"),
}
"""By the first word of the short form: what creates the distribution, and the arguments after the word."""
_EXAMPLES = '("log", 1e-5, 1e-1), ("uniform", 0, 0.5), ("int", 1, 4), ("log-int", 16, 1024) or a list of choices'


@dataclass(frozen=True, slots=True)
class Space(Mapping[str, Distribution]):
    """A checked search space: distributions by name."""

    distributions: Mapping[str, Distribution]

    def __getitem__(self, name: str) -> Distribution:
        return self.distributions[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.distributions)

    def __len__(self) -> int:
        return len(self.distributions)

    def sample(self, seed: int, number: int) -> dict[str, Any]:
        """Draw the configuration of one trial. A value depends only on (seed, number, its name) and its
        distribution."""
        return {name: each.sample(generator_for(seed, number, name)) for name, each in self.items()}

    def check(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return these settings in the order of the space, as plain Python numbers.

        Raises:
            JobError: If a setting is missing, unknown, or outside its distribution; one line for each.
        """
        lines = [f"{name} is missing; the search space has it" for name in self if name not in params]
        lines += [f"{name!r} is not in the search space; it has {_listed(self)}" for name in params if name not in self]
        plain = {name: plain_number(params[name]) for name in self if name in params}
        lines += [
            f"{name} is {value!r}; its distribution is {self[name].text()}"
            for name, value in plain.items()
            if not self[name].contains(value)
        ]
        if lines:
            raise JobError(*lines)
        return plain

    def check_storable(self) -> None:
        """Raise a JobError if a choice is not a plain value, which a folder or storage could not hold."""
        lines = [
            f"{name}: the choice {_short(value)} cannot be stored; use None, a bool, a number or a string, and build "
            "the object from it in make_job"
            for name, each in self.items()
            if isinstance(each, Choice)
            for value in each.choices
            if not (value is None or isinstance(value, bool | int | float | str))
        ]
        if lines:
            raise JobError(*lines)

    def to_json(self) -> dict[str, Any]:
        """Return the space in a form that JSON can hold; `parse` reads it back."""
        return {name: each.to_json() for name, each in self.items()}

    def to_optuna(self) -> dict[str, Any]:
        """Return Optuna's distributions."""
        from shoal.tune.distributions import to_optuna

        return {name: to_optuna(each) for name, each in self.items()}


def generator_for(seed: int, number: int, name: str) -> random.Random:
    """Return the generator of one setting of one trial. It does not depend on what else is drawn, or in which order."""
    return random.Random(f"{seed}/{number}/{name}")


def parse(space: Any) -> Space:
    """Create a search space from its short form, or from Optuna's distributions.

    >>> parse({"lr": ("log", 1e-5, 1e-1), "width": [64, 128]})["width"].choices
    (64, 128)

    Raises:
        JobError: With one line for each mistake.
    """
    if isinstance(space, Space):
        return space
    if not isinstance(space, Mapping):
        raise JobError(f'the search space is {_short(space)}; pass a dict such as {{"lr": ("log", 1e-5, 1e-1)}}')
    if not space:
        raise JobError('the search space is empty; name at least one setting, such as {"lr": ("log", 1e-5, 1e-1)}')
    lines: list[str] = []
    distributions: dict[str, Distribution] = {}
    for name, given in space.items():
        if not isinstance(name, str) or not name:
            lines.append(f"the search space has the name {name!r}; names are strings that are not empty")
            continue
        try:
            distributions[name] = distribution(given)
        except JobError as error:
            lines += [f"{name}: {line}" for line in error.lines]
    if lines:
        raise JobError(*lines)
    return Space(distributions)


def distribution(given: Any) -> Distribution:
    """Create a distribution from its short form, or from Optuna's.

    Raises:
        JobError: With what is wrong with it.
    """
    if isinstance(given, Float | Int | Choice):
        return given
    if _is_optuna(given):
        from shoal.tune.distributions import from_optuna

        return from_optuna(given)
    if isinstance(given, list):
        return Choice(tuple(given))
    if isinstance(given, Mapping) and len(given) == 1:
        ((word, arguments),) = given.items()
        if word == "choice":
            return distribution(list(arguments) if isinstance(arguments, tuple) else arguments)
        if isinstance(arguments, list | tuple):
            return _from_form(word, arguments, given)
    if isinstance(given, tuple) and given:
        return _from_form(given[0], given[1:], given)
    raise JobError(f"{_short(given)} is not a distribution; use {_EXAMPLES} ([value] for a fixed one)")


def _from_form(word: Any, arguments: Sequence[Any], given: Any) -> Distribution:
    if not isinstance(word, str) or word not in _FORMS:
        fix = ", or a list for choices" if isinstance(given, tuple) else ""
        raise JobError(f"{_short(given)} starts with {_short(word)}; use one of {_listed(_FORMS)}{fix}")
    make, follows = _FORMS[word]
    if len(arguments) not in ((2, 3) if "step" in follows else (2,)):
        raise JobError(f"{_short(given)} has {len(arguments)} values after {word!r}; write {follows}")
    return make(*arguments)


def _is_optuna(given: Any) -> bool:
    optuna = sys.modules.get("optuna")
    return optuna is not None and isinstance(given, optuna.distributions.BaseDistribution)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
