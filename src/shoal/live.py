"""`shoal.start`, which trains jobs in the background and takes commands while they run."""

from __future__ import annotations

import atexit
import copy
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Self

from shoal.engine.members.member import Member
from shoal.engine.runtime.clones import add_to, clone_of, new_member, warm
from shoal.engine.runtime.commands import Controls, EndedError
from shoal.engine.runtime.run import Run
from shoal.environment import environment
from shoal.errors import JobError, ShoalError, warn
from shoal.jobs.job import Job
from shoal.jobs.names import named
from shoal.reporting.callbacks import own_copy
from shoal.results import Result, Results
from shoal.settings import make_settings
from shoal.training import carry_out, result_of

LONGEST = 60.0
"""How many seconds the end of the program waits for a run to be saved."""


class _Progress(NamedTuple):
    status: str
    """The status: "waiting", "running", or how the job ended."""
    epochs: int
    """The number of completed epochs."""
    steps: int
    """The number of optimizer steps taken."""


class JobStatus(_Progress):
    """The progress of a job: a tuple (status, epochs, steps), with its latest values.

    >>> status = JobStatus("running", 2, 14, {"loss": 0.5})
    >>> status.epochs, status.values["loss"], status == ("running", 2, 14)
    (2, 0.5, True)
    """

    values: Mapping[str, float]
    """The latest value of each column in the history: loss, val_loss, metrics, logs, lr; empty before the first
    epoch."""

    def __new__(cls, status: str, epochs: int, steps: int, values: Mapping[str, float] | None = None) -> Self:
        job_status = super().__new__(cls, status, epochs, steps)
        job_status.values = dict(values or {})
        return job_status

    def __repr__(self) -> str:
        return f"JobStatus({self.status!r}, epochs={self.epochs}, steps={self.steps}, values={self.values})"

    def __reduce__(self) -> Any:
        return JobStatus, (*self, self.values)


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
    keep_open: bool = False,
) -> LiveRun:
    """Start training these jobs in a thread of this process, and return at once.

    Settings are those of `shoal.train`. Commands to the run are carried out between two of its steps.

    Args:
        keep_open: When all jobs have ended, wait for more jobs until `wait` is called; otherwise the run ends.

    Examples:
        >>> run = shoal.start(jobs)
        >>> run.stop("lr=1")
        >>> results = run.wait()
    """
    settings = make_settings(device, memory, threads, compile, checkpoint_every, deterministic, policy)
    options = {"out": out, "progress": progress, "callbacks": callbacks, "events": events}
    return LiveRun(jobs, settings, options, keep_open=keep_open)


