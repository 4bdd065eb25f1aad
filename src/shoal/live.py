"""`shoal.start`: a run in the background, which takes commands while it trains."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Sequence
from typing import Any

from shoal.engine.runtime.clones import clone_of, new_member, warm
from shoal.engine.runtime.commands import Controls, EndedError
from shoal.engine.runtime.run import Run
from shoal.errors import JobError, ShoalError
from shoal.jobs.job import Job
from shoal.results import Results, named
from shoal.settings import make_settings
from shoal.training import carry_out

State = tuple[str, int, int]

LONGEST = 60.0
"""Seconds that the program's end waits for a run to be saved."""


def start(
    jobs: Sequence[Job],
    device: Any = "auto",
    *,
    out: Any = None,
    progress: bool = False,
    memory: Any = None,
    threads: int | None = None,
    compile: Any = "auto",
    checkpoint_every: Any = "60s",
    deterministic: bool = False,
    policy: Any = "fifo",
    callbacks: Any = None,
    events: Any = None,
) -> LiveRun:
    """Begin to train these jobs in a thread of this process, and come back at once.

    Settings are those of `shoal.train`. Commands to the run are carried out between two of its steps.

    Examples:
        >>> run = shoal.start(jobs)
        >>> run.stop("lr=1")
        >>> results = run.wait()
    """
    settings = make_settings(device, memory, threads, compile, checkpoint_every, deterministic, policy)
    return LiveRun(jobs, settings, {"out": out, "progress": progress, "callbacks": callbacks, "events": events})


class LiveRun:
    """A run under way. Jobs are called by their names."""

    def __init__(self, jobs: Sequence[Job], settings: Any, more: dict[str, Any]) -> None:
        self._controls = Controls()
        self._results: Results | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._go, args=(jobs, settings, more), name="shoal", daemon=True)
        self._thread.start()
        atexit.register(self._leave)  # a thread that is in the middle of a step when Python goes would take it down

    def _leave(self) -> None:
        """The program ends: so does the run, saved where it has a folder."""
        self._controls.give(lambda run: run.interrupt())
        self._thread.join(LONGEST)

    def _go(self, jobs: Sequence[Job], settings: Any, more: dict[str, Any]) -> None:
        try:
            self._results = carry_out(jobs, settings, controls=self._controls, **more)
        except BaseException as error:
            self._error = error
        finally:
            self._controls.close()
            atexit.unregister(self._leave)

    @property
    def running(self) -> bool:
        """Whether it is still at work."""
        return self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> Results:
        """The results, once all jobs have ended; jobs that were added come last, in the order they came.

        TimeoutError where it takes longer; the run continues then. Raises what the run raised. Ctrl-C ends the run,
        saved where it has a folder.
        """
        try:
            self._thread.join(timeout)
        except KeyboardInterrupt:
            self._controls.give(lambda run: run.interrupt())
            self._thread.join()
            raise
        if self._thread.is_alive():
            raise TimeoutError(f"the run is not at its end after {timeout:g} seconds; it continues")
        if self._error is not None:
            raise self._error
        assert self._results is not None
        return self._results

    def status(self) -> dict[str, State]:
        """Every job's status ("waiting", "running", or how it ended), epochs and steps."""

        def look(run: Run) -> dict[str, State]:
            states = {}
            for member in run.all_members:
                under_way = "waiting" if member.index in run.waiting else "running"
                said = under_way if member.status == "running" else member.status
                states[member.name] = (said, member.epoch, member.step)
            return states

        try:
            return self._ask(look)  # type: ignore[no-any-return]
        except EndedError:
            return {r.name: (r.status, _epochs(r.history), r.steps) for r in self.wait()}

    def stop(self, name: str) -> bool:
        """End a job here: it keeps what it has become, as "stopped". False where it had ended before."""
        return self._end(name, "stopped")

    def cancel(self, name: str) -> bool:
        """Take a job out, as "cancelled". False where it had ended before."""
        return self._end(name, "cancelled")

    def _end(self, name: str, status: str) -> bool:
        try:
            return bool(self._ask(lambda run: run.end({named(run.all_members, name).index}, status)))
        except EndedError:
            named(self.wait(), name)
            return False

    def add(self, job: Job, *, warm_start: str | None = None) -> None:
        """One more job; with `warm_start`, from the weights that another job of this run has now."""
        if not isinstance(job, Job):
            raise JobError(f"add: {type(job).__name__} is no job; pass a shoal.Job")

        def add(run: Run) -> None:
            source = None if warm_start is None else named(run.all_members, warm_start)
            member = new_member(run, job)
            if source is not None:
                warm(member, run.written(source))
            run.add(member)

        self._ask(add)

    def clone(self, name: str, new_name: str, **changes: Any) -> None:
        """A copy of a job as it is now, optimizer and random state and all, that continues with some settings changed.

        Changes are fields of shoal.Job: hparams (put over those it has), epochs, steps, clip_norm, clip_value, loss,
        step, val, metrics, val_every, stop, keep, owner, priority. Its length counts from the first job's beginning.
        Under a schedule a new lr scales all rates from here on.
        """
        self._ask(lambda run: run.add(clone_of(run, named(run.all_members, name), new_name, changes)))

    def _ask(self, command: Any) -> Any:
        if threading.current_thread() is self._thread:
            raise ShoalError("calling this from a callback or a listener would deadlock; call it from another thread")
        return self._controls.give(command).result()


def _epochs(history: list[dict[str, float]]) -> int:
    return int(history[-1]["epoch"]) if history else 0
