"""What can go wrong, in one family: `except shoal.ShoalError` catches everything this package raises on purpose."""

from __future__ import annotations

import re

OF_ONE_JOB = re.compile(r"(?:job '.*?'|member \d+): (.*)", re.DOTALL)
"""A line about one job of a list, or one member of a pack: the group is the mistake."""


class ShoalError(Exception):
    """The base of every exception that Shoal raises on purpose."""


class JobError(ShoalError, ValueError):
    """A mistake in one or more jobs, found before anything ran: one line for each, in `lines`.

    In the message, a mistake that several jobs share is written once, with how many more have it.
    """

    def __init__(self, *lines: str) -> None:
        self.lines = lines
        super().__init__("\n".join(_without_repeats(lines)))


def _without_repeats(lines: tuple[str, ...]) -> list[str]:
    """The lines, with one for all jobs that have the same mistake."""
    alike: dict[str, list[str]] = {}
    for line in lines:
        of_one = OF_ONE_JOB.match(line)
        alike.setdefault(of_one[1] if of_one else line, []).append(line)
    return [first + (f" (and so for {len(more)} more)" if more else "") for first, *more in alike.values()]


class NoSuchJob(JobError, KeyError):
    """A name that no job of the run has."""

    __str__ = JobError.__str__


class SplitError(ShoalError, ValueError):
    """A network, a job or an executor that cannot be split as asked: the value, the rule and the fix, in one line."""


class GraphError(ShoalError, ValueError):
    """A network whose forward pass cannot be recorded: why, in one line."""


class PlaceError(ShoalError, ValueError):
    """A network that cannot be placed as asked: the value, the rule and the fix, in one line."""


class TuneError(ShoalError, ValueError):
    """A search that cannot be run as asked: the value, the rule and the fix, in one line."""


class OutError(ShoalError, ValueError):
    """The run folder cannot take these jobs."""


class DamagedError(OutError):
    """A file of a run folder does not hold what was written to it: cut short, changed, or another program's."""


class NotStorable(ShoalError):
    """A member's state holds something that cannot be written to a file and read back."""


class ReadError(ShoalError):
    """A DataLoader did not give the next batch: it ends the jobs that read it."""


class MemberError(ShoalError):
    """One member's step raised: the tier says which slot, the run ends that member alone."""

    def __init__(self, slot: int, cause: BaseException) -> None:
        self.slot = slot
        self.cause = cause
        super().__init__(f"slot {slot}: {describe(cause)}")


class ShoalWarning(UserWarning):
    """Something that may be meant and may be a mistake, such as NaN in the data."""


ROW_NOTE = "reading row "
"""How the note begins that says which row of a Dataset could not be read."""


def describe(error: BaseException) -> str:
    """An exception in one line: its type and the first line of what it says; of a Dataset also which row it was."""
    text = str(error).strip().splitlines()
    line = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
    rows = [note for note in getattr(error, "__notes__", ()) if note.startswith(ROW_NOTE)]
    return f"{line} ({rows[0]})" if rows else line
