"""Loggers: callbacks that write each member's values somewhere, as if the member had run alone.

A logger is a subclass of `Logger` with three methods. It is called in the process that called `shoal.train`, wherever
members train. A logger that raises is dropped with a warning, and training continues.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from shoal.errors import OutError, describe
from shoal.reporting.callbacks import MemberView
from shoal.utils.numpy_values import plain_int

_LONGEST = 100
"""The largest number of characters in a folder's name."""


class Logger:
    """The base class of loggers, which finds the rows and steps that have not been logged yet.

    Examples:
        >>> class Print(Logger):
        ...     def log(self, view, values, step):
        ...         print(view.name, step, values)
    """

    only_watches = True

    def __init__(self, *, every_step: int | None = None) -> None:
        """Configure what is logged.

        Args:
            every_step: Also log every this many optimizer steps, as `step_loss` and the step's logs; they are logged at
                the end of their epoch. None logs only epochs.
        """
        every_step = plain_int(every_step)
        if every_step is not None and (not isinstance(every_step, int) or every_step < 1):
            raise ValueError(f"every_step is {every_step!r}; use a whole number, 1 or more, or None for epochs alone")
        self.every_step = every_step
        self._epochs: dict[str, int] = {}
        """The last logged epoch by member name; members that have ended are not in it."""

    def begin(self, view: MemberView) -> int | None:
        """Prepare for a member's first row, and return the last epoch that an earlier run has logged.

        Missing epochs after that one are then logged. None means that the epoch which has just ended is the next one.
        """

    def log(self, view: MemberView, values: dict[str, float], step: int) -> None:
        """Log values of a member after `step` optimizer steps."""

    def end(self, view: MemberView) -> None:
        """Finish a member after its last row; `view.status` says how it ended."""

    def __call__(self, view: MemberView) -> None:
        """Log the steps and the row of an epoch, or the end of a member."""
        row = view.metrics
        if view.name not in self._epochs:
            logged = self.begin(view)
            self._epochs[view.name] = max(0, int(row.get("epoch", 0)) - 1) if logged is None else logged
        last = self._epochs[view.name]
        if row and row["epoch"] > last + 1:  # a killed run may not have logged these
            for missed in view.history:
                if last < missed["epoch"] < row["epoch"]:
                    self._log_epoch(view, missed, steps=False)
        if row and row["epoch"] > last:
            self._epochs[view.name] = int(row["epoch"])
            self._log_epoch(view, row, steps=view.status == "running")
        if view.status != "running":
            for step, values in sorted(_validations_within(view, self._epochs[view.name] + 1).items()):
                self.log(view, values, step)
            self.end(view)
            del self._epochs[view.name]

    def _log_epoch(self, view: MemberView, row: dict[str, float], *, steps: bool) -> None:
        """Log an epoch's row, after the validations within it.

        Args:
            steps: Whether the view has the losses of the epoch's steps.
        """
        within = _validations_within(view, int(row["epoch"]))
        if self.every_step is not None and steps:
            for step, values in _steps(view, int(row["step"])):
                if step % self.every_step == 0:
                    within[step] = {**values, **within.get(step, {})}
        for step, values in sorted(within.items()):  # some services need increasing steps
            self.log(view, values, step)
        self.log(view, _without(row, "step"), int(row["step"]))


def _validations_within(view: MemberView, epoch: int) -> dict[int, dict[str, float]]:
    """Return the validations within an epoch, by step."""
    return {int(row["step"]): _without(row, "epoch", "step") for row in view.validations if row["epoch"] == epoch}


def _without(row: dict[str, float], *names: str) -> dict[str, float]:
    return {name: value for name, value in row.items() if name not in names}


