"""A run on a GPU, in a process of its own: a device-side assert costs its member and a resume, not the run.

An assert on the device takes the whole CUDA context with it, and does not say whose kernel it was. So the run lives in
a forked child that saves its members; when the context is lost, another child takes each suspect by itself from its
last checkpoint, a batch at a time, until one of them loses the context again. That one has failed; a third child
trains the others. A process can only be forked before it has touched CUDA; afterwards the run is not guarded, and the
error says so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from shoal.data import Pool
from shoal.engine.members.member import Member, open_data
from shoal.engine.members.row_order import deal
from shoal.engine.planning.planner import Part
from shoal.engine.runtime.planning_context import PlanningContext
from shoal.engine.runtime.processes import Child, Line
from shoal.engine.runtime.run import Run
from shoal.engine.runtime.workers import Requeue, Tell, WorkerHandle
from shoal.engine.tiers.serial import SerialUnit
from shoal.engine.tiers.unit import context_lost
from shoal.environment import environment
from shoal.errors import MemberError, ShoalError, describe
from shoal.reporting.events import happened
from shoal.utils.set_up_times import current, timed

MOST_CULPRITS = 64


class NotGuarded(ShoalError):
    """No child process could use the GPU."""


Build = Callable[[Sequence[Member]], PlanningContext]
"""Plans members that are on their device."""
Make = Callable[..., Run]
"""Makes a run, given its members, their planning, `tell` and settings of `Run` by name."""


def can_guard() -> bool:
    """Whether a forked process could use the GPU: only if this one has not."""
    return hasattr(os, "fork") and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def lost_context(error: RuntimeError, *, searching: bool) -> ShoalError:
    """What to say where the context is lost in this process.

    A search trains here: what it decides and writes down would have to be sent to a child and back.
    """
    why = (
        "a search trains in its own process; mend that trial's step, and with out= the same call resumes"
        if searching
        else "this process had used CUDA before, so that the run could not have its own process; run it by "
        "`shoal train`, or before any other use of the GPU, and it costs that job alone"
    )
    return ShoalError(f"a job's kernel took the GPU's context with it ({describe(error)}), and {why}")


def to_device(members: Sequence[Member], device: torch.device) -> None:
    """Members that were built for the CPU, for this device: their data is moved there, once."""
    pool = Pool(device)
    for member in members:
        member.device = device
        member.data = open_data(pool, member.job, "data")
        member.val = open_data(pool, member.job, "val") if member.val is not None else None


def run_guarded(
    members: Sequence[Member],
    device: torch.device,
    build: Build,
    make: Make,
    requeue: Requeue,
    tell: Tell,
) -> tuple[list[Part], dict[str, Any]]:
    """Train members that were built for the CPU on a GPU, in a child process; the plan's parts and the environment.

    Raises:
        NotGuarded: before anything has happened.
    """

    def make_in_child(share: Sequence[Member], line: Line) -> Run:
        with timed("data"):
            to_device(share, device)
        before_turn = partial(line.send, "targets")
        run = make(share, build(share), line.tell, before_turn=before_turn)
        line.send("environment", environment(device))
        return run

    for _ in range(MOST_CULPRITS):
        alive = [member for member in members if member.status == "running"]
        if not alive:
            return [], {}
        child = Guarded(alive, device, make_in_child, requeue)
        try:
            if not child.start():
                raise NotGuarded
            try:
                child.drain_messages(tell, wait=True)
            except KeyboardInterrupt:
                child.cancel()
                child.drain_messages(tell, wait=True)
                raise
        finally:
            child.close()
        if child.lost is None:
            return child.parts, child.environment
        left = [member for member in alive if member.status == "running"]
        for member in left:
            requeue(member)
        culprit = blame(left, device, child.targets)
        if culprit is None:
            raise ShoalError(
                f"the GPU was lost ({child.lost}) and none of the jobs does it by itself; checkpoints are "
                "saved: run it again"
            )
        culprit.status, culprit.error = "failed", child.lost
        tell(
            happened(
                "leave", culprit, status="failed", error=culprit.error, steps=culprit.step, seconds=culprit.seconds
            )
        )
        tell(happened("note", culprit, text="it cost the device's context; the others continue from their checkpoints"))
    raise ShoalError(f"the GPU was lost {MOST_CULPRITS} times")


class Guarded(WorkerHandle):
    """The child that trains on a GPU, as its parent sees it."""

    def __init__(
        self,
        members: Sequence[Member],
        device: torch.device,
        make: Callable[[Sequence[Member], Line], Run],
        requeue: Requeue,
    ) -> None:
        super().__init__(members, make, requeue)
        self.device = device
        self.lost: str | None = None
        """How the context was lost."""
        self.targets: dict[int, int] = {}
        """Batches that each member may have had when the context was lost."""
        self.environment: dict[str, Any] = {}

    def _prepare(self, members: Sequence[Member], line: Line) -> Callable[[], Run]:
        self.check()
        return partial(self._make, members, line)  # on a GPU it takes long, and the parent waits for it like for a turn

    def check(self) -> None:
        """Raises where the driver was asked something in the parent: no child can use the GPU then."""
        current().seconds = {}  # those of this process
        with timed("device"):
            if self.device.type == "cuda":
                torch.zeros(1, device=self.device)
                torch.cuda.set_device(self.device)  # streams and graphs are made on the current one

    def finish(self, line: Line) -> None:
        line.send("times", current().seconds)

    def fail(self, error: Exception, line: Line) -> None:
        if context_lost(error):
            line.send("lost", describe(error))
            os._exit(3)  # whatever tidies up would touch the device
        super().fail(error, line)

    def take_message(self, kind: str, *contents: Any) -> None:
        (content,) = contents
        if kind == "targets":
            self.targets |= content
        elif kind == "environment":
            self.environment = content
        elif kind == "times":
            current().add(content)
        elif kind == "lost":
            self.lost, self._done = content, True


def blame(members: Sequence[Member], device: torch.device, targets: dict[int, int]) -> Member | None:
    """The member that loses the context when each trains by itself, from where it was saved to where it may have
    been."""
    suspects = {member.index: member for member in members if targets.get(member.index, 0) > member.batches}
    child = Child(partial(_try_each, list(suspects.values()), device, targets))
    trying: int | None = None
    try:
        while True:
            said = child.pipe.recv()
            if said == "none":
                return None
            trying = said
    except (EOFError, OSError):
        return None if trying is None else suspects[trying]
    finally:
        child.wait()
        child.close()


def _try_each(members: Sequence[Member], device: torch.device, targets: dict[int, int], pipe: Connection) -> None:
    to_device(members, device)
    for member in members:
        pipe.send(member.index)
        try:
            _try(member, targets[member.index])
        except Exception as error:
            if context_lost(error.cause if isinstance(error, MemberError) else error):
                os._exit(3)
    pipe.send("none")


def _try(member: Member, target: int) -> None:
    """One member's batches by itself, as far as it may have come."""
    unit = SerialUnit(member)
    while member.batches < target:
        deal([member])
        unit.run(1)
        if member.device.type == "cuda":
            torch.cuda.synchronize()
        if member.place == member.num_batches:
            member.epoch += 1
            member.close_epoch()
