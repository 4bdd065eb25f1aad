"""What a job file says, as a tree whose every value knows its line; and mistakes, collected with theirs."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from shoal.errors import JobError

LONGEST = 60
"""Characters of a value that an error shows."""
LARGEST = 2**64
"""Whole numbers stay below this; the seeds of torch have 64 bits."""
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
"""What a value is, in the words of an error."""


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A value in the file: text, a number, true or false, None, a list of nodes, or a table of nodes by key."""

    value: Any
    line: int
    """Where its key is, or the value itself in a list."""

    @property
    def kind(self) -> str:
        """What it is, in the words of an error."""
        return next(name for kinds, name in KINDS if isinstance(self.value, kinds))

    @property
    def is_table(self) -> bool:
        return isinstance(self.value, dict)

    def plain(self) -> Any:
        """The value as Python has it, without places."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value

    def shown(self) -> str:
        """The value as an error shows it, cut where it is long."""
        plain = self.plain()
        text = text_of(plain) if isinstance(plain, (bool, type(None))) else repr(plain)
        return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def text_of(value: object) -> str:
    """A plain value as it is written in names and errors."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return "null" if value is None else str(value)


class Mistake(Exception):
    """What is wrong, and on which line."""

    def __init__(self, line: int | Node, text: str) -> None:
        self.line = line.line if isinstance(line, Node) else line
        super().__init__(text)


class Problems:
    """Mistakes in one file, each with its line; the same mistake is reported once."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._problems: dict[tuple[int, str], None] = {}

    def add(self, line: int | Node, text: str) -> None:
        """Note a mistake: what it is, the rule, the fix; on one line."""
        number = line.line if isinstance(line, Node) else line
        self._problems[number, " ".join(text.split())] = None

    def note(self, mistake: Mistake) -> None:
        """Note a mistake that was raised; reading continues."""
        self.add(mistake.line, str(mistake))

    def __bool__(self) -> bool:
        return bool(self._problems)

    def __iter__(self) -> Iterator[str]:
        for line, text in sorted(self._problems, key=lambda problem: problem[0]):
            yield f"{self.path}:{line}: {text}"

    def stop_if_any(self) -> None:
        """Raise what was found as one JobError, in the order of the file."""
        if self:
            raise JobError(*self)

    def one(self, line: int | Node, text: str) -> JobError:
        """An error of this one mistake, and those before."""
        self.add(line, text)
        return JobError(*self)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'Adam'?`, or what there is where nothing is near."""
    names = list(known)
    lower = {name.lower(): name for name in reversed(names)}
    near = get_close_matches(word.lower(), list(lower), n=1, cutoff=0.6)
    if near:
        return f"; did you mean {lower[near[0]]!r}?"
    return f"; use one of {', '.join(names)}" if names else ""


def too_large(node: Node) -> Iterator[Node]:
    """Whole numbers that no machine number holds."""
    if isinstance(node.value, int) and not -LARGEST < node.value < LARGEST:
        yield node
    elif isinstance(node.value, (dict, list)):
        for child in node.value.values() if isinstance(node.value, dict) else node.value:
            yield from too_large(child)
