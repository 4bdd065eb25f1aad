"""`shoal.train`, which trains a list of jobs and returns their results."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import nn

from shoal.engine.kernels.loading import loading_common_kernels
from shoal.engine.members.evaluation_weights import training_weights
from shoal.engine.members.member import Member
from shoal.engine.members.resuming import as_trained, beginning
from shoal.engine.planning.memory import memory_budget
from shoal.engine.planning.planner import Plan
from shoal.engine.planning.policy import Policy
from shoal.engine.python_state.module_modes import in_eval_mode
from shoal.engine.runtime.commands import Controls, Supervisor
from shoal.engine.runtime.guard import NotGuarded, can_guard, lost_context, run_guarded, to_device
from shoal.engine.runtime.lending import run_lending
from shoal.engine.runtime.planning_context import PlanningContext
from shoal.engine.runtime.run import Run
from shoal.engine.runtime.sharing import processes_for, threads_for
from shoal.engine.runtime.workers import run_shared
from shoal.engine.tiers.unit import context_lost
from shoal.engine.units.overlapping import allow_overlaps
from shoal.environment import environment
from shoal.jobs.job import Job
from shoal.preparation.checks import prepare
from shoal.reporting.callbacks import Callback, Callbacks
from shoal.reporting.events import Listener, Listeners, MembersRunning, happened
from shoal.reporting.progress import progress_for
from shoal.results import Result, Results
from shoal.settings import Settings, make_settings
from shoal.storage.lost_state import watch_state
from shoal.storage.run_folder import RunFolder
from shoal.utils import garbage_collection
from shoal.utils.cuda_kernels import current_device
from shoal.utils.set_up_times import collected, timed
from shoal.utils.torch_flags import torch_flags, training_mode


class Search(Supervisor, Protocol):
    """Creates the members of a run, decides which of them continue, and may add others while it runs."""

    @property
    def changed(self) -> set[str]:
        """The names of jobs whose settings the search has changed since they began."""

    @property
    def shareable(self) -> bool:
        """Whether members may train in other processes. That needs a search that acts on members only while they are
        paused."""

    def prepare(self, device: torch.device) -> list[Member]:
        """Return the members that begin or resume training."""


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
        device: "auto" takes the GPU if there is one; or "cpu", "cuda", "cuda:1".
        out: A folder for the run: its jobs, checkpoints, histories, results and weights. The same jobs with the same
            folder resume, however the run before ended; added jobs, epochs or steps are trained too; different jobs
            raise an error that says what differs.
        progress: Show a table in terminals and notebooks, and plain lines elsewhere; None shows only the table.
        memory: Bytes that may be used, or a size such as "20GB"; None means 90 % of the free memory. Jobs that do not
            fit beside the others wait until there is room.
        threads: Torch's intra-op threads during the run, in this process alone. None on a CPU means one, or all of
            torch's threads if steps are faster with them (with `out`, decided once for the run), and long runs are
            shared among one process per free core (SHOAL_WORKERS sets their number).
        compile: Whether steps on a GPU may be compiled; "auto" compiles where that saves time. True raises an error on
            a CPU, where steps are never compiled.
        checkpoint_every: Seconds between checkpoints, or a time such as "5m", if `out` is given.
        deterministic: Give the same bits every time, with torch's deterministic algorithms only; an operation without
            one raises an error. On a CPU with one thread (then the default) a job's bits also do not depend on the jobs
            that run beside it, and no timing decides how it is run, which may make the run slower.
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
        with timed("jobs"), garbage_collection.frozen():
            prepare_device = torch.device("cpu") if guarded else settings.device
            members = prepare(jobs, prepare_device) if search is None else search.prepare(prepare_device)
        tiers, changed = dict[int, str](), set[str]() if search is None else search.changed
        threads: int | None = None
        searching = search is not None
        if folder is not None and folder.claim(members, grows=searching, extends=not searching, changed=changed):
            for member in members:
                folder.restore(member)
            if any(member.status == "running" for member in members):
                folder.reopen()
            saved = folder.plan()
            tiers = {int(index): tier for index, tier in saved["tiers"].items()} if saved is not None else {}
            trained = as_trained(tiers, members)  # some members may have left their stack before the resume
            tiers = trained if settings.device.type == "cuda" else tiers | trained
            threads = saved.get("threads") if saved is not None else None
        with progress_for(members, progress) as progress_display:
            running = MembersRunning()
            controlled = [controls.listen] if controls is not None else []
            tell = Listeners([running, progress_display, *calls.listeners(), *controlled], given=events)
            training = _Work(members, settings, folder, calls, tell, controls, search, tiers, most_threads, threads)
            interrupted: KeyboardInterrupt | None = None
            try:
                training.go(guarded)
            except KeyboardInterrupt as caught:
                interrupted = caught
            results = collect(training.members, training.stamp or environment(settings.device))
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
            tell(happened("end", statuses=statuses, seconds=training.seconds, running=results.running, **resume))
        if folder is not None and out is not None and interrupted is None:
            folder.finish(results)
        if interrupted is not None:
            raise interrupted
        return results


@contextmanager
def _open_folder(out: str | os.PathLike[str] | None, guarded: bool) -> Iterator[RunFolder | None]:
    """Open the run's folder; a guarded run without `out` gets a temporary one."""
    if out is None and not (guarded and find_spec("safetensors")):
        yield None
        return
    path_context = tempfile.TemporaryDirectory(prefix="shoal-") if out is None else nullcontext(str(out))
    with path_context as name, RunFolder(Path(name), passing=out is None) as folder:
        yield folder