class LiveRun:
    """A run in the background. Its methods refer to jobs by name."""

    def __init__(self, jobs: Sequence[Job], settings: Any, more: dict[str, Any], *, keep_open: bool = False) -> None:
        self._controls = Controls(keep_open=keep_open, live=self)
        self._results: Results | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._go, args=(jobs, settings, more), name="shoal", daemon=True)
        self._thread.start()
        atexit.register(self._interrupt_at_exit)  # Python would crash if it exited in the middle of a step

    def _interrupt_at_exit(self) -> None:
        """Interrupt the run when the program ends; a run with a folder is saved there."""
        self._controls.give(lambda run: run.interrupt())
        self._thread.join(LONGEST)

    def _go(self, jobs: Sequence[Job], settings: Any, more: dict[str, Any]) -> None:
        try:
            self._results = carry_out(jobs, settings, controls=self._controls, **more)
        except BaseException as error:
            self._error = error
        finally:
            self._controls.close()
            atexit.unregister(self._interrupt_at_exit)

    @property
    def running(self) -> bool:
        """Whether the run has not ended yet."""
        return self._thread.is_alive()

    # --- how far it is ------------------------------------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> Results:
        """Wait until all jobs have ended, and return the results; jobs that were added come last, in order of their
        addition.

        Raises TimeoutError after `timeout` seconds, while the run continues, and any error that the run raised. Ctrl-C
        ends the run, which is saved if it has a folder. After this call, a run started with `keep_open` ends with its
        jobs.
        """
        self._refuse_in_run_thread("wait()")
        self._controls.finish()
        with self._ended_by_ctrl_c():
            self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the run is not at its end after {timeout:g} seconds; it continues")
        return self._all_results()

    def _all_results(self) -> Results:
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._results is not None
        return self._results

    @contextmanager
    def _ended_by_ctrl_c(self) -> Iterator[None]:
        """Interrupt the run and wait for its end if Ctrl-C is pressed inside this context."""
        try:
            yield
        except KeyboardInterrupt:
            self._controls.give(lambda run: run.interrupt())
            self._thread.join()
            raise

    def as_completed(self, timeout: float | None = None) -> Iterator[Result]:
        """Yield the results as jobs end, beginning with jobs that ended already; jobs added meanwhile are included.

        The iteration ends when all jobs have ended. A result's network and optimizer state are copies. Raises
        TimeoutError if jobs are left `timeout` seconds after this call. Ctrl-C and errors of the run have the same
        effect as in `wait`.
        """
        self._refuse_in_run_thread("as_completed()")
        return self._completed(timeout, None if timeout is None else time.monotonic() + timeout)

    def _completed(self, timeout: float | None, deadline: float | None) -> Iterator[Result]:
        """Yield results as jobs end, until `deadline`."""
        yielded: set[str] = set()

        def seconds_left() -> float | None:
            return None if deadline is None else max(0.0, deadline - time.monotonic())

        while True:
            num_ends = self._controls.num_ends
            try:
                with self._ended_by_ctrl_c():
                    ended, num_left = self._controls.give(partial(_results_without, yielded)).result(seconds_left())
            except EndedError:
                ended, num_left = [result for result in self._all_results() if result.name not in yielded], 0
            except TimeoutError:
                raise _timeout_error(timeout) from None
            for result in ended:
                yielded.add(result.name)
                yield result
            if ended:
                continue  # the caller may have added jobs meanwhile
            if not num_left:
                return
            with self._ended_by_ctrl_c():
                if not self._controls.wait_for_an_end(num_ends, seconds_left()):
                    raise _timeout_error(timeout)

    def status(self) -> dict[str, JobStatus]:
        """Return every job's status ("waiting", "running", or how it ended), epochs and steps, and in `values` its
        latest loss, val_loss, metrics and logs."""
        if self._in_run_thread:
            return {} if self._controls.run is None else _status(self._controls.run)
        try:
            return self._controls.give(_status).result()  # type: ignore[no-any-return]
        except EndedError:
            results = self._all_results()
            return {r.name: JobStatus(r.status, _epochs(r.history), r.steps, latest_values(r)) for r in results}

    # --- commands -----------------------------------------------------------------------------------------------------

    def stop(self, name: str) -> bool | None:
        """End a job now; it keeps its weights, as "stopped".

        Returns False if it had ended before, and None in a callback or a listener, where the job ends after this step.
        """
        return self._end("stop", name, "stopped")

    def cancel(self, name: str) -> bool | None:
        """Remove a job from the run, as "cancelled".

        Returns False if it had ended before, and None in a callback or a listener, where the job ends after this step.
        """
        return self._end("cancel", name, "cancelled")

    def _end(self, what: str, name: str, status: str) -> bool | None:
        try:
            command = lambda run: bool(run.end({named(run.all_members, name).index}, status))  # noqa: E731
            return self._give_command(f"{what}({name!r})", command)  # type: ignore[no-any-return]
        except EndedError:
            named(self._all_results(), name)
            return False

    def add(self, job: Job, *, warm_start: str | None = None) -> None:
        """Add a job to the run; with `warm_start`, it begins with the current weights of that job."""
        if not isinstance(job, Job):
            raise JobError(f"add: {type(job).__name__} is not a job; pass a shoal.Job")

        def add(run: Run) -> None:
            source = None if warm_start is None else named(run.all_members, warm_start)
            member = new_member(run, job)
            if source is not None:
                warm(member, run.written(source))
            add_to(run, member)

        self._give_command(f"add({job.name!r})", add)

    def clone(self, name: str, new_name: str, **changes: Any) -> None:
        """Add a copy of a job in its current state, with optimizer and random state, that continues with some settings
        changed.

        Changes are fields of shoal.Job, all but model. hparams are merged into the existing ones; under a schedule, a
        new lr scales all later rates. A new batch_size applies to the remaining rows of this epoch too; a new schedule
        starts where it would be by now; another optimizer starts with a fresh state; with other data the epoch starts
        again. The length counts from the beginning of the original job.
        """
        command = lambda run: add_to(run, clone_of(run, named(run.all_members, name), new_name, changes))  # noqa: E731
        self._give_command(f"clone({name!r}, {new_name!r})", command)

    def _give_command(self, what: str, command: Callable[[Run], Any]) -> Any:
        """Give the run a command and wait for its result; in the run's own thread, which would deadlock, return at
        once."""
        answer = self._controls.give(command)
        if not self._in_run_thread:
            return answer.result()
        answer.add_done_callback(partial(_warn_of_mistake, what))
        return None

    @property
    def _in_run_thread(self) -> bool:
        """Whether this is the run's own thread, as in callbacks and listeners."""
        return threading.current_thread() is self._thread

    def _refuse_in_run_thread(self, what: str) -> None:
        """Raise an error if this is the run's own thread."""
        if self._in_run_thread:
            raise ShoalError(f"{what} in a callback or a listener would deadlock; call it from another thread")


