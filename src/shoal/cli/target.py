"""Jobs named on the command line: a job file, MODULE:FUNCTION or FILE.py:FUNCTION."""

import importlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal import Job
    from shoal.jobfile import JobFile

TARGET_HELP = (
    "A job file (.toml, .yaml), or MODULE:FUNCTION or FILE.py:FUNCTION: "
    "a function that takes nothing and returns a list of shoal.Job."
)
FILE_ENDS = (".toml", ".yaml", ".yml")


@dataclass(kw_only=True, slots=True, eq=False)
class Target:
    """What a target holds."""

    jobs: "list[Job]"
    settings: dict[str, Any] = field(default_factory=dict)
    """Arguments for `shoal.train` that a job file gives; `tensorboard` is a folder."""
    file: "JobFile | None" = None

    @contextmanager
    def placed(self) -> Iterator[None]:
        """Around `shoal.train` and `shoal.explain`: mistakes in the jobs are reported with their line in the file."""
        from shoal import JobError

        try:
            yield
        except JobError as error:
            if self.file is None:
                raise
            raise self.file.placed(error) from error
        except SystemExit as left:
            raise ValueError(f"code of a job left the program (SystemExit: {left.code}); remove that call") from left


def load_target(target: str) -> Target:
    """The jobs of a job file with its settings, or those of a function."""
    if target.lower().endswith(FILE_ENDS):
        from shoal.jobfile import load

        file = load(target)
        return Target(jobs=file.jobs, settings=file.settings, file=file)
    return Target(jobs=_called(target))


def _called(target: str) -> "list[Job]":
    where, colon, name = target.rpartition(":")
    if where.lower().endswith(FILE_ENDS):
        raise ValueError(f"{target!r} names a function in a job file, which has none; give {where!r} alone")
    if not colon or not where or not name:
        raise ValueError(_no_function(target))
    module = load_module(where)
    if not hasattr(module, name):
        near = get_close_matches(name, [n for n in vars(module) if not n.startswith("_")], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{where} has no {name!r}{hint}")
    value = getattr(module, name)
    made = value() if callable(value) else value
    return check_jobs(made, target)


def _no_function(target: str) -> str:
    path = Path(target)
    if path.is_dir():
        return f"{target!r} is a folder; name a job file in it (.toml, .yaml)"
    if path.is_file() and path.suffix != ".py":
        return f"{target!r} is no job file; the name of one ends in .toml, .yaml or .yml"
    return f"{target!r} names no function; give a job file (.toml, .yaml), MODULE:FUNCTION or FILE.py:FUNCTION"


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
