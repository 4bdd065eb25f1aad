"""Parse TOML with the line of every key.

tomllib gives no positions, but a file is a sequence of statements, each of which can be parsed alone: its contents
begin on its first line. A list over several lines is parsed in the same way, some of its lines at a time.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from typing import Any

from shoal.jobfile._tree import Node, Problems

Path = tuple[str | int, ...]
DIGITS = re.compile(r"[0-9_]{4000,}")
ENDS = ("]", '"""', "'''")
"""The last line of a statement of several lines contains one of these."""


def read(text: str, problems: Problems) -> Node:
    """Return the file as a tree, or raise a JobError if it is not TOML."""
    text = text.replace("\r\n", "\n")
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _not_toml(str(error), text, problems) from None
    except RecursionError:
        raise problems.one(1, "lists or tables are nested too deep; write the file flatter") from None
    except ValueError as error:  # a number of thousands of digits, or an invalid date
        digits = DIGITS.search(text)
        line = text.count("\n", 0, digits.start()) + 1 if digits else 1
        what = "a number has thousands of digits; use one of 64 bits" if digits else f"this is not TOML: {error}"
        raise problems.one(line, what) from None
    return _placed(data, (), 1, lines_of(text))


def _not_toml(message: str, text: str, problems: Problems) -> Exception:
    position = re.search(r"\(at line (\d+), column \d+\)$", message)
    line = int(position[1]) if position else text.rstrip("\n").count("\n") + 1
    if "overwrite" in message or "already" in message or "twice" in message:
        return problems.one(line, f"a key or table is given twice ({message}); keep one of them")
    hint = ', or the file is YAML: end its name in ".yaml"' if re.search(r"(?m)^\s*(- |[\w.]+:( |$))", text) else ""
    return problems.one(line, f"this is not TOML: {message}; text needs quotes, tables [brackets]{hint}")


def _placed(data: Any, path: Path, line: int, lines: dict[Path, int]) -> Node:
    line = lines.get(path, line)
    if isinstance(data, dict):
        return Node({key: _placed(value, (*path, key), line, lines) for key, value in data.items()}, line)
    if isinstance(data, list):
        return Node([_placed(value, (*path, i), line, lines) for i, value in enumerate(data)], line)
    return Node(data, line)


def lines_of(text: str) -> dict[Path, int]:
    """Return the line of each path in valid TOML; values within one line have the line of their statement.

    >>> lines_of('a = 1\\n[b]\\nc.d = [\\n 2,\\n 3]')
    {('a',): 1, ('b',): 2, ('b', 'c'): 3, ('b', 'c', 'd'): 3, ('b', 'c', 'd', 0): 4, ('b', 'c', 'd', 1): 5}
    """
    lines: dict[Path, int] = {}
    tables: dict[Path, int] = {}  # the last index in each [[list of tables]] so far
    base: Path = ()
    for line, statement, data in _pieces(text, ""):
        keys, value = _descend(data)
        if statement.lstrip().startswith("["):
            base = ()
            for number, key in enumerate(keys, 1):
                base = (*base, key)
                lines.setdefault(base, line)
                if number == len(keys) and statement.lstrip().startswith("[["):
                    tables[base] = tables.get(base, -1) + 1
                if base in tables:
                    base = (*base, tables[base])
                    lines.setdefault(base, line)
            continue
        path = base
        for key in keys:
            path = (*path, key)
            lines.setdefault(path, line)
        opened, _, elements = statement.partition("[")
        if isinstance(value, list) and "\n" in elements.rstrip():
            number = 0
            for start, _, piece in _pieces(elements[: elements.rindex("]")], "x = ["):
                for _ in piece["x"]:
                    lines[(*path, number)] = line + opened.count("\n") + start - 1
                    number += 1
    return lines


def _pieces(text: str, before: str) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yield the shortest sequences of lines that can be parsed alone: first line, text, contents.

    Args:
        before: Text that is put before each piece.
    """
    piece, first = "", 1
    for number, line in enumerate(text.split("\n"), 1):
        piece += line + "\n"
        if "\n" in piece[:-1] and not before and not any(end in line for end in ENDS):
            continue
        try:
            data = tomllib.loads(f"{before}{piece}{']' if before else ''}")
        except (tomllib.TOMLDecodeError, RecursionError):
            continue
        if data:
            yield first, piece, data
        piece, first = "", number + 1


def _descend(data: Any) -> tuple[list[str], Any]:
    """Return the keys on the way into a statement's contents while there is only one key, and the value there."""
    keys = []
    while isinstance(data, dict) and len(data) == 1:
        ((key, data),) = data.items()
        keys.append(key)
    return keys, data