def _warn_of_mistake(what: str, answer: Future[Any]) -> None:
    error = answer.exception()
    if error is not None:
        warn(f"{what}, called in a callback or a listener, failed: {error}")


def _timeout_error(timeout: float | None) -> TimeoutError:
    """Return the error that says that jobs are left after the timeout."""
    return TimeoutError(f"not all jobs have ended after {timeout:g} seconds; the run continues")


def _status(run: Run) -> dict[str, JobStatus]:
    states = {}
    for member in run.all_members:
        progress = "waiting" if member.index in run.waiting else "running"
        status = progress if member.status == "running" else member.status
        states[member.name] = JobStatus(status, member.epoch, member.step, latest_values(member))
    return states


def latest_values(of: Member | Result) -> dict[str, float]:
    """Return the latest value of each column in a job's history, including validations within epochs."""
    values, history, validations = dict[str, float](), of.history, of.validations
    if validations and (not history or validations[-1]["step"] > history[-1]["step"]):
        values |= validations[-1]
    for row in reversed(history):  # rows of epochs without a validation have fewer numbers
        values = {**row, **values}
        if of.job.val is None or "val_loss" in values:
            break
    return {name: value for name, value in values.items() if name not in ("epoch", "step", "seconds")}


def _results_without(names: set[str], run: Run) -> tuple[list[Result], int]:
    """Return the results of ended jobs whose names are not in `names`, and how many jobs have not ended."""
    ended = [member for member in run.all_members if member.status != "running"]
    new = [member for member in ended if member.name not in names]
    return [_copy_result(member) for member in new], len(run.all_members) - len(ended)


def _copy_result(member: Member) -> Result:
    """Return a member's result made of copies, since later clones of this member begin with its own tensors."""
    result = result_of(member, own_copy(member), environment(member.device))
    result.optimizer_state = copy.deepcopy(member.optimizer_state)
    result.history = [dict(row) for row in member.history]
    result.validations = [dict(row) for row in member.validations]
    return result


def _epochs(history: list[dict[str, float]]) -> int:
    return int(history[-1]["epoch"]) if history else 0
