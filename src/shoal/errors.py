"""The exceptions of this package.

`except shoal.ShoalError` catches mistakes in jobs, searches, splits and placements, and failures of runs. Most of these
are a ValueError too. A wrong argument of a function, such as an unknown `device`, is an ordinary ValueError or
TypeError.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import warnings
from pathlib import Path
from types import FrameType

OF_ONE_JOB = re.compile(r"(?:job '.*?'|member \d+): (.*)", re.DOTALL)
"""A line about one job of a list, or one member of a pack. The group of the expression is the mistake."""


class ShoalError(Exception):
    """The base of the exceptions about jobs and their runs; a wrong argument of a function is an ordinary ValueError or
    TypeError."""


class JobError(ShoalError, ValueError):
    """Mistakes in one or more jobs, found before anything ran, with one line for each in `lines`.

    If several jobs have the same mistake, the message has it once, with the number of the other jobs.
    """

    def __init__(self, *lines: str) -> None:
        self.lines = lines
        super().__init__("\n".join(_without_repeats(lines)))


def _without_repeats(lines: tuple[str, ...]) -> list[str]:
    """Return the lines, but only one for all jobs that have the same mistake."""
    alike: dict[str, list[str]] = {}
    for line in lines:
        of_one = OF_ONE_JOB.match(line)
        alike.setdefault(of_one[1] if of_one else line, []).append(line)
    return [first + (f" (and so for {len(more)} more)" if more else "") for first, *more in alike.values()]


class NoSuchJob(JobError, KeyError):
    """The run has no job of this name."""

    __str__ = JobError.__str__


class SplitError(ShoalError, ValueError):
    """A network, a job or an executor cannot be split as asked. The message gives the value, the rule and the fix."""


class GraphError(ShoalError, ValueError):
    """A network's forward pass cannot be recorded. The message says why."""


class PlaceError(ShoalError, ValueError):
    """A network cannot be placed as asked. The message gives the value, the rule and the fix."""


class TuneError(ShoalError, ValueError):
    """A search cannot be run as asked. The message gives the value, the rule and the fix."""


class OutError(ShoalError, ValueError):
    """The run folder cannot be used for these jobs."""


class DamagedError(OutError):
    """A file of a run folder does not hold what was written to it: it was cut short, changed, or replaced."""


class NotStorable(ShoalError):
    """A member's state contains something that cannot be written to a file and read back."""


class ReadError(ShoalError):
    """A DataLoader failed to give the next batch, which ends the jobs that read it."""


class MemberError(ShoalError):
    """One member's step raised. The tier reports the slot, and the run ends only that member."""

    def __init__(self, slot: int, cause: BaseException) -> None:
        self.slot = slot
        self.cause = cause
        super().__init__(f"slot {slot}: {describe(cause)}")


class ShoalWarning(UserWarning):
    """Something that may be intended or a mistake, such as NaN in the data."""


def warn(text: str) -> None:
    """Issue a ShoalWarning of one line, which names the line of the user's own code that led to it."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and is_library_file(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, ShoalWarning, stacklevel=level if frame is not None else 2)


ROW_NOTE = "reading row "
"""The beginning of the note that says which row of a Dataset could not be read."""


METRIC_NOTE = "metric "
"""The beginning of the note that says in which metric an exception was raised."""


def describe(error: BaseException) -> str:
    """Return an exception in one line: its type, the first line of its message and, if known, the row of the
    Dataset or the metric."""
    try:
        text = str(error).strip().splitlines()
    except Exception:  # its class cannot print it
        text = []
    line = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith((ROW_NOTE, METRIC_NOTE))]
    return f"{line} ({notes[0]})" if notes else line


_LIBRARIES = (
    str(Path(__file__).parent) + os.sep, sysconfig.get_paths()["stdlib"] + os.sep, "<frozen", "<eval_with_key"
)  # fmt: skip
"""How the files begin that are nobody's own code: this package, the standard library, code made by torch.fx."""
_FOLDERS = frozenset({"site-packages", "dist-packages"})


def is_library_file(file: str) -> bool:
    """Return whether the file of a code object belongs to Python or an installed package.

    >>> is_library_file("/usr/lib/python3/dist-packages/torch/nn/functional.py"), is_library_file("train.py")
    (True, False)
    """
    return file.startswith(_LIBRARIES) or not _FOLDERS.isdisjoint(Path(file).parts)


def place_of(error: BaseException) -> str:
    """Return the last location in the user's own code that raised the error, in parentheses: " (net.py:12)"."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({Path(error.filename).name}:{error.lineno})"
    trace, last = error.__traceback__, ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not is_library_file(file):
            last = f" ({Path(file).name}:{trace.tb_lineno})"
        trace = trace.tb_next
    return last


def describe_with_place(error: BaseException) -> str:
    """Return an exception of a job's own code in one line, with the file and line of that code."""
    return describe(error) + place_of(error)
