"""How the members of one call of `shoal.train` are trained: the plan, and in which processes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from shoal.engine.kernels.loading import loading_common_kernels
from shoal.engine.members.member import Member
from shoal.engine.members.resuming import beginning
from shoal.engine.planning.joined_data import join_data
from shoal.engine.planning.memory import memory_budget
from shoal.engine.planning.planner import Plan
from shoal.engine.processes.guard import NotGuarded, lost_context, run_guarded, to_device
from shoal.engine.processes.sharing import processes_for, threads_for
from shoal.engine.processes.temporary_workers import run_with_temporary_workers
from shoal.engine.processes.workers import run_shared
from shoal.engine.runtime.commands import Controls, Supervisor
from shoal.engine.runtime.planning_context import PlanningContext
from shoal.engine.runtime.run import Run
from shoal.engine.tiers.unit import context_lost
from shoal.engine.units.overlapping import allow_overlaps
from shoal.reporting.callbacks import Callbacks
from shoal.reporting.events import Listener, Listeners, new_event
from shoal.settings import Settings
from shoal.storage.lost_state import watch_state
from shoal.storage.run_folder import RunFolder
from shoal.utils import garbage_collection
from shoal.utils.cuda_kernels import current_device
from shoal.utils.torch_flags import torch_flags


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


@dataclass(kw_only=True, eq=False)
class TrainingRun:
    """Trains those members of a run that have not ended: in this process, in others, or in a child process on a GPU."""

    members: list[Member]
    settings: Settings
    folder: RunFolder | None
    calls: Callbacks
    notify: Listeners
    controls: Controls | None
    search: Search | None
    tiers: dict[int, str]
    """The tiers that members had in the run that is resumed, by index."""
    most_threads: int
    """How many of torch's threads may be used; 0 means as many as are in use."""
    threads: int | None
    """The number of threads that the resumed run used; None if unknown."""
    plan: Plan | None = None
    seconds: float = 0.0
    environment: dict[str, Any] = field(default_factory=dict)
    """The environment of the child process that has trained; empty if there was none."""
    _started: bool = False

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
        if self.settings.device.type == "cuda" and not (self.controls or self.search):  # they add members with its data
            join_data(alive)
        settings, planning = self.settings, self._planning(alive or self.members)
        self.plan = planning.plan
        self._report_start(planning.propose(alive, settings.policy) if alive else None)
        search = self.search
        busy_too = search is not None  # a search looks for free cores itself, repeatedly
        may_share = self._may_share and (self.threads or 1) == 1
        count = processes_for(alive, planning, settings.threads, busy_too=busy_too) if may_share else 1
        make = lambda members, notify, **more: self._run(members, planning, notify, **more)  # noqa: E731
        shared: Any = partial(run_shared, requeue=self._requeue)
        if search is not None and count > 1:
            shared = partial(run_with_temporary_workers, supervisor=search)
        try:
            with torch_flags(settings.device, self._fixed_threads(alive, planning, count)):
                shared(alive, planning, count, make, self.notify, all_members=self.members)
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
            parts, self.environment = run_guarded(
                alive, device, self._planning, self._run, self._requeue, self.notify, wait_for_end=locked
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

    def _run(self, members: Sequence[Member], planning: PlanningContext, notify: Listener, **more: Any) -> Run:
        """Return the run that trains these members."""
        if not (self.calls or self.controls or self.search or (notify is self.notify and self.notify.given)):
            allow_overlaps(members)
        return Run(
            members, planning, policy=self.settings.policy, notify=notify, callbacks=self.calls or None,
            folder=self.folder, save_every=self.settings.checkpoint_every, controls=self.controls,
            **({"supervisor": self.search} | more),
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
        self.notify(new_event("start", jobs=len(self.members), device=str(self.settings.device), plan=content))


def _dtypes(members: Sequence[Member]) -> set[torch.dtype]:
    """Return the dtypes in which the first member computes and is proven, and most likely the others."""
    dtypes = {p.dtype for member in members[:1] for p in member.model.parameters() if p.is_floating_point()}
    lower = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return dtypes | {lower.get(member.job.precision or "", torch.float64) for member in members[:1]}
