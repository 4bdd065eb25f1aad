"""Measurements of earlier runs on disk: results of trials, seconds of a step, and peak bytes by the number of rows.

They are stored in one SQLite file in $SHOAL_CACHE (or ~/.cache/shoal). A key stands for (network, batch, precision,
optimizer, device, torch version, Shoal version). If the file is missing, locked or read-only, nothing is read or
stored; a damaged file is replaced. The cache does not change what a job computes, except that a trial's result
decides the job's tier.
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
TRIAL_RESULT = "verdict"  # the name in files that earlier versions wrote
MOST_ENTRIES = 4000
"""The most keys in the file; beyond that, the keys that were stored longest ago are deleted."""
READ_SECONDS, WRITE_SECONDS = 0.5, 5.0
"""How long to wait while another process has locked the file."""

COMPILED = " compiled"
"""The suffix of the name of a tier whose step was compiled: "stacked compiled"."""

Points = dict[str, dict[int, float]]
"""Values by tier and by number of rows."""

_digests: dict[Any, str] = {}


@dataclass(slots=True)
class Entry:
    """The measurements under one key."""

    trial_result: dict[str, float] = field(default_factory=dict)
    """The numbers of a trial's result, by name; empty if there was no trial."""
    seconds: Points = field(default_factory=dict)
    """Seconds of a step."""
    bytes: Points = field(default_factory=dict)
    """Peak bytes, without the data set."""
    compile_seconds: dict[str, float] = field(default_factory=dict)
    trial_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds that trying a tier took, without compiling."""

    def curve(self, what: str, tier: str) -> Curve | None:
        """Return measured "seconds" or "bytes" as a function of the rows; None if there are none."""
        points: Points = getattr(self, what)
        return Curve.of(points.get(tier, {}).items())


def digest(recipe: Recipe) -> str:
    """Return the cache key of a job's computation and optimizer. It does not depend on other jobs."""
    return _digest(recipe, (recipe.key, recipe.optimizer.key))


def digest_of(recipes: Sequence[Recipe]) -> str:
    """Return the cache key of members of one stack. If all have the same optimizer, it is the key of one of them."""
    kinds = Counter(recipe.optimizer.key for recipe in recipes)
    if len(kinds) == 1:
        return digest(recipes[0])
    return _digest(recipes[0], (recipes[0].key, *sorted(kinds.items(), key=repr)))


def computation(recipe: Recipe) -> str:
    """Return the cache key of what members of one stack have in common, without their optimizers."""
    return _digest(recipe, recipe.key)


def _digest(recipe: Recipe, subject: Hashable) -> str:
    member = recipe.member
    device = torch.cuda.get_device_name(member.device) if member.device.type == "cuda" else "cpu"
    key = (subject, device, torch.get_num_threads())
    if key not in _digests:
        text = repr((FORMAT, subject, device, _version(), torch.__version__, torch.get_num_threads()))
        _digests[key] = hashlib.sha256(text.encode()).hexdigest()[:32]
    return _digests[key]


@functools.cache
def _version() -> str:
    from shoal.environment import version

    return version()


def cache_file() -> Path:
    """Return the path of the cache file."""
    return cache_folder() / f"measured-{FORMAT}.sqlite"


def lookup(key: str) -> Entry:
    """Return the measurements under this key; an empty entry if there are none."""
    entry = Entry()
    query = (
        "select what, tier, rows, value from facts "
        "where key = ? and typeof(value) = 'real' and value > 0 and value < 1e300"
    )
    try:
        with closing(sqlite3.connect(f"{cache_file().absolute().as_uri()}?mode=ro", READ_SECONDS, uri=True)) as db:
            facts = db.execute(query, [key]).fetchall()
    except (sqlite3.Error, OSError, RuntimeError):  # RuntimeError: no home folder
        return entry
    for what, tier, rows, value in facts:
        if what in ("seconds", "bytes"):
            getattr(entry, what).setdefault(tier, {})[rows] = value
        elif what == TRIAL_RESULT:
            entry.trial_result[tier] = value
        elif what in ("compile_seconds", "trial_seconds"):
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
    """Store the cost of a step of so many rows. The latest seconds replace earlier ones; of bytes, the highest value
    stays."""
    times = {"compile_seconds": compile_seconds, "trial_seconds": trial_seconds}
    facts = [("seconds", tier, rows, seconds), ("bytes", tier, rows, bytes)]
    _store(key, facts + [(what, tier, 0, value) for what, value in times.items()])


def remember(key: str, trial_result: dict[str, float]) -> None:
    """Store a trial's result."""
    _store(key, [(TRIAL_RESULT, name, 0, value) for name, value in trial_result.items()])


def _store(key: str, facts: Sequence[tuple[str, str, int, float | None]]) -> None:
    """Write all values that are positive numbers. If the file cannot be written, the next run repeats the trial."""
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