def _steps(view: MemberView, last: int) -> list[tuple[int, dict[str, float]]]:
    """Return the step and the mean values of each optimizer step in the last epoch."""
    columns = {"step_loss": view.losses, **{f"step_{name}": values for name, values in view.logs.items()}}
    k = view._member.job.accumulate
    count = -(-len(columns["step_loss"]) // k)
    return [
        (last - count + 1 + i, {name: _mean(values[i * k : (i + 1) * k]) for name, values in columns.items()})
        for i in range(count)
    ]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def config(view: MemberView) -> dict[str, Any]:
    """Return a member's settings and hyper-parameters as numbers, strings and booleans."""

    def plain(value: Any) -> Any:
        if isinstance(value, (bool, int, float, str)) or value is None:
            return value
        return value.item() if getattr(value, "ndim", None) == 0 else str(value)

    return {name: plain(value) for name, value in {**view.settings, **view.hparams}.items()}


def make_folder(folder: str | os.PathLike[str], what: str) -> Path:
    """Create the folder of a logger, or raise an OutError."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutError(
            f"{what}: folder is {str(folder)!r} and cannot be made ({describe(error)}); use another"
        ) from None
    return Path(folder)


def folder_name(name: str) -> str:
    """Return a folder name for a member's name; if characters had to be replaced, a hash makes it unique."""
    safe = re.sub(r"[^\w.=,+@ -]", "_", name)[:_LONGEST].rstrip(". ")
    return safe if safe == name else f"{safe or 'job'}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


class CSVLogger(Logger):
    """Writes a folder for each member: `metrics.csv` with a row per epoch, `steps.csv` if `every_step` is set, and
    `config.json` with its settings.

    A resumed run continues the files: rows after the point where it resumes are written again.
    """

    def __init__(self, folder: str | os.PathLike[str], *, every_step: int | None = None) -> None:
        super().__init__(every_step=every_step)
        self.folder = make_folder(folder, "CSVLogger")
        self._heads: dict[Path, list[str]] = {}
        """The columns of each file."""

    def begin(self, view: MemberView) -> int | None:
        folder = self._member_folder(view)
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config(view), indent=1))
        ended = view.history if view.status != "running" else view.history[:-1]  # the last row is logged next
        steps = {int(row["step"]): int(row["epoch"]) for row in ended}
        last_step, epoch = max(steps, default=0), 0
        for path in (folder / "metrics.csv", folder / "steps.csv"):
            rows = [row for row in _read(path) if int(row["step"]) <= last_step]
            path.unlink(missing_ok=True)
            if path.name == "metrics.csv":
                rows = _matching_rows(rows, list(steps))
                epoch = steps[int(rows[-1]["step"])] if rows else 0
            if rows:
                self._write(path, list(rows[0]), rows)
        return epoch

    def log(self, view: MemberView, values: dict[str, float], step: int) -> None:
        path = self._member_folder(view) / ("metrics.csv" if "epoch" in values else "steps.csv")
        row = {"step": str(step), **{name: repr(value) for name, value in values.items()}}
        head = self._heads.get(path, [])
        if not set(row) <= set(head):  # a column is new
            self._write(path, list(dict.fromkeys([*head, *row])), [*_read(path), row])
            return
        with path.open("a", newline="") as file:
            csv.DictWriter(file, head, lineterminator="\n").writerow(row)

    def _write(self, path: Path, head: list[str], rows: list[dict[str, str]]) -> None:
        self._heads[path] = head
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, head, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)

    def _member_folder(self, view: MemberView) -> Path:
        return self.folder / folder_name(view.name)


def _matching_rows(rows: list[dict[str, str]], steps: list[int]) -> list[dict[str, str]]:
    """Return the first rows of a file, up to the first that does not match the steps at which epochs ended."""
    count = next((i for i, (row, step) in enumerate(zip(rows, steps, strict=False)) if int(row["step"]) != step), None)
    return rows[: min(len(rows), len(steps)) if count is None else count]


def _read(path: Path) -> list[dict[str, str]]:
    """Return the rows of a file, without a last row that was cut short."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [row for row in csv.DictReader(file) if (row.get("step") or "").isdigit() and None not in row.values()]
