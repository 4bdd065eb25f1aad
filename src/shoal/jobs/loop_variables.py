"""Find functions of jobs that read a variable of the loop that made them.

    for width in (4, 8, 16):
        jobs.append(Job(model=lambda: network(width), ...))

Python looks `width` up when the function is called. The loop has ended by then, so all three networks would have width
16. The values that a function's variables had when its job was made show this mistake.
"""

from __future__ import annotations

import dis
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

PLAIN = (bool, int, float, complex, str, bytes, type(None), type, FunctionType)
"""Values that are compared: small ones, and classes and functions, which loops go over too."""

Value = tuple[object, str]
"""What tells a value apart from others, and how it is shown. The value itself is not held."""

_then: WeakKeyDictionary[FunctionType, dict[str, Value]] = WeakKeyDictionary()
"""The variables of each function, with their values when a job that has it was first made."""


def remember(functions: Iterable[object]) -> None:
    """Note the values of the variables that these functions of a new job read from outside."""
    for function in functions:
        if isinstance(function, FunctionType) and function not in _then:
            _then[function] = dict(_variables(function))


def lost_values(jobs: Iterable[tuple[str, Mapping[str, object]]]) -> list[str]:
    """Return a line for each variable that functions of the same code read, if its value differed when their jobs were
    made, and no longer does.

    Args:
        jobs: The name of each job, and its functions by what they are for.
    """
    alike: dict[tuple[str, CodeType], dict[FunctionType, str]] = {}
    for job_name, functions in jobs:
        for what, function in functions.items():
            if isinstance(function, FunctionType) and function in _then:
                alike.setdefault((what, function.__code__), {}).setdefault(function, job_name)
    lines = []
    for (what, _), names in alike.items():
        if len(names) == 1:
            continue
        now = [dict(_variables(function)) for function in names]
        for variable, last in now[0].items():
            values = [_then[function].get(variable, last) for function in names]
            lost = [(name, value) for name, value in zip(names.values(), values, strict=True) if value[0] != last[0]]
            if lost and len({value[0] for value in values}) > 1 and all(each.get(variable) == last for each in now):
                lines.append(_line(what, variable, *lost[0], last, len(names)))
    return lines


def _line(what: str, variable: str, name: str, then: Value, now: Value, count: int) -> str:
    return (
        f"job {name!r}: its {what} reads the variable {variable!r}, which was {then[1]} when the job was made and is "
        f"{now[1]} now, for all {count} jobs; to give each job its own value, write lambda {variable}={variable}: ... "
        "or use functools.partial"
    )


def _variables(function: FunctionType) -> Iterator[tuple[str, Value]]:
    """Yield the plain variables that a function reads from outside and never writes: its closure, then globals."""
    code = function.__code__
    read, written = _names(code)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        if name not in written and isinstance(value, PLAIN):
            yield name, _value(value)
    for name in read:
        if name in function.__globals__ and name not in written and isinstance(function.__globals__[name], PLAIN):
            yield name, _value(function.__globals__[name])


@lru_cache(maxsize=1024)
def _names(code: CodeType) -> tuple[tuple[str, ...], frozenset[str]]:
    """Return the globals that code reads, and the outer variables that it writes, also in functions inside of it."""
    read, written = dict[str, None](), set[str]()
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            read[instruction.argval] = None
        elif instruction.opname in ("STORE_GLOBAL", "STORE_DEREF"):
            written.add(instruction.argval)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            inner_read, inner_written = _names(inner)
            read |= dict.fromkeys(inner_read)
            written |= inner_written
    return tuple(read), frozenset(written)


def _value(value: Any) -> Value:
    if isinstance(value, (type, FunctionType)):
        return (id(value), value.__name__)
    text = repr(value)
    return (type(value), text), text if len(text) <= 40 else text[:37] + "..."
