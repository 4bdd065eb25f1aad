"""`shoal.start`: a run in the background, which takes commands while it trains."""

from __future__ import annotations

import atexit
import copy
import threading
import time
import warnings
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
from shoal.errors import JobError, ShoalError, ShoalWarning
from shoal.jobs.job import Job
from shoal.jobs.names import named
from shoal.reporting.callbacks import own_copy
from shoal.results import Result, Results
from shoal.settings import make_settings
from shoal.training import carry_out, result_of

LONGEST = 60.0
"""Seconds that the program's end waits for a run to be saved."""


class _Progress(NamedTuple):
    status: str
    """waiting, running, or how it ended."""
    epochs: int
    """Epochs done."""
    steps: int
    """Optimizer steps done."""


class JobStatus(_Progress):
    """How far a job is: a tuple (status, epochs, steps), with its latest values.

    >>> status = JobStatus("running", 2, 14, {"loss": 0.5})
    >>> status.epochs, status.values["loss"], status == ("running", 2, 14)
    (2, 0.5, True)
    """

    values: Mapping[str, float]
    """The latest of each number in its history: loss, val_loss, metrics, logs, lr; empty before its first epoch."""

    def __new__(cls, status: str, epochs: int, steps: int, values: Mapping[str, float] | None = None) -> Self:
        made = super().__new__(cls, status, epochs, steps)
        made.values = dict(values or {})
        return made

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
    """Begin to train these jobs in a thread of this process, and come back at once.

    Settings are those of `shoal.train`. Commands to the run are carried out between two of its steps.

    Args:
        keep_open: When all jobs have ended, wait for more, until `wait` is called; otherwise the run ends with them.

    Examples:
        >>> run = shoal.start(jobs)
        >>> run.stop("lr=1")
        >>> results = run.wait()
    """
    settings = make_settings(device, memory, threads, compile, checkpoint_every, deterministic, policy)
    more = {"out": out, "progress": progress, "callbacks": callbacks, "events": events}
    return LiveRun(jobs, settings, more, keep_open=keep_open)


class LiveRun:
    """A run under way. Jobs are called by their names."""

    def __init__(self, jobs: Sequence[Job], settings: Any, more: dict[str, Any], *, keep_open: bool = False) -> None:
        self._controls = Controls(keep_open=keep_open, live=self)
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

    # --- how far it is ------------------------------------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> Results:
        """The results, once all jobs have ended; jobs that were added come last, in the order they came.

        TimeoutError where it takes longer; the run continues then. Raises what the run raised. Ctrl-C ends the run,
        saved where it has a folder. A run that was started with `keep_open` ends when its jobs have, from here on.
        """
        self._refuse_inside("wait()")
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
        try:
            yield
        except KeyboardInterrupt:
            self._controls.give(lambda run: run.interrupt())
            self._thread.join()
            raise

    def as_completed(self, timeout: float | None = None) -> Iterator[Result]:
        """Give the results as jobs end, those that had ended first; jobs that are added meanwhile are among them.

        It is over when all jobs have ended. A result's network and optimizer state are copies, as the job ended.
        TimeoutError where it is not over so many seconds after this call. Ctrl-C and errors of the run as in `wait`.
        """
        self._refuse_inside("as_completed()")
        return self._completed(timeout, None if timeout is None else time.monotonic() + timeout)

    def _completed(self, timeout: float | None, deadline: float | None) -> Iterator[Result]:
        given: set[str] = set()

        def left() -> float | None:
            return None if deadline is None else max(0.0, deadline - time.monotonic())

        while True:
            num_ends = self._controls.num_ends
            try:
                with self._ended_by_ctrl_c():
                    ended, num_left = self._controls.give(partial(_results_without, given)).result(left())
            except EndedError:
                ended, num_left = [result for result in self._all_results() if result.name not in given], 0
            except TimeoutError:
                raise _too_long(timeout) from None
            for result in ended:
                given.add(result.name)
                yield result
            if ended:
                continue  # the caller may have added jobs meanwhile
            if not num_left:
                return
            with self._ended_by_ctrl_c():
                if not self._controls.wait_for_an_end(num_ends, left()):
                    raise _too_long(timeout)

    def status(self) -> dict[str, JobStatus]:
        """Every job's status ("waiting", "running", or how it ended), epochs and steps; in `values` its latest loss,
        val_loss, metrics and logs."""
        if self._inside:
            return {} if self._controls.run is None else _status(self._controls.run)
        try:
            return self._controls.give(_status).result()  # type: ignore[no-any-return]
        except EndedError:
            results = self._all_results()
            return {r.name: JobStatus(r.status, _epochs(r.history), r.steps, latest_values(r)) for r in results}

    # --- commands -----------------------------------------------------------------------------------------------------

    def stop(self, name: str) -> bool | None:
        """End a job here: it keeps what it has become, as "stopped". False where it had ended before; None from a
        callback or a listener, where it is done after this step."""
        return self._end("stop", name, "stopped")

    def cancel(self, name: str) -> bool | None:
        """Take a job out, as "cancelled". False where it had ended before; None from a callback or a listener, where it
        is done after this step."""
        return self._end("cancel", name, "cancelled")

    def _end(self, what: str, name: str, status: str) -> bool | None:
        try:
            command = lambda run: bool(run.end({named(run.all_members, name).index}, status))  # noqa: E731
            return self._order(f"{what}({name!r})", command)  # type: ignore[no-any-return]
        except EndedError:
            named(self._all_results(), name)
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
            add_to(run, member)

        self._order(f"add({job.name!r})", add)

    def clone(self, name: str, new_name: str, **changes: Any) -> None:
        """A copy of a job as it is now, optimizer and random state and all, that continues with some settings changed.

        Changes are fields of shoal.Job, all but model. hparams are put over those it has; under a schedule a new lr
        scales all rates from here on. A new batch_size holds for the rest of this epoch's rows too; a new schedule
        is where it would be by now; another optimizer has a fresh state; with other data the epoch begins again. Its
        length counts from the first job's beginning.
        """
        command = lambda run: add_to(run, clone_of(run, named(run.all_members, name), new_name, changes))  # noqa: E731
        self._order(f"clone({name!r}, {new_name!r})", command)

    def _order(self, what: str, command: Callable[[Run], Any]) -> Any:
        """Have it carried out, and wait for that; inside the run, which would wait for itself, come back at once."""
        answer = self._controls.give(command)
        if not self._inside:
            return answer.result()
        answer.add_done_callback(partial(_warn_of_mistake, what))
        return None

    @property
    def _inside(self) -> bool:
        return threading.current_thread() is self._thread

    def _refuse_inside(self, what: str) -> None:
        if self._inside:
            raise ShoalError(f"{what} in a callback or a listener would wait for itself; call it from another thread")


