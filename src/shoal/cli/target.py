"""A list of jobs named on the command line: MODULE:FUNCTION or FILE.py:FUNCTION."""

import importlib
import importlib.util
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal import Job

TARGET_HELP = "MODULE:FUNCTION or FILE.py:FUNCTION; the function takes nothing and returns a list of shoal.Job."


def load_module(where: str) -> ModuleType:
    """Import a module by its dotted name, from here or the installed ones, or a file by its path."""
    if not where.endswith(".py"):
        if where.startswith("."):
            raise ValueError(f"{where!r} is no module's name; give MODULE:FUNCTION or FILE.py:FUNCTION")
        if "" not in sys.path and str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        try:
            return importlib.import_module(where)
        except ModuleNotFoundError as error:
            if error.name is not None and (where == error.name or where.startswith(error.name + ".")):
                raise ValueError(
                    f"no module {where!r} here or installed; give MODULE:FUNCTION or FILE.py:FUNCTION"
                ) from error
            raise
    path = Path(where)
    if not path.is_file():
        raise ValueError(f"no file {where!r}; give MODULE:FUNCTION or FILE.py:FUNCTION")
    sys.path.insert(0, str(path.resolve().parent))  # as python itself does for a script
    name = path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # classes in the file must be importable by name where they are pickled
    spec.loader.exec_module(module)
    return module


def load_jobs(target: str) -> "list[Job]":
    """The jobs that the named function returns (or the list itself, if the name is one)."""
    where, colon, name = target.rpartition(":")
    if not colon or not where or not name:
        raise ValueError(f"{target!r} names no function; give MODULE:FUNCTION or FILE.py:FUNCTION")
    module = load_module(where)
    if not hasattr(module, name):
        near = get_close_matches(name, [n for n in vars(module) if not n.startswith("_")], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{where} has no {name!r}{hint}")
    found = getattr(module, name)
    made = found() if callable(found) else found
    return check_jobs(made, target)


def check_jobs(made: object, target: str) -> "list[Job]":
    """The jobs as a list, or an error that says what came instead."""
    from shoal import Job

    jobs: list[Job] = []
    for i, job in enumerate(made if isinstance(made, Iterable) else [made]):
        if not isinstance(job, Job):
            raise ValueError(f"{target} gave {type(job).__name__} at position {i}; it must return a list of shoal.Job")
        jobs.append(job)
    if not jobs:
        raise ValueError(f"{target} gave no jobs; it must return a list of shoal.Job with at least one")
    return jobs
