"""`shoal.train`, which trains a list of jobs and returns their results."""

from __future__ import annotations

import logging
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from shoal.engine.members.evaluation_weights import training_weights
from shoal.engine.members.member import Member
from shoal.engine.members.resuming import as_trained
from shoal.engine.planning.policy import Policy
from shoal.engine.processes.guard import can_guard
from shoal.engine.processes.training_run import Search, TrainingRun
from shoal.engine.python_state.module_modes import in_eval_mode
from shoal.engine.runtime.commands import Controls
from shoal.environment import environment
from shoal.jobs.job import Job
from shoal.preparation.checks import DRY_ROWS, prepare
from shoal.reporting.callbacks import Callback, Callbacks
from shoal.reporting.events import Listener, Listeners, MembersRunning, new_event
from shoal.reporting.progress import progress_for
from shoal.results import Result, Results
from shoal.settings import Settings, make_settings
from shoal.storage.run_folder import RunFolder
from shoal.utils import garbage_collection
from shoal.utils.set_up_times import collected, timed
from shoal.utils.torch_flags import driver_not_started, torch_flags, training_mode


def train(
    jobs: Sequence[Job],
    device: str | torch.device = "auto",
    out: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
    memory: int | str | None = None,
    threads: int | None = None,
    compile: bool | Literal["auto"] = "auto",
    checkpoint_every: float | str = "60s",
    deterministic: bool = False,
    policy: str | Policy = "fifo",
    callbacks: Sequence[Callback] | None = None,
    events: Listener | None = None,
    placement: Any = None,
) -> Results:
    """Train all jobs on one device, each exactly as if it were alone, and return their results in the same order.

    Args:
        jobs: The jobs to train. Mistakes that show before the first step raise one JobError (a ValueError) for all.
        device: "auto" uses the GPU if there is one; or "cpu", "cuda", "cuda:1".
        out: A folder for the run: its jobs, checkpoints, histories, results and weights. The same jobs with the same
            folder resume, however the run before ended; added jobs, epochs or steps are trained too; different jobs
            raise an error that says what differs.
        progress: Show a table in terminals and notebooks, and plain lines elsewhere; None shows only the table.
        memory: The memory limit: bytes, or a size such as "20GB"; None means 90 % of the free memory. Jobs that do not
            fit wait until others finish.
        threads: Torch's intra-op threads during the run, in this process alone. None on a CPU means one, or all of
            torch's threads if steps are faster with them (with `out`, decided once for the run), and long runs are
            shared among one process per free core (SHOAL_WORKERS sets their number).
        compile: Whether steps on a GPU may be compiled; "auto" compiles where that saves time. True raises an error on
            a CPU, where steps are never compiled.
        checkpoint_every: Seconds between checkpoints, or a time such as "5m", if `out` is given.
        deterministic: Give the same bits every time, with torch's deterministic algorithms only; an operation without
            one raises an error. On a CPU with one thread (then the default) a job's bits also do not depend on the jobs
            that run alongside, and timing does not decide how it runs. The run may be slower.
        policy: Which jobs go first if not all can run at once: "fifo", "priority", "shortest", "round-robin", "fair",
            or a shoal.Policy of your own.
        callbacks: Functions that are called with a member's view after each of its epochs and at its end. All jobs
            then train in this process.
        events: A function that is called with each shoal.Event as it happens.
        placement: What `shoal.place` returned, to train one job with this process as the server and forked workers.
    """
    settings = make_settings(device, memory, threads, compile, checkpoint_every, deterministic, policy)
    how: dict[str, Any] = {"out": out, "progress": progress, "callbacks": callbacks, "events": events}
    if placement is not None:  # imported here, since that module imports this one
        return import_module("shoal.place.training.api").train_job(jobs, placement, settings, **how)  # type: ignore[no-any-return]
    return carry_out(jobs, settings, **how)


