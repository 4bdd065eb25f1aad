"""The contents of a job file as a tree in which every value knows its line, and mistakes collected with their lines."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from shoal.errors import JobError

LONGEST = 60
"""How many characters of a value an error shows."""
LARGEST = 2**64
"""Whole numbers must be below this, since torch's seeds have 64 bits."""
KINDS: tuple[tuple[Any, str], ...] = (
    (bool, "true or false"),
    (int, "a whole number"),
    (float, "a number"),
    (str, "text"),
    (dict, "a table"),
    (list, "a list"),
    (type(None), "empty"),
    ((datetime.date, datetime.time), "a date or time"),
)
"""The types of values, with their names in errors."""


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A value in the file: text, a number, true or false, None, a list of nodes, or a table of nodes by key."""

    value: Any
    line: int
    """The line of its key, or of the value itself in a list."""

    @property
    def kind(self) -> str:
        """The type of the value, as errors name it."""
        return next(name for types, name in KINDS if isinstance(self.value, types))

    @property
    def is_table(self) -> bool:
        return isinstance(self.value, dict)

    def plain(self) -> Any:
        """Return the value as plain Python, without lines."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value

    def shown(self) -> str:
        """Return the value as an error shows it, shortened if it is long."""
        plain = self.plain()
        text = text_of(plain) if isinstance(plain, (bool, type(None))) else repr(plain)
        return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def text_of(value: object) -> str:
    """Return a plain value as it is written in names and errors."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return "null" if value is None else str(value)


class Mistake(Exception):
    """A mistake in a job file, with its line."""

    def __init__(self, line: int | Node, text: str) -> None:
        self.line = line.line if isinstance(line, Node) else line
        super().__init__(text)


class Problems:
    """The mistakes in one file, each with its line; the same mistake is reported once."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._problems: dict[tuple[int, str], None] = {}

    def add(self, line: int | Node, text: str) -> None:
        """Add a mistake in one line: what it is, the rule, the fix."""
        number = line.line if isinstance(line, Node) else line
        self._problems[number, " ".join(text.split())] = None

    def note(self, mistake: Mistake) -> None:
        """Add a mistake that was raised, so that reading can continue."""
        self.add(mistake.line, str(mistake))

    def __bool__(self) -> bool:
        return bool(self._problems)

    def __iter__(self) -> Iterator[str]:
        for line, text in sorted(self._problems, key=lambda problem: problem[0]):
            yield f"{self.path}:{line}: {text}"

    def stop_if_any(self) -> None:
        """Raise all mistakes as one JobError, in the order of the file."""
        if self:
            raise JobError(*self)

    def one(self, line: int | Node, text: str) -> JobError:
        """Return an error with this mistake and all earlier ones."""
        self.add(line, text)
        return JobError(*self)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'Adam'?`, or the list of known names if none is similar."""
    names = list(known)
    lower = {name.lower(): name for name in reversed(names)}
    near = get_close_matches(word.lower(), list(lower), n=1, cutoff=0.6)
    if near:
        return f"; did you mean {lower[near[0]]!r}?"
    return f"; use one of {', '.join(names)}" if names else ""


def too_large(node: Node) -> Iterator[Node]:
    """Yield whole numbers of more than 64 bits."""
    if isinstance(node.value, int) and not -LARGEST < node.value < LARGEST:
        yield node
    elif isinstance(node.value, (dict, list)):
        for child in node.value.values() if isinstance(node.value, dict) else node.value:
            yield from too_large(child)
