"""Compare the jobs in a folder with the jobs to be trained, and report what differs."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.engine.python_state.user_code import PYTHON
from shoal.storage._describer import CODE as FUNCTION
from shoal.storage._initial_weights import compare_weights
from shoal.storage.jobtable import ADDED, CODE, KEY, WEIGHTS, JobTable

_OWN = frozenset({"bytecode", PYTHON, "shoal"})


@dataclass(slots=True)
class Differences:
    """The result of comparing two job tables."""

    lines: list[str] = field(default_factory=list)
    """Differences that make them different jobs, one line each."""
    other_weights: list[str] = field(default_factory=list)
    """Names of jobs with different initial weights."""
    rounded: list[str] = field(default_factory=list)
    """Names of jobs whose initial weights differ only in the last digits."""
    added: list[str] = field(default_factory=list)
    """Names of new jobs."""
    longer: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Jobs with more `epochs` or `steps` than before: name -> the new number."""
    configs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Jobs whose `config` has more keys, which training does not use: name -> the new config."""
    versions: list[str] = field(default_factory=list)
    """Libraries with a different version."""
    of_jobs: dict[str, tuple[int, list[str]]] = field(default_factory=dict)
    """Text of a difference -> its index in `lines`, and the names of the jobs that have it."""

    def add(self, name: str, text: str) -> None:
        """Add a difference of a job; jobs with the same difference share one line."""
        index, names = self.of_jobs.setdefault(text, (len(self.lines), []))
        names.append(name)
        others = f" (and so for {len(names) - 1} more)" if len(names) > 1 else ""
        self.lines[index : index + 1] = [f"job {names[0]!r}{text}{others}"]

    def updates(self) -> dict[str, dict[str, Any]]:
        """Return what the folder's entries of the same jobs have to take over, by name."""
        new = {name: {"config": config} for name, config in self.configs.items()}
        return {name: {**new.get(name, {}), **self.longer.get(name, {})} for name in {**new, **self.longer}}


def compare(
    stored: JobTable,
    current: JobTable,
    *,
    grows: bool = False,
    extends: bool = False,
    part: bool = False,
    changed: Collection[str] = (),
) -> Differences:
    """Compare the jobs of a folder (`stored`) with those to be trained (`current`).

    Args:
        stored: The folder's table.
        current: The table of the jobs to be trained.
        grows: The last jobs of `current` may be missing in the folder.
        extends: Any job of `current` may be missing in the folder, or have more epochs or steps than there.
        part: `current` contains only some of the jobs.
        changed: Names of jobs that are not compared.
    """
    diff = Differences()
    old, new = ({job["name"]: job for job in table.jobs} for table in (stored, current))
    diff.added = [name for name in new if name not in old]
    diff.lines += [f"job {name!r} is not in it" for name in diff.added if not (grows or extends)]
    list_all = " and the list does not: give all of its jobs, and the new ones" if extends and diff.added else ""
    missing = [name for name, job in old.items() if name not in new and not (part or job.get(ADDED))]
    diff.lines += [f"it has job {name!r}{list_all}" for name in missing]
    for name in (name for name in new if name in old and name not in changed):
        if extends:
            diff.longer |= {name: longer} if (longer := _longer(old[name], new[name])) else {}
        before, now = (job[name].get("config", {}) for job in (old, new))
        if now.keys() - before.keys():
            diff.configs[name] = before | now
        _compare_job(stored, old[name], current, new[name], diff)
    if not (diff.lines or extends) and list(old) != list(new)[: len(old)]:
        diff.lines.append("the same jobs are in it in another order")
    for library, version in stored.made_by.items():
        now = current.made_by.get(library, version)
        if library not in _OWN and now != version:
            diff.versions.append(f"{library} {version} there and {now} here")
    return diff


