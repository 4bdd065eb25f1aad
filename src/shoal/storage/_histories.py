"""Members' histories as JSON lines: one row an epoch, encoded once each however often they are saved."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.results import finite


@dataclass(slots=True)
class _Known:
    """What is known of one member's history."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    text: bytes = b""
    """Of all rows."""
    seen: bytes = b""
    """As it was last written."""


class Histories:
    """The folder of histories."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[int, _Known] = {}

    def path(self, index: int) -> Path:
        return self.folder / f"{index:04d}.jsonl"

    def lines(self, index: int, history: Any) -> bytes | None:
        """A history as lines from which `from_text` makes the same; None where it holds more than numbers."""
        if not isinstance(history, list) or not history or not all(map(_plain, history[-1:])):
            return None
        known = self._known.setdefault(index, _Known())
        old = len(known.rows)
        if not old or known.rows != history[:old]:
            known.rows, known.text, old = [], b"", 0
        new = [dict(row) for row in history[old:]]
        if not all(map(_plain, new)):
            return None
        known.rows += new
        known.text += to_text(new)
        return known.text

    def view(self, index: int) -> tuple[Path, list[bytes]] | None:
        """The file of a history that has got rows since it was last asked for."""
        known = self._known.get(index)
        if known is None or known.text == known.seen:
            return None
        known.seen = known.text
        return self.path(index), [known.text]


def to_text(history: list[dict[str, float]]) -> bytes:
    """The rows as lines of JSON."""
    return "".join(json.dumps(finite(row)) + "\n" for row in history).encode()


def from_text(text: bytes) -> list[dict[str, float]]:
    """Return the rows; what JSON has no number for, NaN and the infinities, is a string in the text."""
    rows = [json.loads(line) for line in text.splitlines()]
    return [{name: float(v) if isinstance(v, str) else v for name, v in row.items()} for row in rows]


def _plain(row: Any) -> bool:
    """Whether a row of JSON says all there is to say about it."""
    return (
        type(row) is dict
        and all(type(name) is str for name in row)
        and all(type(value) is float or type(value) is int for value in row.values())
    )
