"""Job files: a list of jobs and how to run them, in TOML or YAML. See docs/jobfiles.md.

    file -> tree with lines -> a table of fields for each job -> jobs

Every mistake is one line, `FILE:LINE: what, rule, fix`; all mistakes that show are reported at once, as one JobError.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import JobError
from shoal.jobfile._tree import Node, Problems, too_large

if TYPE_CHECKING:
    from shoal.jobfile._places import Places
    from shoal.jobs.job import Job

SUFFIXES = (".toml", ".yaml", ".yml")
MOST_BYTES = 4_000_000
MOST_LINES = 20
"""How many mistakes are reported at once."""
QUOTED = re.compile(r"job ('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"): (.*)")
"""Matches a line about a job, as `shoal.preparation.checks` writes it."""


@dataclass(kw_only=True, slots=True, eq=False)
class JobFile:
    """The contents of a job file."""

    path: str
    jobs: list[Job]
    settings: dict[str, Any]
    """Arguments for `shoal.train`, as far as the file sets them; `tensorboard` is a folder."""
    places: dict[str, Places] = field(default_factory=dict)

    def placed(self, error: ValueError) -> JobError:
        """Return an error of `shoal.train` or `shoal.explain` about these jobs, with the line in the file for each
        mistake.

        A mistake that several jobs share is reported once.
        """
        jobs: dict[tuple[int, str], list[str]] = {}
        by_text = {repr(name): name for name in self.places}
        for text in error.lines if isinstance(error, JobError) else str(error).splitlines():
            name, line, message = self._locate(text, by_text)
            jobs.setdefault((line, message), []).extend([name] if name else [])
        lines = []
        for (line, message), names in jobs.items():
            where = f"{self.path}:{line}: " if line else ""
            more = "" if not names else f" (job {names[0]!r}{f' and {len(names) - 1} more' if names[1:] else ''})"
            lines.append(f"{where}{message}{more}")
        return JobError(*_limit_lines(lines))

    def _locate(self, text: str, by_text: dict[str, str]) -> tuple[str, int, str]:
        """Return the job that a line is about, the line in the file (0 if unknown), and the rest of the text."""
        match = QUOTED.match(text)
        if match and match[1] in by_text:
            name = by_text[match[1]]
            return name, self.places[name].line_of(match[2]), match[2]
        return "", 0, text


def load(path: str | os.PathLike[str]) -> JobFile:
    """Read a job file and build its jobs, or raise a JobError with a line for each mistake."""
    file = os.fspath(path)
    problems = Problems(file)
    text = _read_text(Path(file), file)
    root = _parse(file, text, problems)
    for node in too_large(root):
        problems.add(node, "a whole number has more than 64 bits; use a smaller one")
    problems.stop_if_any()
    from shoal.jobfile import _blocks
    from shoal.jobfile._build import Builder
    from shoal.jobfile._values import settings

    folder = Path(file).resolve().parent
    run_settings = settings(root, folder, problems)
    try:
        cases = _blocks.cases(root, problems)
        builder = Builder(folder, problems)
        jobs = [job for case in cases for job in builder.jobs(case)]
        problems.stop_if_any()
    except JobError as error:
        raise JobError(*_limit_lines(list(error.lines))) from None
    return JobFile(path=file, jobs=jobs, settings=run_settings, places=builder.places)


def _limit_lines(lines: list[str]) -> list[str]:
    more = [f"... and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
    return [*lines[:MOST_LINES], *more]


def _read_text(path: Path, file: str) -> str:
    """Return the file as text. An error without a line names line 1, or only the file if it cannot be read."""
    try:
        data = path.read_bytes()
    except IsADirectoryError:
        raise JobError(f"{file} is a folder; name a job file in it, such as {file.rstrip('/')}/sweep.toml") from None
    except (FileNotFoundError, ValueError):
        raise JobError(f"{file}: there is no such file; check the name, it is taken from the current folder") from None
    except OSError as error:
        raise JobError(f"{file}: it cannot be read ({error.strerror}); check the name and its permissions") from None
    if len(data) > MOST_BYTES:
        raise JobError(f"{file}:1: it has {len(data):,} bytes; a job file has at most {MOST_BYTES:,}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise JobError(f"{file}:{line}: this is not text in UTF-8; save the file as UTF-8") from None


def _parse(file: str, text: str, problems: Problems) -> Node:
    if not text.strip():
        raise problems.one(1, "the file is empty; it needs model, data, loss and epochs at least")
    if file.lower().endswith(".toml"):
        from shoal.jobfile import _from_toml

        return _from_toml.read(text, problems)
    if file.lower().endswith(SUFFIXES):
        from shoal.jobfile import _from_yaml

        return _from_yaml.read(text, problems)
    raise JobError(f"{file}: a job file ends in .toml, .yaml or .yml; rename it")
