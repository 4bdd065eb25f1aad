"""Whose code something is: the user's own, which is compared line by line, or a library's, which has a version."""

from __future__ import annotations

import site
import sys
import sysconfig
import types
from functools import lru_cache
from importlib import metadata
from typing import Any

PYTHON = "python"
_KNOWN = frozenset({"torch", "numpy", "shoal", "builtins"})
"""Libraries wherever they are installed, such as from a working copy."""


def library_of(thing: Any) -> str | None:
    """The library that a function or a class comes from; None: it is the user's own code."""
    code = getattr(thing, "__code__", None)
    if isinstance(code, types.CodeType) and not code.co_filename.startswith("<"):
        return _library_of_file(code.co_filename, _top(thing))  # not by its module: a wrapper takes on its function's
    return _library_of_module(str(getattr(thing, "__module__", None) or "builtins"))


def library_of_module(module: types.ModuleType) -> str | None:
    """The library that a module belongs to; None: it is the user's own."""
    return _library_of_module(module.__name__)


@lru_cache
def version_of(library: str) -> str:
    """A library's version, without the part that names its build; "?" where it has none."""
    if library == PYTHON:
        return ".".join(map(str, sys.version_info[:2]))
    version = getattr(sys.modules.get(library), "__version__", None)
    try:
        return str(version or metadata.version(library)).partition("+")[0]
    except (metadata.PackageNotFoundError, ValueError):
        return "?"


@lru_cache(maxsize=4096)
def _library_of_module(name: str) -> str | None:
    top = name.partition(".")[0]
    if top in _KNOWN:
        return top if top != "builtins" else PYTHON
    if top == "__main__":
        return None
    if name in sys.builtin_module_names or top in sys.stdlib_module_names:
        return PYTHON
    file = getattr(sys.modules.get(name), "__file__", None)
    return None if file is None else _library_of_file(file, top)


@lru_cache(maxsize=4096)
def _library_of_file(file: str, top: str) -> str | None:
    if top in _KNOWN:
        return top
    for folder in ("site-packages", "dist-packages"):
        _, found, rest = file.rpartition(f"/{folder}/")
        if found:
            return rest.partition("/")[0].removesuffix(".py")
    if any(file.startswith(folder) for folder in _installed()):
        return top
    return PYTHON if file.startswith(sysconfig.get_paths()["stdlib"]) else None


@lru_cache(maxsize=1)
def _installed() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple({paths["purelib"], paths["platlib"], *site.getsitepackages()})


def _top(thing: Any) -> str:
    space = getattr(thing, "__globals__", None) or {}
    return str(space.get("__name__", "")).partition(".")[0]
