"""`shoal.start`: a run that goes on in the background, and can be told things while it does."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

from shoal.checks import prepare
from shoal.errors import JobError
from shoal.job import Job
from shoal.pack.controls import Controls
from shoal.pack.members import Member
from shoal.pack.run import Run
from shoal.results import Results
from shoal.training import carry_out, make_settings

FIXED = {"model", "data", "batch_size", "optimizer", "params", "accumulate", "precision"}
"""What a clone has in common with the job it is of."""


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

    Settings are those of `shoal.train`. What is asked of the run is done between two of its steps.

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

    def _go(self, jobs: Sequence[Job], settings: Any, more: dict[str, Any]) -> None:
        try:
            self._results = carry_out(jobs, settings, controls=self._controls, **more)
        except BaseException as error:
            self._error = error
        finally:
            for order in self._controls.close():
                order(None)  # type: ignore[arg-type]  # answered with an error: there is no run any more

    @property
    def running(self) -> bool:
        """Whether it is still at work."""
        return self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> Results:
        """The results, once all jobs have ended; TimeoutError where that takes longer. Raises what the run raised."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the run is not at its end after {timeout:g} seconds")
        if self._error is not None:
            raise self._error
        assert self._results is not None
        return self._results

    def status(self) -> dict[str, tuple[str, int, int]]:
        """Every job's status ("waiting", "riding", or how it ended), epochs and steps."""

        def look(run: Run) -> dict[str, tuple[str, int, int]]:
            found = {}
            for member in run.members.values():
                under_way = "waiting" if member.index in run.waiting else "riding"
                said = under_way if member.status == "running" else member.status
                found[member.name] = (said, member.epoch, member.step)
            return found

        return self._ask(look)  # type: ignore[no-any-return]

    def stop(self, name: str) -> bool:
        """End a job here: it keeps what it has become, as "stopped". False where it had ended before."""
        return self._ask(lambda run: run.end(_named(run, name).index, "stopped"))  # type: ignore[no-any-return]

    def cancel(self, name: str) -> bool:
        """Take a job out, as "cancelled". False where it had ended before."""
        return self._ask(lambda run: run.end(_named(run, name).index, "cancelled"))  # type: ignore[no-any-return]

    def add(self, job: Job, *, warm_start: str | None = None) -> None:
        """One more job; with `warm_start`, from the weights that another job of this run has now."""

        def order(run: Run) -> None:
            member = _newcomer(run, job)
            if warm_start is not None:
                source = run.written(_named(run, warm_start).index)
                try:
                    member.model.load_state_dict({k: v.clone() for k, v in source.model.state_dict().items()})
                except RuntimeError as error:
                    raise JobError(
                        f"job {member.name!r}: the weights of {warm_start!r} do not fit it ({error})"
                    ) from None
            run.add(member)

        self._ask(order)

    def clone(self, name: str, new_name: str, **changes: Any) -> None:
        """A copy of a job as it is now, optimizer and all, that goes on with some settings changed.

        Changes are fields of shoal.Job; `hparams` are put over those it has. Its length counts from the job's own
        beginning. What it is (model, data, batch_size, optimizer) stays.
        """
        fixed = sorted(
            changes.keys() & {"model", "data", "batch_size", "optimizer", "params", "accumulate", "precision"}
        )
        if fixed:
            raise JobError(f"clone: {', '.join(fixed)} cannot be changed on the way; add a job of its own instead")

        def order(run: Run) -> None:
            source = _named(run, name)
            hparams = {**source.job.hparams, **changes.pop("hparams", {})}
            try:
                job = dataclasses.replace(source.job, name=new_name, hparams=hparams, **changes)
            except TypeError as error:
                raise JobError(f"clone: {error}; changes are fields of shoal.Job") from None
            member = _newcomer(run, job)
            state = run.written(source.index).state()
            member.load_state({**state, "status": "running", "error": None, "seconds": 0.0})
            for group in member.optimizer_state.get("param_groups", []):
                group |= {key: value for key, value in hparams.items() if key in group and key != "params"}
            run.add(member)

        self._ask(order)

    def _ask(self, order: Any) -> Any:
        return self._controls.give(order).result()


def _named(run: Run, name: str) -> Member:
    for member in run.members.values():
        if member.name == name:
            return member
    raise KeyError(f"no job {name!r} in this run; it has {', '.join(m.name for m in run.members.values())}")


def _newcomer(run: Run, job: Job) -> Member:
    if any(member.name == job.name for member in run.members.values()):
        raise JobError(f"job {job.name!r}: the run has a job of this name; give it another")
    first = next(iter(run.members.values()))
    member = prepare([job], first.device)[0]
    member.index = 1 + max(run.members)
    return member
