"""Progress of a run: a bar in a terminal or notebook, plain lines elsewhere, nothing when it is off."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from shoal.pack.members import Member

LINE_EVERY = 5.0
"""Seconds between plain lines, so that a log stays short."""


class Progress:
    """Follows members through a run. This one says nothing."""

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def __call__(self, member: Member) -> None:
        """A member has ended an epoch, or left."""


class _Count(Progress):
    """Adds up what has been done."""

    def __init__(self, members: list[Member]) -> None:
        self.total = sum(_share(member.job.epochs, member.job.steps, member.num_batches) for member in members)
        self.num_members = len(members)
        self.done: dict[int, float] = {}
        self.ended: dict[int, str] = {}
        self.losses: dict[int, float] = {}

    def __call__(self, member: Member) -> None:
        job = member.job
        if member.status != "running":
            self.ended[member.index] = member.status
        if member.status not in ("running", "cancelled"):
            self.done[member.index] = _share(job.epochs, job.steps, member.num_batches)
        else:
            self.done[member.index] = float(
                member.epoch if job.epochs is not None else member.step * job.accumulate / member.num_batches
            )
        if member.history:
            self.losses[member.index] = member.history[-1]["loss"]
        self.show()

    def show(self) -> None:
        raise NotImplementedError

    def text(self) -> str:
        losses = sorted(self.losses.values())
        middle = f", loss {losses[0]:.4g} to {losses[-1]:.4g}" if losses else ""
        bad = [f"{n} {s}" for s in ("diverged", "failed", "cancelled") if (n := list(self.ended.values()).count(s))]
        return f"{len(self.ended)}/{self.num_members} ended{middle}{''.join(', ' + b for b in bad)}"


class Lines(_Count):
    """Plain lines on stderr, some seconds apart."""

    def __init__(self, members: list[Member]) -> None:
        super().__init__(members)
        self.last = time.monotonic()

    def show(self) -> None:
        now = time.monotonic()
        if now - self.last >= LINE_EVERY or len(self.ended) == self.num_members:
            self.last = now
            share = sum(self.done.values()) / self.total if self.total else 1.0
            print(f"shoal: {share:4.0%}, {self.text()}", file=sys.stderr, flush=True)


class Bar(_Count):
    """A rich progress bar."""

    def __init__(self, members: list[Member]) -> None:
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        super().__init__(members)
        columns = (
            TextColumn("training"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
        )
        self.bar: Any = RichProgress(*columns)
        self.task = self.bar.add_task("", total=self.total or 1)

    def __enter__(self) -> Progress:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def show(self) -> None:
        self.bar.update(self.task, completed=sum(self.done.values()), description=self.text())


def _share(epochs: int | None, steps: int | None, num_batches: int) -> float:
    """A job's length in epochs."""
    return float(epochs if epochs is not None else (steps or 0) / max(1, num_batches))


def progress_for(members: list[Member], wanted: bool) -> Progress:
    """The progress that suits where we are."""
    if not wanted:
        return Progress()
    notebook = "ipykernel" in sys.modules
    if notebook or sys.stderr.isatty() or sys.stdout.isatty():
        try:
            return Bar(members)
        except ImportError:
            pass
    return Lines(members)
