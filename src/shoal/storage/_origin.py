"""Whose code something is: the user's own, which is compared line by line, or a library's, which has a version."""

from __future__ import annotations

import sys
import types
from functools import lru_cache
from importlib import metadata
from typing import Any

from shoal.engine.python_state.user_code import is_library_class, is_library_function, is_library_module

PYTHON = "python"


def library_of(thing: Any) -> str | None:
    """The library that a function or a class comes from; None: it is the user's own code.

    A wrapper that a library puts around a function of the user's is the library's.
    """
    if isinstance(thing, types.FunctionType):
        return _top(str(thing.__globals__.get("__name__", ""))) if is_library_function(thing) else None
    if isinstance(thing, type):
        return _top(str(thing.__module__)) if is_library_class(thing) else None
    return PYTHON


def library_of_module(module: types.ModuleType) -> str | None:
    """The library that a module belongs to; None: it is the user's own."""
    return _top(module.__name__) if is_library_module(module.__name__) else None


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


def _top(module: str) -> str:
    top = module.partition(".")[0]
    return PYTHON if top in sys.stdlib_module_names or top in sys.builtin_module_names else top