class _Work:
    """Trains those members of a run that have not ended."""

    def __init__(
        self,
        members: list[Member],
        settings: Settings,
        folder: RunFolder | None,
        calls: Callbacks,
        tell: Listeners,
        controls: Controls | None,
        search: Search | None,
        tiers: dict[int, str],
        most_threads: int,
        threads: int | None,
    ) -> None:
        """Store what the training needs.

        Args:
            most_threads: How many of torch's threads may be used; 0 means as many as are in use.
            threads: The number of threads that the resumed run used; None if unknown.
        """
        self.members, self.settings, self.folder = members, settings, folder
        self.most_threads, self.threads = most_threads, threads
        self.calls, self.tell, self.controls, self.search, self.tiers = calls, tell, controls, search, tiers
        self.plan: Plan | None = None
        self.seconds, self.stamp, self._started = 0.0, dict[str, Any](), False

    def go(self, guarded: bool) -> None:
        """Train the members: in a child process on a GPU, in this process and others on a CPU."""
        start = time.perf_counter()
        alive = [member for member in self.members if member.status == "running"]
        try:
            if not alive and self.controls is None:
                self._report_start(None)
            elif guarded:
                self._guarded(alive)
            else:
                self._shared(alive)
        finally:
            self.seconds = time.perf_counter() - start
            for member in self.members:
                member.data.source.close()

    def _shared(self, alive: list[Member]) -> None:
        """Train the members in this process, and on a CPU in other processes too."""
        with current_device(self.settings.device):  # streams and CUDA graphs are created on the current device
            self._in_this_process(alive)

    def _in_this_process(self, alive: list[Member]) -> None:
        """Plan, report the start, and train in this process, shared with others if that is allowed."""
        settings, planning = self.settings, self._planning(alive or self.members)
        self.plan = planning.plan
        self._report_start(planning.propose(alive, settings.policy) if alive else None)
        search = self.search
        busy_too = search is not None  # a search looks for free cores itself, repeatedly
        may_share = self._may_share and (self.threads or 1) == 1
        count = processes_for(alive, planning, settings.threads, busy_too=busy_too) if may_share else 1
        make = lambda members, tell, **more: self._run(members, planning, tell, **more)  # noqa: E731
        shared: Any = partial(run_shared, requeue=self._requeue)
        if search is not None and count > 1:
            shared = partial(run_lending, supervisor=search)
        try:
            with torch_flags(settings.device, self._fixed_threads(alive, planning, count)):
                shared(alive, planning, count, make, self.tell, all_members=self.members)
        except RuntimeError as error:
            if not context_lost(error):
                raise
            raise lost_context(error, searching=search is not None) from error

    def _fixed_threads(self, alive: list[Member], planning: PlanningContext, count: int) -> int | None:
        """Return how many of torch's threads the whole run uses, or None if the number stays or each unit chooses its
        own.

        The number of threads may change the last bits, so a run that can be resumed decides once and saves the number.
        """
        if not self.most_threads or (self.folder is None and self.controls is None):
            return None
        if self.threads is None:
            self.threads = 1 if count > 1 else threads_for(alive, planning, self.most_threads)
            self._save_tiers({})
        return self.threads

    def _guarded(self, alive: list[Member]) -> None:
        """Train in a child process, which protects this process from CUDA errors, or here if that is not possible."""
        device = self.settings.device
        self._report_start(None)
        try:
            locked = self.folder is not None and not self.folder.passing
            parts, self.stamp = run_guarded(
                alive, device, self._planning, self._run, self._requeue, self.tell, wait_for_end=locked
            )
            self.plan = Plan(str(device), parts)
        except NotGuarded:
            to_device(alive, device)
            self._shared(alive)

    @property
    def _may_share(self) -> bool:
        """Whether members may train in other processes."""
        ordered = self.search is not None and (self.settings.deterministic or not self.search.shareable)
        return not (ordered or self.calls or self.controls)

    def _planning(self, members: Sequence[Member]) -> PlanningContext:
        """Return the planning context of these members, and watch their Python state if it may have to be saved."""
        settings = self.settings
        network = members[0].model if members else None
        with garbage_collection.frozen(), loading_common_kernels(settings.device, _dtypes(members), network):
            planning = PlanningContext(
                members,
                timed=not settings.deterministic,
                deterministic=settings.deterministic,
                compile=settings.compile,
                budget=memory_budget(settings.device, settings.memory),
                tiers=self.tiers,
                may_loop=self.controls is None,
                may_share=self._may_share and settings.threads is None,
                may_share_weights=not self.calls and self.controls is None,
                most_threads=self.most_threads if self.folder is None and self.controls is None else 0,
                forms_changed=self._save_tiers,
            )
        planning.note_tiers(members)
        if self.folder is not None or self.controls is not None:
            watch_state(members, planning.recipes)
        if self.folder is not None and not self.folder.passing:
            self.folder.warn_of_lost_state(members)
        return planning

    def _run(self, members: Sequence[Member], planning: PlanningContext, tell: Listener, **more: Any) -> Run:
        """Return the run that trains these members."""
        if not (self.calls or self.controls or self.search or (tell is self.tell and self.tell.given)):
            allow_overlaps(members)
        return Run(
            members, planning, policy=self.settings.policy, tell=tell, callbacks=self.calls or None, folder=self.folder,
            save_every=self.settings.checkpoint_every, controls=self.controls, **({"supervisor": self.search} | more),
        )  # fmt: skip

    def _requeue(self, member: Member) -> None:
        """Reset a member to its last checkpoint, or to its beginning if there is none."""
        if self.folder is None or not self.folder.restore(member):
            beginning(member)

    def _save_tiers(self, tiers: Mapping[int, str]) -> None:
        """Save the tiers and the number of threads in the folder, so that a resumed run uses the same."""
        if self.folder is None:
            return
        self.tiers |= tiers
        threads = {} if self.threads is None else {"threads": self.threads}
        self.folder.save_plan({"tiers": {str(index): tier for index, tier in self.tiers.items()}} | threads)

    def _report_start(self, plan: Plan | None) -> None:
        """Report the start event once."""
        if self._started:
            return
        self._started = True
        content = None if plan is None else plan.to_json()
        self.tell(happened("start", jobs=len(self.members), device=str(self.settings.device), plan=content))


def _dtypes(members: Sequence[Member]) -> set[torch.dtype]:
    """Return the dtypes in which the first member computes, and most likely the others."""
    dtypes = {p.dtype for member in members[:1] for p in member.model.parameters() if p.is_floating_point()}
    return dtypes | {torch.bfloat16 for member in members[:1] if member.job.precision == "bf16"}


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
