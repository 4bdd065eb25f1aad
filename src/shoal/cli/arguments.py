"""Arguments and options that several commands share, and the jobs of a target.

A target is a job file, MODULE:FUNCTION or FILE.py:FUNCTION.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from shoal import Job
    from shoal.jobfile import JobFile

TARGET_HELP = (
    "A job file (.toml, .yaml), or MODULE:FUNCTION or FILE.py:FUNCTION: "
    "a function that takes nothing and returns a list of shoal.Job."
)
FILE_ENDS = (".toml", ".yaml", ".yml")


def checked(check: Callable[[str], object]) -> Callable[[str | None], str | None]:
    """Return a callback of an option: a value that `check` refuses is a wrong use of the command line."""

    def callback(value: str | None) -> str | None:
        try:
            if value is not None:
                check(value)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        return value

    return callback


def check_device(value: str) -> None:
    from shoal.settings import pick_device

    pick_device(value)


def check_memory(value: str) -> None:
    from shoal.settings import parse_bytes

    parse_bytes(value)


def _check_seconds(value: str) -> None:
    from shoal.settings import parse_seconds

    parse_seconds(value)


def check_policy(value: str) -> None:
    from shoal.engine.planning.policy import policy_for

    policy_for(value)


def check_mode(value: str) -> None:
    if value not in ("min", "max"):
        raise ValueError(f"mode is {value!r}; it says which way is better: use 'min' or 'max'")


# --- commands that train or plan --------------------------------------------------------------------------------------

Device = Annotated[str | None, typer.Option(callback=checked(check_device), help="auto, cpu, cuda, cuda:1 ...")]
Memory = Annotated[
    str | None,
    typer.Option(callback=checked(check_memory), help="Memory limit, such as 20GB; by default 90 % of free memory."),
]
CheckpointEvery = Annotated[
    str | None, typer.Option(callback=checked(_check_seconds), help="How often to save, such as 60s or 5m.")
]
Deterministic = Annotated[
    bool | None,
    typer.Option("--deterministic/--no-deterministic", help="Use only kernels that give the same bits every time."),
]
Progress = Annotated[
    bool | None, typer.Option("--progress/--no-progress", help="Show progress on stderr; by default yes.")
]

# --- commands that measure: shoal bench and shoal reproduce -----------------------------------------------------------

MeasuredDevice = Annotated[
    str, typer.Option(callback=checked(check_device), help="cpu, cuda, cuda:1 ...; auto: a GPU if there is one.")
]
Limit = Annotated[float, typer.Option(min=1.0, help="Stop after this many seconds.")]
NumbersFile = Annotated[Path | None, typer.Option(help="Write all numbers into this file, as JSON.")]
NumbersAsJson = Annotated[bool, typer.Option("--json", help="Print all numbers as JSON instead of the table.")]

# --- the jobs of a target ---------------------------------------------------------------------------------------------


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
    from shoal.errors import ShoalError
    from shoal.jobfile.importing import get_attribute, import_code

    with errors_of_code(target, unchanged=ShoalError):
        value = get_attribute(import_code(where, Path.cwd()), name, where)
        result = value() if callable(value) else value
        return list(result) if isinstance(result, Iterator) else result


@contextmanager
def errors_of_code(what: str, *, unchanged: type[Exception] | tuple[()] = ()) -> Iterator[None]:
    """Raise errors of the user's code as a ValueError of one line that begins with `what`.

    Args:
        unchanged: A type of errors that are raised as they are, since they say everything already.
    """
    from shoal.errors import describe_with_place
    from shoal.jobfile.importing import NoSuchCode

    try:
        yield
    except NoSuchCode:
        raise
    except Exception as error:
        if isinstance(error, unchanged):
            raise
        raise ValueError(f"{what} raised {describe_with_place(error)}") from error


def _no_function(target: str) -> str:
    """Return the error for a target that names no function."""
    path = Path(target)
    if path.is_dir():
        return f"{target!r} is a folder; name a job file in it (.toml, .yaml)"
    if path.is_file() and path.suffix != ".py":
        return f"{target!r} is not a job file; the name of one ends in .toml, .yaml or .yml"
    return f"{target!r} names no function; give a job file (.toml, .yaml), MODULE:FUNCTION or FILE.py:FUNCTION"


def only_job(jobs: "list[Job]", target: str, what: str) -> "Job":
    """Return the job of a list of one. `what` is made of it: a split, a placement."""
    if len(jobs) != 1:
        raise ValueError(f"{target} has {len(jobs)} jobs; a {what} takes one: leave the others out")
    return jobs[0]


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
