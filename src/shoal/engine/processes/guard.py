"""Run on a GPU in a child process, so that a device-side assert ends one member and not the run.

An assert on the device destroys the whole CUDA context, and does not say which member's kernel it was. So the run is in
a forked child that saves its members. If the context is lost, another child runs each suspect by itself from its last
checkpoint, batch by batch, until one of them loses the context again. That one has failed; a third child trains the
others. A process can only be forked before it has used CUDA; afterwards the run is not guarded, and the error says so.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, ClassVar

import torch

from shoal.data import Pool
from shoal.engine.members.member import Member, open_data
from shoal.engine.members.row_order import assign_rows
from shoal.engine.planning.joined_data import join_data
from shoal.engine.planning.planner import Part
from shoal.engine.processes.child import Child
from shoal.engine.processes.parent import ParentHandle
from shoal.engine.processes.workers import Requeue, WorkerHandle
from shoal.engine.runtime.planning_context import PlanningContext
from shoal.engine.runtime.run import Run
from shoal.engine.tiers.serial import SerialUnit
from shoal.engine.tiers.unit import context_lost
from shoal.engine.units.starting import start_while_loading
from shoal.environment import environment
from shoal.errors import MemberError, ShoalError, describe
from shoal.reporting.events import Listener, new_event
from shoal.utils.set_up_times import current, timed

MOST_LOSSES = 64
"""How many times the context may be lost in a run."""


class NotGuarded(ShoalError):
    """Raised if no child process can use the GPU."""


Build = Callable[[Sequence[Member]], PlanningContext]
"""Plans members that are on their device."""
Make = Callable[..., Run]
"""Creates a run from its members, their planning context, `notify`, and settings of `Run` by name."""


def can_guard() -> bool:
    """Return whether a forked process can use the GPU: only if this one has not used it."""
    return hasattr(os, "fork") and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def lost_context(error: RuntimeError, *, searching: bool) -> ShoalError:
    """Return the error for a context that was lost in this process.

    A search trains in this process, since its decisions and records would otherwise have to be sent to a child and
    back.
    """
    why = (
        "a search trains in its own process; mend that trial's step, and with out= the same call resumes"
        if searching
        else "this process had used CUDA before, so that the run could not have its own process; run it by "
        "`shoal train`, or before any other use of the GPU, and it costs that job alone"
    )
    return ShoalError(f"a job's kernel took the GPU's context with it ({describe(error)}), and {why}")


def to_device(members: Sequence[Member], device: torch.device) -> None:
    """Move members that were built for the CPU to this device; their data is moved once."""
    pool = Pool(device)
    for member in members:
        member.device = device
        member.data = open_data(pool, member.job, "data")
        member.val = open_data(pool, member.job, "val") if member.val is not None else None
    join_data(members)


def run_guarded(
    members: Sequence[Member],
    device: torch.device,
    build: Build,
    make: Make,
    requeue: Requeue,
    notify: Listener,
    *,
    wait_for_end: bool = True,
) -> tuple[list[Part], dict[str, Any]]:
    """Train members that were built for the CPU on a GPU, in a child process, and return the plan's parts and the
    environment.

    Args:
        wait_for_end: Whether to wait until the process that has trained them is gone, which takes a tenth of a second.
            Needed where another call may open the same folder, whose lock the process shares.

    Raises:
        NotGuarded: Before anything has happened.
    """

    def make_in_child(share: Sequence[Member], parent: ParentHandle) -> Run:
        with timed("data"):
            to_device(share, device)
        before_turn = partial(parent.send, "targets")
        run = make(share, build(share), parent.notify, before_turn=before_turn)
        parent.send("environment", environment(device))
        return run

    for _ in range(MOST_LOSSES):
        alive = [member for member in members if member.status == "running"]
        if not alive:
            return [], {}
        child = Guarded(alive, device, make_in_child, requeue, wait_for_end=wait_for_end)
        _train_in(child, notify)
        if child.lost is None:
            return child.parts, child.environment
        remaining = [member for member in alive if member.status == "running"]
        for member in remaining:
            requeue(member)
        _end_failing_member(remaining, child, notify)
    raise ShoalError(f"the GPU was lost {MOST_LOSSES} times")


def _train_in(child: Guarded, notify: Listener) -> None:
    """Train in this child until it ends or the context is lost."""
    try:
        if not child.start():
            raise NotGuarded
        try:
            child.drain_messages(notify, wait=True)
        except KeyboardInterrupt:
            child.cancel()
            child.drain_messages(notify, wait=True)
            raise
    finally:
        child.close()


def _end_failing_member(members: Sequence[Member], child: Guarded, notify: Listener) -> None:
    """Find the member with which this child has lost the context, and end it as failed."""
    member = find_failing_member(members, child.device, child.targets)
    if member is None:
        raise ShoalError(
            f"the GPU was lost ({child.lost}) and no job alone causes it; checkpoints are "
            "saved: run the same command again"
        )
    member.status, member.error = "failed", child.lost
    notify(new_event("leave", member, status="failed", error=member.error, steps=member.step, seconds=member.seconds))
    notify(new_event("note", member, text="it cost the device's context; the others continue from their checkpoints"))


class Guarded(WorkerHandle):
    """The child process that trains on a GPU, as its parent sees it."""

    on_device = True
    _ending: ClassVar[list[threading.Thread]] = []
    """Threads that wait for processes which are done."""

    def __init__(
        self,
        members: Sequence[Member],
        device: torch.device,
        make: Callable[[Sequence[Member], ParentHandle], Run],
        requeue: Requeue,
        *,
        wait_for_end: bool = True,
    ) -> None:
        super().__init__(members, make, requeue)
        self.device, self._wait_for_end = device, wait_for_end
        self.lost: str | None = None
        """The error with which the context was lost; None if it was not."""
        self.targets: dict[int, int] = {}
        """For each member, the most batches that it may have trained when the context was lost."""
        self.environment: dict[str, Any] = {}

    def start(self) -> bool:
        for thread in self._ending:  # their memory is free once they are gone
            thread.join()
        self._ending.clear()
        return super().start()

    def close(self) -> None:
        if self._wait_for_end or not self._done or self.lost is not None:
            super().close()
            return
        self._ending.append(threading.Thread(target=super().close, daemon=True))
        self._ending[-1].start()

    def _prepare(self, members: Sequence[Member], parent: ParentHandle) -> Callable[[], Run]:
        self.check()
        return partial(self._make, members, parent)  # on a GPU this takes long, so it is not part of the start

    def check(self) -> None:
        """Raise if the parent has used the driver, since no child can use the GPU then, or has trained on a CPU."""
        current().seconds = {}  # count only the times of this process
        with timed("device"):
            if self.device.type == "cuda":
                start_while_loading(self.device)
                torch.zeros(1, device=self.device)
                torch.cuda.set_device(self.device)  # streams and graphs are made on the current device
            super().check()

    def finish(self, parent: ParentHandle) -> None:
        parent.send("times", current().seconds)

    def fail(self, error: Exception, parent: ParentHandle) -> None:
        if context_lost(error):
            parent.send("lost", describe(error))
            os._exit(3)  # any clean-up would use the device
        super().fail(error, parent)

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


def find_failing_member(members: Sequence[Member], device: torch.device, targets: dict[int, int]) -> Member | None:
    """Return the member that loses the context when each trains by itself, from its checkpoint to where it may have
    been."""
    suspects = {member.index: member for member in members if targets.get(member.index, 0) > member.batches}
    child = Child(partial(_try_each, list(suspects.values()), device, targets))
    trying: int | None = None
    try:
        while True:
            message = child.pipe.recv()
            if message == "none":
                return None
            trying = message
    except (EOFError, OSError):
        return None if trying is None else suspects[trying]
    finally:
        child.wait()
        child.close()


def _try_each(members: Sequence[Member], device: torch.device, targets: dict[int, int], pipe: Connection) -> None:
    """Run in the child: train each member by itself, and exit if it loses the context."""
    to_device(members, device)
    for member in members:
        pipe.send(member.index)
        try:
            _train_alone(member, targets[member.index])
        except Exception as error:
            if context_lost(error.cause if isinstance(error, MemberError) else error):
                os._exit(3)
    pipe.send("none")


def _train_alone(member: Member, target: int) -> None:
    """Train one member by itself up to batch `target`."""
    unit = SerialUnit(member)
    while member.batches < target:
        assign_rows([member])
        unit.run(1)
        if member.device.type == "cuda":
            torch.cuda.synchronize()
        if member.place == member.num_batches:
            member.epoch += 1
            member.close_epoch()
