"""Distinguish the user's own code, whose globals and classes may hold state of a step, from installed libraries."""

from __future__ import annotations

import os
import site
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator
from functools import lru_cache
from importlib import metadata
from typing import Any

PYTHON = "python"
"""The name of the standard library in `library_of`."""
_LIBRARIES = frozenset({"torch", "numpy", "shoal", "builtins"})
"""Modules that are libraries wherever their files are, such as a source checkout of torch."""
_FOLDERS = frozenset({"site-packages", "dist-packages"})


def is_library_module(name: str, file: str | None = None) -> bool:
    """Return whether a module is built in or installed. Scripts, notebooks and source checkouts are the user's code."""
    return _is_library(name, file if file is not None else getattr(sys.modules.get(name), "__file__", None))


def is_library_function(function: types.FunctionType) -> bool:
    """Return whether a function is a library's, as is a wrapper that a library puts around a function of the user."""
    space = function.__globals__
    return is_library_module(str(space.get("__name__", "__main__")), space.get("__file__"))


def is_library_class(kind: type) -> bool:
    """Return whether a class is a library's."""
    return is_library_module(str(kind.__module__))


def is_standard_class(kind: type) -> bool:
    """Return whether a class is built in or part of the standard library."""
    top = str(kind.__module__).partition(".")[0]
    return top in sys.stdlib_module_names or top in sys.builtin_module_names


def in_library_tables(values: Iterable[Any]) -> set[int]:
    """Return the ids of those objects that a global or class attribute of a library also refers to.

    This is slow, since it searches all loaded modules.
    """
    wanted = set(map(id, values))
    if not wanted:
        return wanted
    shared: set[int] = set()
    for space in _library_spaces():
        for held in list(space.values()):
            if id(held) in wanted:
                shared.add(id(held))
            if issubclass(type(held), type):
                shared |= wanted.intersection(map(id, list(type.__dict__["__dict__"].__get__(held).values())))
    return shared


def _library_spaces() -> Iterator[dict[str, Any]]:
    """Yield the globals of libraries' modules, read without `getattr`, which can cause imports or warnings."""
    for name, module in list(sys.modules.items()):
        space = object.__getattribute__(module, "__dict__") if isinstance(module, types.ModuleType) else None
        if space is not None and is_library_module(name, space.get("__file__")):
            yield space


@lru_cache(maxsize=4096)
def _is_library(name: str, file: str | None) -> bool:
    top = name.partition(".")[0]
    if top == "__main__":
        return False
    if top in _LIBRARIES or top in sys.builtin_module_names:
        return True
    if file is None:
        return top in sys.stdlib_module_names
    path = os.path.realpath(file)
    if not _FOLDERS.isdisjoint(path.split(os.sep)):
        return True
    return any(path.startswith(folder) for folder in _installed())


@lru_cache(maxsize=1)
def _installed() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    folders = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [*site.getsitepackages(), site.getusersitepackages()]
    return tuple({os.path.realpath(folder) + os.sep for folder in folders})


def library_of(thing: Any) -> str | None:
    """Return the name of the library that a function, a class or a module comes from; None for the user's own code.

    A wrapper that a library puts around a function of the user counts as the library's.
    """
    if isinstance(thing, types.FunctionType):
        module, known = str(thing.__globals__.get("__name__", "")), is_library_function(thing)
    elif isinstance(thing, type):
        module, known = str(thing.__module__), is_library_class(thing)
    else:
        module, known = thing.__name__, is_library_module(thing.__name__)
    top = module.partition(".")[0]
    standard = top in sys.stdlib_module_names or top in sys.builtin_module_names
    return None if not known else PYTHON if standard else top


@lru_cache
def version_of(library: str) -> str:
    """Return a library's version without its build tag (`+cpu`), or "?" if it has none."""
    if library == PYTHON:
        return ".".join(map(str, sys.version_info[:2]))
    version = getattr(sys.modules.get(library), "__version__", None)
    try:
        return str(version or metadata.version(library)).partition("+")[0]
    except (metadata.PackageNotFoundError, ValueError):
        return "?"
