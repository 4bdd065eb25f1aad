"""Brackets and rungs of Hyperband and successive halving, as in the paper (Li et al., 2018), in whole numbers.

A bracket starts `size` configurations, trains them to its first rung, lets the best continue to the next rung, and so
on until a rung at `max_epochs`. Hyperband runs several brackets, from many short trainings to few long ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shoal.errors import TuneError
from shoal.utils.tables import render


@dataclass(frozen=True, slots=True)
class Rung:
    """One rung of a bracket."""

    trials: int
    """How many configurations train up to this rung."""
    epochs: int
    """The epoch of the rung, counted from a training's beginning."""


@dataclass(frozen=True, slots=True)
class Bracket:
    """Configurations that start together and are halved (or reduced by another factor) together."""

    number: int
    """The paper's s: how many times it is reduced."""
    rungs: tuple[Rung, ...]

    @property
    def size(self) -> int:
        """How many configurations it starts."""
        return self.rungs[0].trials

    @property
    def epochs(self) -> int:
        """Epochs that it trains in total; no epoch is trained twice."""
        starts = (0, *(rung.epochs for rung in self.rungs))
        return sum(rung.trials * (rung.epochs - start) for rung, start in zip(self.rungs, starts, strict=False))


def most_cuts(max_epochs: int, eta: int) -> int:
    """Return the paper's s_max: the largest s with eta^s <= max_epochs.

    >>> most_cuts(81, 3), most_cuts(80, 3), most_cuts(1000, 10)
    (4, 3, 3)
    """
    cuts = 0
    while eta ** (cuts + 1) <= max_epochs:
        cuts += 1
    return cuts


def make_bracket(size: int, cuts: int, max_epochs: int, eta: int, number: int | None = None) -> Bracket:
    """Create a bracket of `size` configurations that is reduced `cuts` times; its last rung is at `max_epochs`.

    >>> [(rung.trials, rung.epochs) for rung in make_bracket(27, 3, 27, 3).rungs]
    [(27, 1), (9, 3), (3, 9), (1, 27)]
    """
    rungs = [Rung(max(1, size // eta**i), max_epochs // eta ** (cuts - i)) for i in range(cuts + 1)]
    return Bracket(cuts if number is None else number, tuple(rungs))


def hyperband(max_epochs: int, eta: int, limit: int | None = None) -> list[Bracket]:
    """Return the brackets of Hyperband, the one with most configurations first.

    Args:
        limit: The most configurations in all brackets; brackets that would have none are omitted.

    >>> [bracket.size for bracket in hyperband(81, 3)]
    [81, 34, 15, 8, 5]
    """
    check(max_epochs, eta)
    most = most_cuts(max_epochs, eta)
    brackets: list[Bracket] = []
    for cuts in range(most, -1, -1):
        size = -(-(most + 1) * eta**cuts // (cuts + 1))
        if limit is not None:
            size = min(size, limit - sum(bracket.size for bracket in brackets))
        if size > 0:
            brackets.append(make_bracket(size, cuts, max_epochs, eta))
    return brackets


def check(max_epochs: int, eta: int) -> None:
    """Raise a TuneError unless brackets are possible."""
    if not is_count(max_epochs):
        raise TuneError(f"max_epochs is {max_epochs!r}; use a whole number, 1 or more")
    if not is_count(eta) or eta < 2:
        raise TuneError(f"eta is {eta!r}; a rung keeps one in eta: use a whole number, 2 or more")


def is_count(value: Any) -> bool:
    """Return whether the value is a whole number, 1 or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def table(brackets: Sequence[Bracket]) -> str:
    """Format the brackets as text: for each rung, how many configurations train up to which epoch."""
    depth = max(len(bracket.rungs) for bracket in brackets)
    head = ["bracket", *(f"rung {i}" for i in range(depth)), "epochs"]
    rows = [
        [
            str(bracket.number),
            *(f"{rung.trials} to {rung.epochs}" for rung in bracket.rungs),
            *[""] * (depth - len(bracket.rungs)),
            str(bracket.epochs),
        ]
        for bracket in brackets
    ]
    return render(head, rows, left=(0,))
