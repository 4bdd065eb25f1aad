"""Load the jobs that the command line names: a job file, MODULE:FUNCTION or FILE.py:FUNCTION."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
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
    """The jobs of a target, with the settings of its job file."""

    jobs: "list[Job]"
    settings: dict[str, Any] = field(default_factory=dict)
    """Arguments for `shoal.train` that a job file sets; `tensorboard` is a folder."""
    file: "JobFile | None" = None

    @contextmanager
    def placed(self) -> Iterator[None]:
        """Report mistakes in the jobs with their line in the file, around `shoal.train` and `shoal.explain`."""
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
    """Return the jobs of a job file with its settings, or those of a function."""
    if target.lower().endswith(FILE_ENDS):
        from shoal.jobfile import load

        file = load(target)
        return Target(jobs=file.jobs, settings=file.settings, file=file)
    return Target(jobs=check_jobs(call_target(target), target))


def call_target(target: str) -> Any:
    """Return what the function MODULE:FUNCTION or FILE.py:FUNCTION returns, or the value of that name."""
    where, colon, name = target.rpartition(":")
    if where.lower().endswith(FILE_ENDS):
        raise ValueError(f"{target!r} names a function in a job file, which has none; give {where!r} alone")
    if not colon or not where or not name:
        raise ValueError(_no_function(target))
    from shoal.errors import ShoalError, describe_with_place
    from shoal.jobfile.importing import NoSuchCode, get_attribute, import_code

    try:
        value = get_attribute(import_code(where, Path.cwd()), name, where)
        result = value() if callable(value) else value
        return list(result) if isinstance(result, Iterator) else result
    except (NoSuchCode, ShoalError):
        raise
    except Exception as error:
        raise ValueError(f"{target} raised {describe_with_place(error)}") from error


def _no_function(target: str) -> str:
    """Return the error for a target that names no function."""
    path = Path(target)
    if path.is_dir():
        return f"{target!r} is a folder; name a job file in it (.toml, .yaml)"
    if path.is_file() and path.suffix != ".py":
        return f"{target!r} is not a job file; the name of one ends in .toml, .yaml or .yml"
    return f"{target!r} names no function; give a job file (.toml, .yaml), MODULE:FUNCTION or FILE.py:FUNCTION"


def check_jobs(made: object, target: str) -> "list[Job]":
    """Return the jobs as a list, or raise an error that says what came instead."""
    from shoal import Job

    if not isinstance(made, (Job, Iterable)):
        raise ValueError(f"{target} gave {type(made).__name__}; it must be a function that returns a list of shoal.Job")
    jobs: list[Job] = []
    for i, job in enumerate(made if isinstance(made, Iterable) else [made]):
        if not isinstance(job, Job):
            raise ValueError(f"{target} gave {type(job).__name__} at position {i}; it must return a list of shoal.Job")
        jobs.append(job)
    if not jobs:
        raise ValueError(f"{target} gave no jobs; it must return a list of shoal.Job with at least one")
    return jobs
