"""What runs have measured, on disk: verdicts of trials, seconds of a step and peak bytes by the number of rows.

One SQLite file in $SHOAL_CACHE (or ~/.cache/shoal). A key stands for (network, batch, precision, optimizer, device,
torch, Shoal): another version may be faster or slower. Where the file is missing, locked or cannot be written to,
nothing is known and nothing is noted; a damaged file is begun anew. Nothing here changes what a job computes, except
the verdict, which says on which tier it runs.
"""

from __future__ import annotations

import functools
import hashlib
import math
import sqlite3
import time
from collections import Counter
from collections.abc import Hashable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shoal.engine.planning.planner import Curve
from shoal.engine.recipes.recipe import Recipe
from shoal.utils.caches import cache_folder

FORMAT = 5
MOST_ENTRIES = 4000
"""Keys in the file; beyond these, those that were noted longest ago are dropped."""
READ_SECONDS, WRITE_SECONDS = 0.5, 5.0
"""How long to wait while another process has the file locked."""

COMPILED = " compiled"
"""Added to the name of a tier whose step was compiled: "stacked compiled"."""

Points = dict[str, dict[int, float]]
"""Tier -> rows -> value."""

_digests: dict[Any, str] = {}


@dataclass(slots=True)
class Entry:
    """What is known under one key."""

    verdict: dict[str, float] = field(default_factory=dict)
    """Of a trial, by the name of the number; empty where there was none."""
    seconds: Points = field(default_factory=dict)
    """Of a step of so many rows."""
    bytes: Points = field(default_factory=dict)
    """The most that so many rows took, the data set aside."""
    compile_seconds: dict[str, float] = field(default_factory=dict)
    trial_seconds: dict[str, float] = field(default_factory=dict)
    """What trying a tier took, compiling aside."""

    def curve(self, what: str, tier: str) -> Curve | None:
        """What was measured of "seconds" or "bytes", over rows; None: nothing."""
        points: Points = getattr(self, what)
        return Curve.of(points.get(tier, {}).items())


def digest(recipe: Recipe) -> str:
    """What an entry is about: the job's computation and its optimizer, and nothing of the companions."""
    return _digest(recipe, (recipe.key, recipe.optimizer.key))


def digest_of(recipes: Sequence[Recipe]) -> str:
    """What an entry about members of one stack is about: as of one of them, where all have the same optimizer."""
    kinds = Counter(recipe.optimizer.key for recipe in recipes)
    if len(kinds) == 1:
        return digest(recipes[0])
    return _digest(recipes[0], (recipes[0].key, *sorted(kinds.items(), key=repr)))


def computation(recipe: Recipe) -> str:
    """What members of one stack have in common, whatever their optimizers."""
    return _digest(recipe, recipe.key)


def _digest(recipe: Recipe, about: Hashable) -> str:
    member = recipe.member
    device = torch.cuda.get_device_name(member.device) if member.device.type == "cuda" else "cpu"
    key = (about, device, torch.get_num_threads())
    if key not in _digests:
        text = repr((FORMAT, about, device, _version(), torch.__version__, torch.get_num_threads()))
        _digests[key] = hashlib.sha256(text.encode()).hexdigest()[:32]
    return _digests[key]


@functools.cache
def _version() -> str:
    from shoal.version import version

    return version()


def cache_file() -> Path:
    """Where the file is."""
    return cache_folder() / f"measured-{FORMAT}.sqlite"


def lookup(key: str) -> Entry:
    """What is known under this key; an empty entry where nothing is."""
    entry = Entry()
    question = (
        "select what, tier, rows, value from facts "
        "where key = ? and typeof(value) = 'real' and value > 0 and value < 1e300"
    )
    try:
        with closing(sqlite3.connect(f"{cache_file().absolute().as_uri()}?mode=ro", READ_SECONDS, uri=True)) as db:
            facts = db.execute(question, [key]).fetchall()
    except (sqlite3.Error, OSError, RuntimeError):  # RuntimeError: no home folder
        return entry
    for what, tier, rows, value in facts:
        if what in ("seconds", "bytes"):
            getattr(entry, what).setdefault(tier, {})[rows] = value
        elif what in ("verdict", "compile_seconds", "trial_seconds"):
            getattr(entry, what)[tier] = value
    return entry


def note(
    key: str,
    *,
    tier: str,
    rows: int,
    seconds: float | None = None,
    bytes: float | None = None,
    compile_seconds: float | None = None,
    trial_seconds: float | None = None,
) -> None:
    """Store what a step of so many rows took: the latest seconds, the highest bytes."""
    times = {"compile_seconds": compile_seconds, "trial_seconds": trial_seconds}
    facts = [("seconds", tier, rows, seconds), ("bytes", tier, rows, bytes)]
    _store(key, facts + [(what, tier, 0, value) for what, value in times.items()])


def remember(key: str, verdict: dict[str, float]) -> None:
    """Store a verdict."""
    _store(key, [("verdict", name, 0, value) for name, value in verdict.items()])


def _store(key: str, facts: Sequence[tuple[str, str, int, float | None]]) -> None:
    """Write what is a number. A file that cannot be written to only costs the next run a trial."""
    rows = [
        (key, what, tier, rows, float(value), time.time())
        for what, tier, rows, value in facts
        if value is not None and math.isfinite(value) and value > 0
    ]
    try:
        file = cache_file()
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            _write(file, rows)
        except sqlite3.OperationalError:  # locked, read-only, no space
            return
        except sqlite3.DatabaseError:  # damaged
            for name in (file, file.with_name(f"{file.name}-journal")):
                name.unlink(missing_ok=True)
            _write(file, rows)
    except (sqlite3.Error, OSError, RuntimeError):
        return


def _write(file: Path, rows: list[tuple[str, str, str, int, float, float]]) -> None:
    with closing(sqlite3.connect(file, WRITE_SECONDS)) as db, db:
        db.execute("pragma synchronous = off")
        db.execute(
            "create table if not exists facts (key text, what text, tier text, rows integer, value real, noted real, "
            "primary key (key, what, tier, rows)) without rowid"
        )
        db.executemany(
            "insert into facts values (?, ?, ?, ?, ?, ?) "
            "on conflict (key, what, tier, rows) do update set noted = excluded.noted, "
            "value = case what when 'bytes' then max(value, excluded.value) else excluded.value end",
            rows,
        )
        db.execute(
            "delete from facts where key in (select key from facts group by key order by max(noted) desc "
            "limit -1 offset ?)",
            [MOST_ENTRIES],
        )