def _longer(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return the new number of epochs or steps, if it is larger than before."""
    return {
        key: new[key]
        for key in ("epochs", "steps")
        if old[key] is not None and new[key] is not None and new[key] > old[key]
    }


def _compare_job(
    stored: JobTable, old: dict[str, Any], current: JobTable, new: dict[str, Any], diff: Differences
) -> None:
    """Add the differences between a stored job and the current one to `diff`."""
    name = new["name"]
    fields = [key for key in {**new, **old} if key not in (ADDED, CODE, WEIGHTS, KEY)]
    longer = diff.longer.get(name, {})
    other = [key for key in fields if _text(old.get(key)) != _text(new.get(key)) and key not in longer]
    for key in other:
        was, now = old.get(key), new.get(key)
        if key == "config":  # values may be noted later, not changed
            was, now = (
                {k: v for k, v in (one or {}).items() if k in (two or {})} for one, two in ((was, now), (now, was))
            )
            if _text(was) == _text(now):
                continue
        if isinstance(was, dict) and isinstance(now, dict):
            was, now = _different_entries(was, now), _different_entries(now, was)
        hashes = key in ("data", "val") and isinstance(was, str) and isinstance(now, str)
        diff.add(name, f" has other {key} than there" if hashes else f" has {key} {was!r} there and {now!r} here")
    if old.get(CODE) is not None and new.get(CODE) is not None:
        was, now = stored.code(old), current.code(new)
        for part in {**was, **now}:
            shared = part in was and part in now
            if part in other or (not shared and part.startswith(("class ", "globals "))):
                continue  # it is reported already, or belongs to something that is
            lines = list(_changes(was.get(part, {}), now.get(part, {}), _same_bytecode(stored, current)))
            more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
            for line in lines[:1]:
                diff.add(name, f": {line}{more}")
    if old.get(WEIGHTS) is not None and new.get(WEIGHTS) is not None and "shapes" not in other:
        comparison = compare_weights(stored.parts[old[WEIGHTS]], current.parts[new[WEIGHTS]])
        if comparison != "same":
            (diff.other_weights if comparison == "other" else diff.rounded).append(name)


def _changes(was: Mapping[str, str], now: Mapping[str, str], same_bytecode: bool) -> Iterator[str]:
    """Yield the differences in one part, code first, since changed code explains other changes."""
    locations = [location for location in {**was, **now} if was.get(location) != now.get(location)]
    for location in sorted(locations, key=lambda location: (not was.get(location, "").startswith(FUNCTION), location)):
        old_text, new_text = was.get(location, "nothing"), now.get(location, "nothing")
        if not (old_text.startswith(FUNCTION) and new_text.startswith(FUNCTION)):
            yield f"{location} is {old_text} there and {new_text} here"
        elif same_bytecode:
            yield f"the code of {location} differs"


def _same_bytecode(stored: JobTable, current: JobTable) -> bool:
    return stored.made_by.get("bytecode") == current.made_by.get("bytecode")


def _different_entries(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return the entries that the other dict does not have, or has with a different value."""
    return {key: value for key, value in one.items() if key not in other or _text(value) != _text(other[key])}


def _text(value: Any) -> str:
    return json.dumps(value)  # texts are compared, because NaN != NaN


def remarks(diff: Differences, unstable: list[str], stored: JobTable, current: JobTable) -> Iterator[str]:
    """Yield a line for everything that could not be compared, and for each accepted difference."""
    if diff.versions:
        yield (
            f"{', '.join(diff.versions)}; jobs that have ended are not trained again, and the others continue with the "
            "versions installed here"
        )
    if not _same_bytecode(stored, current):
        yield (
            f"it was written by Python {stored.made_by.get(PYTHON)}, and this is {current.made_by.get(PYTHON)}, whose "
            "bytecode differs: code cannot be compared; use another folder if you changed it"
        )
    if diff.rounded:
        yield (
            f"the initial weights of {_some(diff.rounded)} differ in their last digits (another CPU or number of "
            "threads?); they count as the same"
        )
    if unstable:
        yield (
            f"the initial weights of {_some(unstable)} differ each time the factory is called, so they are "
            "not compared; draw them from torch's generator, which the seed sets"
        )


def extension(diff: Differences, stored: JobTable) -> str:
    """Return new and longer jobs in one line, or "" if there are none."""
    parts = []
    if diff.added:
        parts.append(f"{len(diff.added)} new {'job' if len(diff.added) == 1 else 'jobs'} ({_some(diff.added)})")
    old = {job["name"]: job for job in stored.jobs}
    lengths: dict[str, list[str]] = {}
    for name, longer in diff.longer.items():
        for key, value in longer.items():
            lengths.setdefault(f"{key} {old[name][key]} -> {value}", []).append(name)
    parts += [f"{change} for {_some(names)}" for change, names in lengths.items()]
    return "; ".join(parts)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
