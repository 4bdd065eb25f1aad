"""Resolve what a field names: a known name, or an import path "module:name" or "file.py:name"; and its arguments."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from shoal.errors import describe_with_place
from shoal.jobfile._tree import KINDS, Mistake, Node, did_you_mean
from shoal.jobfile.importing import NoSuchCode, get_attribute, import_code

SIMPLE = {kind: name for kind, name in KINDS if kind in (bool, int, float, str)}
"""Types of arguments whose values a file can contain, with their names in errors."""


def split(field: str, node: Node) -> tuple[Node, dict[str, Node]]:
    """Return the `use` of a reference, and its arguments."""
    if not node.is_table:
        raise Mistake(node, f"{field} is {node.shown()}; use a name, an import path, or a table with `use`")
    arguments = dict(node.value)
    use = arguments.pop("use", None)
    if use is None:
        known = ", ".join(arguments) or "nothing"
        raise Mistake(node, f"{field} has {known} but no `use`, which says what it is: add use = ...")
    if not isinstance(use.value, str) or not use.value.strip():
        raise Mistake(use, f"{field} is {use.shown()}; use a name or an import path, as text")
    return use, arguments


def find(field: str, use: Node, known: Mapping[str, Any], folder: Path) -> Any:
    """Return the object that a text names."""
    text = str(use.value)
    if text in known:
        return known[text]
    lower = {name.lower(): name for name in known}
    if text.lower() in lower:
        return known[lower[text.lower()]]
    if ":" in text:
        return imported(field, use, folder)
    if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", text) and not text.endswith(".py"):
        module, _, name = text.rpartition(".")
        raise Mistake(use, f"{field} {text!r} is not known; an import path has a colon: {f'{module}:{name}'!r}")
    hint = did_you_mean(text, known)
    more = "" if "did you mean" in hint else "; or give an import path: 'file.py:name' or 'module:name'"
    raise Mistake(use, f"{field} {text!r} is not known{hint}{more}")


def imported(field: str, use: Node, folder: Path) -> Any:
    """Return the object at an import path; errors of its module are reported at the reference."""
    where, _, name = str(use.value).rpartition(":")
    where, name = where.strip(), name.strip()
    if not where or not all(part.isidentifier() for part in name.split(".")):
        raise Mistake(use, f"{field} is {use.value!r}; an import path is 'module:name' or 'file.py:name'")
    try:
        value: Any = guarded(use, f"{field}: importing {where!r}", lambda: import_code(where, folder))
        for part in name.split("."):
            value = guarded(use, f"{field}: taking {name!r}", partial(get_attribute, value, part, where))
    except NoSuchCode as error:
        raise Mistake(use, f"{field}: {error}") from None
    return value


def guarded(line: int | Node, what: str, call: Callable[[], Any], *, ours: bool = False) -> Any:
    """Call the user's code, report its errors and exits as a Mistake of one line, and send its output to stderr.

    Args:
        ours: The code is Shoal's own, whose ValueErrors already say what is wrong.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return call()
    except (NoSuchCode, KeyboardInterrupt):
        raise
    except SystemExit as left:
        raise Mistake(line, f"{what} left the program (SystemExit: {left.code}); remove that call") from None
    except BaseException as error:
        if ours and isinstance(error, (ValueError, OSError)):
            raise Mistake(line, f"{what}: {getattr(error, 'strerror', None) or error}") from None
        raise Mistake(line, f"{what} raised {describe_with_place(error)}") from error


def check_file(what: str, use: Node, path: Path) -> None:
    if not os.path.isfile(path):
        why = "is a folder" if os.path.isdir(path) else "is not there"
        raise Mistake(use, f"{what} {why}; paths are taken from the job file's folder")


def check_arguments(
    field: str,
    use: Node,
    function: Any,
    arguments: Mapping[str, Node],
    given: int = 0,
    *,
    typed: bool = False,
) -> None:
    """Raise a Mistake unless `function` can be called with `given` positional values and these arguments.

    Args:
        typed: Check the annotated types too.
    """
    label, what = (field, "") if use.is_table else (f"{field} {use.value!r}", "argument ")
    try:
        signature = inspect.signature(function, eval_str=typed)
    except Exception:  # it has no signature, or its annotations cannot be evaluated
        return
    parameters = signature.parameters.values()
    names = {p.name: p for p in list(parameters)[given:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    for name, node in arguments.items():
        if name in names:
            if typed:
                _check_type(f"{field}.{name}", node, names[name].annotation)
        elif not any(p.kind is p.VAR_KEYWORD for p in parameters):
            hint = did_you_mean(name, names) if names else "; it takes none"
            raise Mistake(node, f"{label} has no {what}{name!r}{hint}")
    try:
        signature.bind(*[None] * given, **dict.fromkeys(arguments))
    except TypeError as error:
        raise Mistake(
            use, f"{label} cannot be called with these arguments: {error}; give it in the table of {field}"
        ) from None


def _check_type(label: str, node: Node, annotation: Any) -> None:
    """Raise a Mistake if an argument does not have the annotated type, as far as that is one of `SIMPLE`."""
    annotated = get_args(annotation) or (annotation,)
    simple = [kind for kind in (*SIMPLE, NoneType) if any(kind is each for each in annotated)]
    expected = " or ".join(SIMPLE[kind] for kind in simple if kind in SIMPLE)
    allowed = {*simple, *([int] if float in simple else ())}
    kind = type(node.value)
    others = len(annotated) > len(simple)  # a list or a table may fit one of them
    if expected and kind not in allowed and (kind in SIMPLE or kind is NoneType or not others):
        raise Mistake(node, f"{label} is {node.shown()} ({node.kind}); use {expected}")


def bound(function: Callable[..., Any], arguments: Mapping[str, Node]) -> Callable[..., Any]:
    """Return the function with its arguments filled in, under a name that shows them."""
    if not arguments:
        return function
    plain = {name: node.plain() for name, node in arguments.items()}
    bound_function = partial(function, **plain)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    arguments_text = ", ".join(f"{key}={value!r}" for key, value in plain.items())
    bound_function.__qualname__ = f"{name}({arguments_text})"  # type: ignore[attr-defined]  # a run folder distinguishes jobs by it
    return bound_function
