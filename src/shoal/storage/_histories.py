"""Members' histories as JSON lines, one row per epoch. Each row is encoded once, however often it is saved."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.utils.numpy_values import finite


@dataclass(slots=True)
class _Known:
    """One member's history as it was last encoded."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    text: bytes = b""
    """All rows as JSON lines."""
    seen: bytes = b""
    """The text that was last written to the file."""


class Histories:
    """The folder of the members' histories."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[int, _Known] = {}

    def path(self, index: int) -> Path:
        return self.folder / f"{index:04d}.jsonl"

    def lines(self, index: int, history: Any) -> bytes | None:
        """Return a history as JSON lines, which `from_text` reads, or None if it contains more than numbers."""
        if not isinstance(history, list) or not history or not all(map(_plain, history[-1:])):
            return None
        encoded = self._known.setdefault(index, _Known())
        num_old = len(encoded.rows)
        if not num_old or encoded.rows != history[:num_old]:
            encoded.rows, encoded.text, num_old = [], b"", 0
        new = [dict(row) for row in history[num_old:]]
        if not all(map(_plain, new)):
            return None
        encoded.rows += new
        encoded.text += to_text(new)
        return encoded.text

    def view(self, index: int) -> tuple[Path, list[bytes]] | None:
        """Return the history's file and its contents, or None if nothing has changed since the last call."""
        encoded = self._known.get(index)
        if encoded is None or encoded.text == encoded.seen:
            return None
        encoded.seen = encoded.text
        return self.path(index), [encoded.text]


def to_text(history: list[dict[str, float]]) -> bytes:
    """Return the rows as JSON lines."""
    return "".join(json.dumps(finite(row)) + "\n" for row in history).encode()


def from_text(text: bytes) -> list[dict[str, float]]:
    """Return the rows of JSON lines. NaN and infinities, which JSON does not have, are strings in the text."""
    rows = [json.loads(line) for line in text.splitlines()]
    return [{name: float(v) if isinstance(v, str) else v for name, v in row.items()} for row in rows]


def _plain(row: Any) -> bool:
    """Return whether JSON can represent a row without loss."""
    return (
        type(row) is dict
        and all(type(name) is str for name in row)
        and all(type(value) is float or type(value) is int for value in row.values())
    )
