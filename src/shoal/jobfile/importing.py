"""Import the user's own code: a module by its name, or a file by its path. This runs the code, as any import does."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from shoal.jobfile._tree import did_you_mean


class NoSuchCode(ValueError):
    """A file, module or name does not exist. The message says which, and what to do."""


def import_code(where: str, folder: Path) -> ModuleType:
    """Import an installed module, a module in `folder`, or a file relative to it. Raises what the code raises."""
    _add_to_path(folder)
    if where.endswith(".py"):
        return _import_file(where, folder / where)
    if not all(part.isidentifier() for part in where.split(".")):
        raise NoSuchCode(f"{where!r} is not the name of a module; an import path is 'module:name' or 'file.py:name'")
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is not None and (where == error.name or where.startswith(error.name + ".")):
            raise NoSuchCode(f"no module {where!r} in {str(folder)!r} or installed; check the name") from None
        raise


def get_attribute(value: object, name: str, where: str) -> object:
    """Return the attribute of a module, or raise a NoSuchCode with similar names."""
    if not hasattr(value, name):
        hint = did_you_mean(name, [other for other in dir(value) if not other.startswith("_")])
        raise NoSuchCode(f"{where!r} has no {name!r}{hint}")
    return getattr(value, name)


def _add_to_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))  # as Python does for a script


def _import_file(where: str, path: Path) -> ModuleType:
    """Import a file as a module, under a name that is unique."""
    if not os.path.isfile(path):
        why = "is a folder" if os.path.isdir(path) else f"is not there; its path is taken from {str(path.parent)!r}"
        raise NoSuchCode(f"the file {where!r} {why}")
    path = path.resolve()
    _add_to_path(path.parent)
    name = path.stem
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded
    if loaded is not None or name in sys.stdlib_module_names or not name.isidentifier():
        name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
        if name in sys.modules:
            return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # pickling a class needs its module to be importable by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module
