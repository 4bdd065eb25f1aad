"""What was learned about recipes, kept on disk: verdicts, seconds of a step and peak bytes by the number of rows.

One JSON file in $SHOAL_CACHE (or ~/.cache/shoal), an entry for each (network, batch, precision, optimizer, device,
torch, Shoal): another version may be faster or slower. It is written whole or not at all; a missing or damaged file, or
part of it, is nothing learned. Nothing here changes what a job computes, except the verdict, which says on which tier
it runs.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shoal.engine.planning.planner import Curve
from shoal.engine.recipes.recipe import Recipe

FORMAT = 4
MOST_ENTRIES = 4000
"""The oldest entries are dropped beyond these."""

COMPILED = " compiled"
"""Added to the name of a tier whose step was compiled: "stacked compiled"."""

Points = dict[str, dict[int, float]]
"""Tier -> rows -> value."""

_digests: dict[Any, str] = {}


@dataclass(slots=True)
class Entry:
    """What is known about one recipe."""

    verdict: dict[str, Any] | None = None
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
    """Where it is kept."""
    folder = os.environ.get("SHOAL_CACHE")
    return (Path(folder) if folder else Path.home() / ".cache" / "shoal") / "learned.json"


def lookup(key: str) -> Entry:
    """What is known under this key; an empty entry where nothing is."""
    return _entry(_read().get(key))


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
    """Keep what a step of so many rows took: the latest seconds, the highest bytes."""

    def change(entry: Entry) -> None:
        if seconds is not None and seconds > 0 and math.isfinite(seconds):
            entry.seconds.setdefault(tier, {})[rows] = seconds
        if bytes is not None and bytes > 0 and math.isfinite(bytes):
            known = entry.bytes.setdefault(tier, {})
            known[rows] = max(bytes, known.get(rows, 0.0))
        if compile_seconds is not None:
            entry.compile_seconds[tier] = compile_seconds
        if trial_seconds is not None:
            entry.trial_seconds[tier] = trial_seconds

    _change(key, change)


def remember(key: str, verdict: dict[str, Any]) -> None:
    """Keep a verdict."""

    def change(entry: Entry) -> None:
        entry.verdict = verdict

    _change(key, change)


def _change(key: str, change: Callable[[Entry], None]) -> None:
    """Read, change, write. A folder that cannot be written to costs only the next run a trial."""
    file = cache_file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with _locked(file):
            table = _read()
            entry = _entry(table.pop(key, None))
            change(entry)
            table[key] = _plain(entry)
            kept = dict(list(table.items())[-MOST_ENTRIES:])
            handle, name = tempfile.mkstemp(dir=file.parent, prefix=".learned-")
            with os.fdopen(handle, "w") as out:
                json.dump({"format": FORMAT, "entries": kept}, out)
            Path(name).replace(file)
    except (OSError, RuntimeError):
        return


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Two processes that learn at the same time both keep what they learned."""
    try:
        import fcntl
    except ImportError:  # not on this system: the last one wins
        yield
        return
    with open(file.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _read() -> dict[str, Any]:
    try:
        found = json.loads(cache_file().read_text())
    except (OSError, ValueError, RuntimeError):
        return {}
    entries = found.get("entries") if isinstance(found, dict) and found.get("format") == FORMAT else None
    return entries if isinstance(entries, dict) else {}


def _entry(found: Any) -> Entry:
    """An entry from what the file holds; what is damaged is left out."""
    entry = Entry()
    if not isinstance(found, dict):
        return entry
    if isinstance(found.get("verdict"), dict):
        entry.verdict = found["verdict"]
    for what in ("seconds", "bytes"):
        setattr(entry, what, _points(found.get(what)))
    for what in ("compile_seconds", "trial_seconds"):
        times = found.get(what)
        if isinstance(times, dict):
            setattr(entry, what, {str(k): float(v) for k, v in times.items() if _good(v)})
    return entry


def _points(found: Any) -> Points:
    if not isinstance(found, dict):
        return {}
    return {
        str(tier): {int(rows): float(value) for rows, value in row.items() if str(rows).isdigit() and _good(value)}
        for tier, row in found.items()
        if isinstance(row, dict)
    }


def _good(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _plain(entry: Entry) -> dict[str, Any]:
    names = ("verdict", "seconds", "bytes", "compile_seconds", "trial_seconds")
    return {name: value for name in names if (value := getattr(entry, name))}
