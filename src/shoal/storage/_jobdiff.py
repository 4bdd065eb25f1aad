"""What differs between the jobs in a folder and those that are to be trained, in words."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.engine.python_state.user_code import PYTHON
from shoal.storage._describer import CODE as FUNCTION
from shoal.storage._initial_weights import compare_weights
from shoal.storage.jobtable import CODE, NAMED, WEIGHTS, JobTable

_OWN = frozenset({"bytecode", PYTHON, "shoal"})


@dataclass(slots=True)
class Differences:
    """What was seen when two tables were compared."""

    lines: list[str] = field(default_factory=list)
    """What makes them other jobs, a line each."""
    other_weights: list[str] = field(default_factory=list)
    """Names of jobs that begin with other weights."""
    rounded: list[str] = field(default_factory=list)
    """Names of jobs whose weights at the beginning differ in their last digits alone."""
    not_compared: list[str] = field(default_factory=list)
    """Functions of which only another Python's bytecode is known."""
    versions: list[str] = field(default_factory=list)
    """Libraries that have another version."""


def compare(held: JobTable, here: JobTable) -> Differences:
    """Compare the jobs of a folder with these."""
    seen = Differences()
    old, new = ({job["name"]: job for job in table.jobs} for table in (held, here))
    seen.lines += [f"job {name!r} is not in it" for name in new if name not in old]
    seen.lines += [f"it has job {name!r}" for name in old if name not in new]
    for name in (name for name in new if name in old):
        _compare_job(held, old[name], here, new[name], seen)
    if not seen.lines and list(old) != list(new):
        seen.lines.append("the same jobs are in it in another order")
    for library, version in held.made_by.items():
        now = here.made_by.get(library, version)
        if library not in _OWN and now != version:
            seen.versions.append(f"{library} {version} there and {now} here")
    return seen


def _compare_job(held: JobTable, old: dict[str, Any], here: JobTable, new: dict[str, Any], seen: Differences) -> None:
    name = new["name"]
    fields = [key for key in {**new, **old} if key not in (CODE, WEIGHTS)]
    other = [key for key in fields if _text(old.get(key)) != _text(new.get(key))]
    for key in other:
        was, now = old.get(key), new.get(key)
        if isinstance(was, dict) and isinstance(now, dict):
            was, now = _apart(was, now), _apart(now, was)
        seen.lines.append(f"job {name!r} has {key} {was!r} there and {now!r} here")
    if old.get(CODE) is not None and new.get(CODE) is not None and old[CODE] != new[CODE]:
        same_bytecode = held.made_by.get("bytecode") == here.made_by.get("bytecode")
        lines = list(_code_lines(name, held, old, here, new, same_bytecode, seen))
        seen.lines += [line for line in lines if not any(line.startswith(_another(name, key)) for key in other)]
    if old.get(WEIGHTS) is not None and new.get(WEIGHTS) is not None and "shapes" not in other:
        verdict = compare_weights(held.parts[old[WEIGHTS]], here.parts[new[WEIGHTS]])
        if verdict != "same":
            (seen.other_weights if verdict == "other" else seen.rounded).append(name)


def _code_lines(
    name: str, held: JobTable, old: dict[str, Any], here: JobTable, new: dict[str, Any], same: bool, seen: Differences
) -> Iterator[str]:
    """A line for each part of a job that differs. `same`: both have the bytecode of one version of Python."""
    was, now = held.code(old), here.code(new)
    for part in {**was, **now}:
        if was.get(part) == now.get(part):
            continue
        if part not in was or part not in now:
            if not part.startswith("class "):  # it belongs to something that is reported
                yield f"{_whose(name, part)} is {'not there' if part in now else 'not here'}"
            continue
        lines = list(_texts(held.parts[was[part]], here.parts[now[part]], part, same, seen))
        if lines:
            more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
            yield f"{_subject(name, part)} {lines[0]}{more}"


def _texts(old: Mapping[str, str], new: Mapping[str, str], part: str, same: bool, seen: Differences) -> Iterator[str]:
    """What differs in one part, most telling first: code that differs makes other values come and go."""
    for place in sorted({**old, **new}, key=lambda place: (not old.get(place, "").startswith(FUNCTION), place)):
        was, now = old.get(place), new.get(place)
        if was == now:
            continue
        if was is not None and now is not None and was.startswith(FUNCTION) and now.startswith(FUNCTION):
            verdict = _same_code(was.split()[1:], now.split()[1:], same)
            if verdict is None:
                seen.not_compared.append(f"{place} of {part}" if place else part)
            elif not verdict:
                yield _code_words(place, part)
        else:
            yield _value_words(place, part, was, now)


def _same_code(old: list[str], new: list[str], same: bool) -> bool | None:
    """Whether two functions are the same; None where that cannot be said."""
    if same and old[0] == new[0]:
        return True
    if len(old) > 1 and len(new) > 1:
        return old[1] == new[1]
    return False if same else None


def _subject(name: str, part: str) -> str:
    if part.startswith("module "):
        return f"job {name!r}: {part} has"
    if part == "model" or part.startswith("class "):
        return f"job {name!r}: its {part}" if part == "model" else f"job {name!r}:"
    return _another(name, part)


def _another(name: str, part: str) -> str:
    return f"job {name!r} has another {part}:"


def _whose(name: str, part: str) -> str:
    return (
        f"job {name!r}: {part}" if part not in (*NAMED, "model", "stop", "optimizer") else f"job {name!r}: its {part}"
    )


def _code_words(place: str, part: str) -> str:
    if part.startswith("class "):
        return f"the code of {part.removeprefix('class ')}.{place} differs"
    if part == "model" or part.startswith("module "):
        return f"another {place}: its code differs"
    return "its code differs" if not place else f"the code of its {place} differs"


def _value_words(place: str, part: str, old: str | None, new: str | None) -> str:
    there, here = ("nothing" if text is None else text for text in (old, new))
    if part.startswith("class "):
        return f"{part}{'.' + place if place else ''} is {there} there and {here} here"
    if part == "model" or part.startswith("module "):
        prefix = "has " if part == "model" else ""
        return f"{prefix}{place.removeprefix('attribute ') or 'type'} {there} there and {here} here"
    return f"it is {there} there and {here} here" if not place else f"its {place} is {there} there and {here} here"


def _apart(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """What is not the same in another table."""
    return {key: value for key, value in one.items() if key not in other or _text(value) != _text(other[key])}


def _text(value: Any) -> str:
    return json.dumps(value)  # as text: NaN is not itself otherwise


def remarks(seen: Differences, unstable: list[str], held: JobTable, here: JobTable) -> Iterator[str]:
    """What could not be compared, or differs and is let pass, a line each."""
    if seen.versions:
        yield (
            f"{', '.join(seen.versions)}; code of libraries is compared by version alone: what is there is taken as it "
            "is, and the rest is trained with what is here"
        )
    if seen.not_compared:
        yield (
            f"it was written by Python {held.made_by.get(PYTHON)}, and this is {here.made_by.get(PYTHON)}: code "
            f"without its source ({_some(seen.not_compared)}) cannot be compared; use another folder if you changed it"
        )
    if seen.rounded:
        yield (
            f"the initial weights of {_some(seen.rounded)} differ in their last digits (another CPU or number of "
            "threads?); they are taken to be the same"
        )
    if unstable:
        yield (
            f"the initial weights of {_some(unstable)} are other ones each time the factory is called, so that they "
            "are not compared; have it draw from torch's generator, which the seed sets"
        )


def _some(names: list[str]) -> str:
    return ", ".join(dict.fromkeys(names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
