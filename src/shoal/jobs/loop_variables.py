"""Find functions of jobs that read a variable of the loop that made them.

    for width in (4, 8, 16):
        jobs.append(Job(model=lambda: network(width), ...))

Python looks `width` up when the function is called. The loop has ended by then, so all three networks would have width
16. The values that a function's variables had when its job was made show this mistake.
"""

from __future__ import annotations

import argparse
import dataclasses
import dis
from collections.abc import Iterable, Iterator, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

from shoal.errors import is_library_file

PLAIN = (bool, int, float, complex, type(None))
DEFINITIONS = (type, FunctionType, BuiltinFunctionType)
MOST_ITEMS, MOST_CHARACTERS, DEEPEST = 50, 1000, 3
"""How large a list, dict or text may be to be compared by what it holds, and how deep lists and dicts are searched."""


Value = tuple[object, str, int | None]
"""What distinguishes a value from others, how it is shown, and the id of an object that can be changed in place. The
value itself is not held."""


class Unknown(Exception):
    """A value is not compared: it is of another kind, or large."""


Values = dict[str, Value]

_then: WeakKeyDictionary[FunctionType, Values] = WeakKeyDictionary()
"""The variables of each function, with their values when a job that has it was first made."""
_then_of_job: WeakKeyDictionary[Any, dict[FunctionType, Values]] = WeakKeyDictionary()
"""The same of a later job that has the same function, if its values are other ones."""
_definitions: WeakKeyDictionary[Any, Value] = WeakKeyDictionary()
"""Classes, and functions without a closure: many jobs mention the same few."""


def remember(job: Any, functions: Iterable[object]) -> None:
    """Note the values of the variables that these functions of a new job read from outside."""
    for function in functions:
        if isinstance(function, FunctionType) and _reads(function):
            values = dict(_variables(function))
            if _then.setdefault(function, values) != values:
                _then_of_job.setdefault(job, {})[function] = values


def lost_values(jobs: Iterable[tuple[str, Any, Mapping[str, object]]]) -> list[str]:
    """Return a line for each variable that functions of the same code read, if its value differed when their jobs were
    made, and no longer does.

    Args:
        jobs: The name of each job, the job, and its functions by what they are for.
    """
    alike: dict[tuple[str, CodeType], list[tuple[str, Any, FunctionType]]] = {}
    for name, job, functions in jobs:
        for what, function in functions.items():
            if isinstance(function, FunctionType) and function in _then:
                alike.setdefault((what, function.__code__), []).append((name, job, function))
    lines = []
    for (what, _), users in alike.items():
        if len(users) == 1:
            continue
        functions_now = {function: dict(_variables(function)) for _, _, function in users}
        one_for_all = len(functions_now) == 1  # jobs made by dataclasses.replace have the functions of others
        then = [_then_of_job.get(job, {}).get(f, _then[f]) if one_for_all else _then[f] for _, job, f in users]
        now = list(functions_now.values())
        for variable, last in now[0].items():
            values = [each.get(variable, last) for each in then]
            lost = [(user[0], value) for user, value in zip(users, values, strict=True) if not _same(value, last)]
            differ = any(not _same(value, values[0]) for value in values)
            if lost and differ and all(variable in each and _same(each[variable], last) for each in now):
                lines.append(_line(what, variable, *lost[0], last, len(users)))
    return lines


def _line(what: str, variable: str, name: str, then: Value, now: Value, count: int) -> str:
    return (
        f"job {name!r}: its {what} reads the variable {variable!r}, which was {then[1]} when the job was made and is "
        f"{now[1]} now, for all {count} jobs; to give each job its own value, write lambda {variable}={variable}: "
        "... or use functools.partial"
    )


def _reads(function: FunctionType) -> bool:
    """Return whether a function may read variables of a loop; one of a library reads none of the user's globals."""
    return bool(function.__closure__) or bool(_names(function.__code__)[0])


