"""TOML with the line of every key: `tomllib` reads the values, a small scanner of our own finds the places.

tomllib gives no positions. The scanner runs only over text that tomllib has accepted, so it need not check anything:
it walks over keys, strings and brackets and notes the line on which each key, or element of a list, begins.
"""

from __future__ import annotations

import re
import tomllib
from typing import Any

from shoal.jobfile._tree import Node, Problems

Path = tuple[str | int, ...]
BARE = re.compile(r"[A-Za-z0-9_-]+")
BLANK = re.compile(r"(?:[ \t\n]|#[^\n]*)*")
SCALAR = re.compile(r"[^,\]}#\n]*")
STRINGS = (
    re.compile(r'"""(?:[^\\]|\\.)*?"""(?:"{0,2})', re.DOTALL),
    re.compile(r"'''.*?'''(?:'{0,2})", re.DOTALL),
    re.compile(r'"(?:[^"\\]|\\.)*"'),
    re.compile(r"'[^']*'"),
)
PLACE = re.compile(r"^(?P<what>.*) \(at (?:line (?P<line>\d+), column (?P<column>\d+)|end of document)\)$", re.DOTALL)
DIGITS = re.compile(r"[0-9_]{4000,}")


def read(text: str, problems: Problems) -> Node:
    """The file as a tree; JobError where it is not TOML."""
    text = text.replace("\r\n", "\n")
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _not_toml(str(error), text, problems) from None
    except RecursionError:
        raise problems.one(1, "lists or tables are nested too deep; write the file flatter") from None
    except ValueError as error:  # a number of thousands of digits, a date that is none
        digits = DIGITS.search(text)
        line = text.count("\n", 0, digits.start()) + 1 if digits else 1
        what = "a number has thousands of digits; use one of 64 bits" if digits else f"this is not TOML: {error}"
        raise problems.one(line, what) from None
    return _placed(data, (), 1, Scanner(text).places())


def _not_toml(message: str, text: str, problems: Problems) -> Exception:
    match = PLACE.match(message)
    what, line, where = message, max(1, text.rstrip("\n").count("\n") + 1), ""
    if match:
        what = match["what"]
        if match["line"]:
            line, where = int(match["line"]), f" at column {match['column']}"
    if "overwrite" in what or "already" in what or "twice" in what:
        return problems.one(line, f"a key or table is given twice ({what}); keep one of them")
    hint = ', or the file is YAML: end its name in ".yaml"' if re.search(r"(?m)^\s*(- |[\w.]+:( |$))", text) else ""
    return problems.one(line, f"this is not TOML{where}: {what}; text needs quotes, tables [brackets]{hint}")


def _placed(data: Any, path: Path, line: int, places: dict[Path, int]) -> Node:
    if isinstance(data, dict):
        return Node(
            {key: _placed(v, (*path, key), places.get((*path, key), line), places) for key, v in data.items()}, line
        )
    if isinstance(data, list):
        return Node([_placed(v, (*path, i), places.get((*path, i), line), places) for i, v in enumerate(data)], line)
    return Node(data, line)


class Scanner:
    """Walks over valid TOML and notes the line of each key.

    >>> Scanner('a = 1\\n[b]\\nc.d = [\\n 2]').places()
    {('a',): 1, ('b',): 2, ('b', 'c'): 3, ('b', 'c', 'd'): 3, ('b', 'c', 'd', 0): 4}
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.counted = (0, 1)
        self.lines: dict[Path, int] = {}
        self.arrays: dict[Path, int] = {}
        """Tables in each [[list of tables]] so far."""

    def places(self) -> dict[Path, int]:
        """Path -> line, counted from 1."""
        base: Path = ()
        while self._blank():
            if self.text.startswith("[[", self.at):
                base = self._header(2)
            elif self.text[self.at] == "[":
                base = self._header(1)
            else:
                self._pair(base)
        return self.lines

    @property
    def line(self) -> int:
        at, line = self.counted
        self.counted = (self.at, line + self.text.count("\n", at, self.at))
        return self.counted[1]

    def _take(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self.text, self.at)
        assert match is not None, f"no {pattern.pattern} at {self.at}"
        self.at = match.end()
        return match[0]

    def _blank(self) -> bool:
        """Go over blanks and comments; whether anything follows."""
        self._take(BLANK)
        return self.at < len(self.text)

    def _header(self, brackets: int) -> Path:
        line = self.line
        self.at += brackets
        parts = self._key()
        self.at += brackets
        path: Path = ()
        for i, part in enumerate(parts):
            path = (*path, part)
            self.lines.setdefault(path, line)
            if brackets == 2 and i == len(parts) - 1:
                self.arrays[path] = self.arrays.get(path, 0) + 1
            if path in self.arrays:
                path = (*path, self.arrays[path] - 1)
                self.lines.setdefault(path, line)
        return path

    def _pair(self, base: Path) -> None:
        line = self.line
        path = base
        for part in self._key():
            path = (*path, part)
            self.lines.setdefault(path, line)
        self.at += 1  # the =
        self._value(path)

    def _key(self) -> list[str]:
        parts = []
        while True:
            self._blank()
            if self.text[self.at] in "\"'":
                quoted = self._take(STRINGS[2] if self.text[self.at] == '"' else STRINGS[3])
                parts.append(str(tomllib.loads(f"key = {quoted}")["key"]))
            else:
                parts.append(self._take(BARE))
            self._blank()
            if self.text[self.at] != ".":
                return parts
            self.at += 1

    def _value(self, path: Path) -> None:
        self._blank()
        first = self.text[self.at]
        if first == "[":
            self._list(path)
        elif first == "{":
            self._table(path)
        elif first in "\"'":
            three = self.text.startswith(first * 3, self.at)
            self._take(STRINGS[(0 if three else 2) + (first == "'")])
        else:
            self._take(SCALAR)

    def _list(self, path: Path) -> None:
        self.at += 1
        count = 0
        while self._blank() and self.text[self.at] != "]":
            if self.text[self.at] == ",":
                self.at += 1
                continue
            self.lines[(*path, count)] = self.line
            self._value((*path, count))
            count += 1
        self.at += 1

    def _table(self, path: Path) -> None:
        self.at += 1
        while self._blank() and self.text[self.at] != "}":
            if self.text[self.at] == ",":
                self.at += 1
            else:
                self._pair(path)
        self.at += 1