def _warn_of_mistake(what: str, answer: Future[Any]) -> None:
    error = answer.exception()
    if error is not None:
        warnings.warn(f"{what}, ordered by a callback or a listener, was not done: {error}", ShoalWarning, stacklevel=2)


def _too_long(timeout: float | None) -> TimeoutError:
    return TimeoutError(f"not all jobs have ended after {timeout:g} seconds; the run continues")


def _status(run: Run) -> dict[str, JobStatus]:
    states = {}
    for member in run.all_members:
        under_way = "waiting" if member.index in run.waiting else "running"
        said = under_way if member.status == "running" else member.status
        states[member.name] = JobStatus(said, member.epoch, member.step, latest_values(member))
    return states


def latest_values(of: Member | Result) -> dict[str, float]:
    """The latest of each number in a job's history; those of validations within epochs too."""
    values, history, within = dict[str, float](), of.history, of.validations
    if within and (not history or within[-1]["step"] > history[-1]["step"]):
        values |= within[-1]
    for row in reversed(history):  # rows of epochs without a validation have fewer numbers
        values = {**row, **values}
        if of.job.val is None or "val_loss" in values:
            break
    return {name: value for name, value in values.items() if name not in ("epoch", "step", "seconds")}


def _results_without(names: set[str], run: Run) -> tuple[list[Result], int]:
    """Results of jobs that have ended, but for those of these names; and how many are still to end."""
    ended = [member for member in run.all_members if member.status != "running"]
    new = [member for member in ended if member.name not in names]
    return [_copied(member) for member in new], len(run.all_members) - len(ended)


def _copied(member: Member) -> Result:
    """A member's result, of copies: clones of this member, which may still come, begin with what it has itself."""
    result = result_of(member, own_copy(member), environment(member.device))
    result.optimizer_state = copy.deepcopy(member.optimizer_state)
    result.history = [dict(row) for row in member.history]
    result.validations = [dict(row) for row in member.validations]
    return result


def _epochs(history: list[dict[str, float]]) -> int:
    return int(history[-1]["epoch"]) if history else 0