def carry_out(
    jobs: Sequence[Job],
    settings: Settings,
    *,
    out: str | os.PathLike[str] | None = None,
    progress: bool | None = False,
    callbacks: Sequence[Callback] | None = None,
    events: Listener | None = None,
    controls: Controls | None = None,
    search: Search | None = None,
) -> Results:
    """Train jobs, or the members of a `search`, with settings that `make_settings` has checked."""
    calls = Callbacks(callbacks, controls.live if controls is not None else None)
    if events is not None and not callable(events):
        raise ValueError(f"events is {events!r}; pass a function that is given each shoal.Event")
    if out is not None and not isinstance(out, (str, os.PathLike)):
        raise ValueError(f"out is {out!r}; name a folder")
    guarded = settings.device.type == "cuda" and not calls and not (controls or search) and can_guard()
    may_choose_threads = settings.threads is None and not settings.deterministic and settings.device.type == "cpu"
    most_threads = torch.get_num_threads() if may_choose_threads else 0
    flags = torch_flags(settings.device, 1 if most_threads else settings.threads, settings.deterministic)
    quiet = garbage_collection.frozen()  # from one part of the set-up to the next, and until units are built
    with collected() as times, training_mode(), flags, _open_folder(out, guarded) as folder, quiet:
        with timed("jobs"), garbage_collection.frozen(), driver_not_started():
            prepare_device, dry_rows = (torch.device("cpu"), DRY_ROWS) if guarded else (settings.device, None)
            if search is None:
                members = prepare(jobs, prepare_device, dry_rows=dry_rows)
            else:
                members = search.prepare(prepare_device)
        tiers, threads = _restore(folder, members, settings, search)
        with progress_for(members, progress) as progress_display:
            running = MembersRunning()
            controlled = [controls.listen] if controls is not None else []
            notify = Listeners([running, progress_display, *calls.listeners(), *controlled], given=events)
            training = TrainingRun(
                members=members, settings=settings, folder=folder, calls=calls, notify=notify, controls=controls,
                search=search, tiers=tiers, most_threads=most_threads, threads=threads,
            )  # fmt: skip
            interrupted: KeyboardInterrupt | None = None
            try:
                training.go(guarded)
            except KeyboardInterrupt as caught:
                interrupted = caught
            results = collect(training.members, training.environment or environment(settings.device))
            results.plan, results.running = training.plan, running.average()
            if results.plan is not None:
                results.plan.set_up = times.seconds
            if progress is None and search is None and not progress_display.shown:
                _log_failures(results)
            statuses = dict(Counter(result.status for result in results))
            resume: dict[str, str] = {}
            if interrupted is not None and out is not None and search is None:
                text = f"the checkpoints are in out={str(out)!r}; run the same lines again to resume"
                interrupted.args, resume = (text,), {"resume": text}
            notify(new_event("end", statuses=statuses, seconds=training.seconds, running=results.running, **resume))
        if interrupted is not None:
            raise interrupted
        if folder is not None and out is not None:
            folder.finish(results)
        return results


def _restore(
    folder: RunFolder | None, members: Sequence[Member], settings: Settings, search: Search | None
) -> tuple[dict[int, str], int | None]:
    """Restore members from the folder, and return what the resumed run used: tiers by index, and threads if known."""
    searching = search is not None
    changed = search.changed if search is not None else set[str]()
    if folder is None or not folder.claim(members, grows=searching, extends=not searching, changed=changed):
        return {}, None
    for member in members:
        folder.restore(member)
    if any(member.status == "running" for member in members):
        folder.reopen()
    saved = folder.plan()
    tiers = {int(index): tier for index, tier in saved["tiers"].items()} if saved is not None else {}
    trained = as_trained(tiers, members)  # some members may have left their stack before the resume
    tiers = trained if settings.device.type == "cuda" else tiers | trained
    return tiers, saved.get("threads") if saved is not None else None


@contextmanager
def _open_folder(out: str | os.PathLike[str] | None, guarded: bool) -> Iterator[RunFolder | None]:
    """Open the run's folder; a guarded run without `out` gets a temporary one."""
    if out is None and not (guarded and find_spec("safetensors")):
        yield None
        return
    path_context = tempfile.TemporaryDirectory(prefix="shoal-") if out is None else nullcontext(str(out))
    with path_context as name, RunFolder(Path(name), passing=out is None) as folder:
        yield folder


def _log_failures(results: Results) -> None:
    """Log which jobs failed or diverged, since no progress display shows it."""
    unfinished = [result for result in results if result.status in ("failed", "diverged")]
    if unfinished:
        more = f", and {len(unfinished) - 1} more" if len(unfinished) > 1 else ""
        logging.getLogger("shoal").warning(
            "%d of %d jobs did not finish: %r %s: %s%s; results.table() lists them",
            len(unfinished), len(results), unfinished[0].name, unfinished[0].status, unfinished[0].error, more,
        )  # fmt: skip


def collect(members: list[Member], stamp: dict[str, Any]) -> Results:
    """Return the results of these members, with their models in eval mode on the CPU.

    Args:
        stamp: The environment in which they were trained.
    """
    return Results([result_of(member, in_eval_mode(member.model.to("cpu")), stamp) for member in members])


def result_of(member: Member, model: nn.Module, stamp: dict[str, Any]) -> Result:
    """Return a member's result with this network as its model."""
    return Result(
        name=member.name,
        job=member.job,
        model=model,
        history=member.history,
        validations=member.validations,
        status=member.status,
        tier=member.tier,
        error=member.error,
        optimizer_state=member.optimizer_state,
        seconds=member.seconds,
        environment=stamp,
        steps=member.step,
        training_weights=training_weights(member.trained),
    )