def _variables(function: FunctionType) -> Iterator[tuple[str, Value]]:
    """Yield the variables that a function reads from outside and never writes, if they can be compared: its closure,
    then globals."""
    code, space = function.__code__, function.__globals__
    read, written = _names(code)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            if name not in written:
                yield name, _value(cell.cell_contents)
        except Exception:  # not assigned yet, not compared, or a class of the user whose repr raises
            continue
    for name in read:
        try:
            if name in space and name not in written:
                yield name, _value(space[name])
        except Exception:
            continue


_MOST_CODES = 1024
_names_by_id: dict[int, tuple[CodeType, tuple[tuple[str, ...], frozenset[str]]]] = {}
"""The names of code by its id, since to hash code takes longer; the code is held so that the id stays its own."""


def _names(code: CodeType) -> tuple[tuple[str, ...], frozenset[str]]:
    """Return the globals that code reads, and the outer variables that it writes."""
    if id(code) not in _names_by_id:
        if len(_names_by_id) >= _MOST_CODES:
            _names_by_id.clear()
        _names_by_id[id(code)] = code, _find_names(code)
    return _names_by_id[id(code)][1]


def _find_names(code: CodeType) -> tuple[tuple[str, ...], frozenset[str]]:
    """Find these names, also in functions inside of the code.

    Globals of libraries are left out: no loop of the user changes them.
    """
    read, written = dict[str, None](), set[str]()
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            read[instruction.argval] = None
        elif instruction.opname in ("STORE_GLOBAL", "STORE_DEREF"):
            written.add(instruction.argval)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            inner_read, inner_written = _find_names(inner)
            read |= dict.fromkeys(inner_read)
            written |= inner_written
    if is_library_file(code.co_filename):
        read.clear()
    return tuple(read), frozenset(written)


def _same(one: Value, other: Value) -> bool:
    return one[0] == other[0] or (one[2] is not None and one[2] == other[2])


def _value(value: Any) -> Value:
    """Return what a value is compared by; raise Unknown if it is not compared."""
    if isinstance(value, PLAIN):
        return _content(value, 0), repr(value), None
    if isinstance(value, str | bytes):
        return _content(value, 0), _shorten(repr(value[:MOST_CHARACTERS])), None
    if isinstance(value, DEFINITIONS):
        if value in _definitions:
            return _definitions[value]
        made = _content(value, DEEPEST), value.__name__, None
        if not getattr(value, "__closure__", None):
            _definitions[value] = made
        return made
    content = _content(value, DEEPEST)
    return content, _shorten(repr(value)), None if isinstance(value, tuple) else id(value)


def _shorten(text: str) -> str:
    return text if len(text) <= 40 else text[:37] + "..."


def _content(value: Any, depth: int) -> object:
    """Return what is equal for values that are equal to a user: also for classes and functions that are defined again
    in each round of a loop."""
    if isinstance(value, PLAIN):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, str | bytes):
        return f"{type(value).__name__} {value!r}" if len(value) <= MOST_CHARACTERS else (len(value), hash(value))
    if isinstance(value, type | BuiltinFunctionType):
        return value.__module__, value.__qualname__
    if isinstance(value, FunctionType):
        return value.__code__, _held(value, depth)
    if isinstance(value, SimpleNamespace | argparse.Namespace) or dataclasses.is_dataclass(value):
        value = {name: getattr(value, name, None) for name in getattr(value, "__dict__", _fields(value))}
    if isinstance(value, dict):
        value = list(value.items())
    if type(value) not in (tuple, list, range) or len(value) > MOST_ITEMS or not depth:
        raise Unknown
    return tuple(_content(item, depth - 1) for item in value)


def _fields(value: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []


def _held(function: FunctionType, depth: int) -> tuple[object, ...]:
    """Return the contents of a function's defaults and closure; None for those that are not compared."""
    held: list[object] = []
    for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        held.append(_known(value, depth - 1))
    for cell in function.__closure__ or ():
        try:
            held.append(_known(cell.cell_contents, depth - 1))
        except ValueError:  # not assigned yet
            held.append(None)
    return tuple(held)


def _known(value: Any, depth: int) -> object:
    try:
        return _content(value, depth) if depth > 0 else None
    except Unknown:
        return None
