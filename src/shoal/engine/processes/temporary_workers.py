"""Use all cores of a CPU in a run with a supervisor: some members train in forked processes for a few seconds.

The supervisor decides in this process which members continue, from all of their values, so members cannot be assigned
once for the whole run. A worker gets some members in their current state, trains each until it pauses or ends, or until
its time is over, and sends them back. Then those that continue are assigned again, by their work before the next pause.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from shoal.engine.members.member import Member
from shoal.engine.planning.planner import Part
from shoal.engine.processes.parent import ParentHandle, take
from shoal.engine.processes.sharing import Piece, even_shares, free_cores, kinds_of, load, movable, weight
from shoal.engine.processes.workers import MakeRun, WorkerHandle
from shoal.engine.runtime.commands import Supervisor
from shoal.engine.runtime.planning_context import PlanningContext
from shoal.reporting.events import Listener, new_event

if TYPE_CHECKING:
    from shoal.engine.runtime.run import Run

ROUND_SECONDS = 0.25
"""The length of a round while members train in other processes: an idle worker waits no longer for more."""
LEAST_SECONDS = 0.3
"""The fewest seconds of work for which a process is started."""
HALF = 0.7
"""A stack is halved only if half of it takes at most this share of its work."""
SLICE_SECONDS, OVERHEAD = 5.0, 0.05
"""A worker's time is at least `SLICE_SECONDS`; longer if starting it and getting its members back took more than this
share."""
BUSY_SECONDS, LOOK_SECONDS = 1.0, 10.0
"""If only this core is free, the number of free cores is measured again after `BUSY_SECONDS`, and then after twice as
long each time, up to `LOOK_SECONDS`; otherwise after `LOOK_SECONDS`. The load of the machine changes."""


def run_with_temporary_workers(
    members: Sequence[Member],
    planning: PlanningContext,
    count: int,
    make: MakeRun,
    notify: Listener,
    supervisor: Supervisor,
    all_members: list[Member],
) -> None:
    """Train these members in `count` processes, including this one, in which the supervisor decides."""
    workers = TemporaryWorkers(supervisor, planning, count, make, notify)
    planning.budget /= count
    planning.executor.most_threads = 0
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in each worker; more would take their cores
    try:
        run = make(members, notify, numbers=workers.numbers(0), all_members=all_members, supervisor=workers)
        run.turn_seconds = min(run.turn_seconds, ROUND_SECONDS)
        try:
            run.go()
        except KeyboardInterrupt:
            workers.cancel()
            raise
    finally:
        torch.set_num_threads(threads)
        workers.close()


class TemporaryWorkers:
    """A run's supervisor that also gives some of its members to worker processes, for a few seconds each."""

    def __init__(
        self, supervisor: Supervisor, planning: PlanningContext, count: int, make: MakeRun, notify: Listener
    ) -> None:
        self._supervisor, self._planning, self._count = supervisor, planning, count
        self._make, self._notify = make, notify
        self._workers: list[TemporaryWorker] = []
        self._slice = SLICE_SECONDS
        self._usable, self._look_at, self._busy = count, 0.0, BUSY_SECONDS
        self._numbers = [itertools.count(1 + process_number, count) for process_number in range(count)]

    def numbers(self, process_number: int) -> Any:
        """Return numbers for the units of one of the processes."""
        return self._numbers[process_number]

    def update(self, run: Run) -> None:
        """Take back members whose workers are done, let the supervisor decide, and give members to workers."""
        self._take_back(run, wait=False)
        self._supervisor.update(run)
        while self._workers and not _in_training(run):
            for worker in self._workers:
                worker.recall()
            self._take_back(run, wait=True)
            self._supervisor.update(run)
        self._assign(run)

    def _take_back(self, run: Run, *, wait: bool) -> None:
        for worker in list(self._workers):
            start = time.perf_counter()
            worker.drain_messages(self._notify, wait=wait)
            returned, worker.returned = worker.returned, []
            for member in returned:
                if member.status == "running":
                    _continue(run, member)
            if worker.done:
                worker.close()
                self._workers.remove(worker)
                _merge(self._planning.plan.parts, worker.parts)
                overhead = worker.start_seconds + time.perf_counter() - start
                self._slice = max(SLICE_SECONDS, overhead / OVERHEAD)

    def _assign(self, run: Run) -> None:
        """Assign members that train here to other processes, if there is enough work for them."""
        free = self._count - 1 - len(self._workers)
        pieces = _pieces(run) if free > 0 else []
        if sum(piece.weight for piece in pieces) < 2 * LEAST_SECONDS or not self._shares(pieces, free):
            return
        free = min(free, self._free_cores() - 1 - len(self._workers))
        for share in self._shares(pieces, free) if free > 0 else ():
            self._start(run, [member for piece in share for member in piece.members])

    def _shares(self, pieces: list[Piece], free: int) -> list[list[Piece]]:
        """Return the shares of so many other processes; shares that are not worth a process are left out."""
        shares = even_shares(pieces, self._planning, free + 1, most=HALF)[1:]
        return [share for share in shares if share and load(share) >= LEAST_SECONDS]

    def _free_cores(self) -> int:
        """Return the number of cores for this process and its workers; measured while there are no workers."""
        now = time.monotonic()
        if not self._workers and now >= self._look_at and "SHOAL_WORKERS" not in os.environ:
            self._usable = max(1, round(free_cores(self._count)))
            self._busy = BUSY_SECONDS if self._usable > 1 else min(2 * self._busy, LOOK_SECONDS)
            self._look_at = now + (LOOK_SECONDS if self._usable > 1 else self._busy)
        return min(self._count, self._usable)

    def _start(self, run: Run, members: list[Member]) -> None:
        assigned = run.take_out({member.index for member in members}, "sharing")
        for member in assigned:
            run.checkpointing.forget(member)  # the worker saves it
        if run.folder is not None:
            run.folder.flush()
        process_number = next(
            p for p in range(1, self._count) if all(worker.process_number != p for worker in self._workers)
        )
        worker = TemporaryWorker(assigned, partial(self._make_in_worker, process_number), process_number)
        if worker.start():
            self._workers.append(worker)
            return
        self._notify(new_event("note", text=f"a worker process could not begin: {worker.problem}; its jobs train here"))
        self._count = 1 + len(self._workers)
        for member in assigned:
            _continue(run, member)

    def _make_in_worker(self, process_number: int, share: Sequence[Member], parent: ParentHandle) -> Run:
        self._planning.plan.parts = []
        supervisor = ReturningSupervisor(parent, time.monotonic() + self._slice)
        signal.signal(signal.SIGUSR1, lambda number, frame: supervisor.stop())
        run = self._make(share, parent.notify, numbers=self._numbers[process_number], supervisor=supervisor)
        run.turn_seconds = min(run.turn_seconds, ROUND_SECONDS)
        return run

    def cancel(self) -> None:
        """Make all workers save their members now, and stop."""
        for worker in self._workers:
            worker.cancel()
        for worker in self._workers:
            worker.drain_messages(self._notify, wait=True)

    def close(self) -> None:
        """End the processes that have not ended."""
        for worker in self._workers:
            worker.close()


class TemporaryWorker(WorkerHandle):
    """A worker that has members for a while, as its parent sees it."""

    def __init__(self, members: Sequence[Member], make: Any, process_number: int) -> None:
        states = {member.index: member.state() for member in members}
        super().__init__(members, make, lambda member: member.load_state(states[member.index]))
        self.process_number = process_number
        self.returned: list[Member] = []
        """Members that the worker has sent back."""
        self.start_seconds = 0.0

    @property
    def done(self) -> bool:
        return self._done

    def start(self) -> bool:
        start = time.perf_counter()
        started = super().start()
        self.start_seconds = time.perf_counter() - start
        return started

    def recall(self) -> None:
        """Make it send all of its members back now."""
        if not self._done and self._child is not None:
            self._child.signal(signal.SIGUSR1)

    def take_message(self, kind: str, *content: Any) -> None:
        if kind == "returned":
            index, state = content
            member = self.members.pop(index)
            take(member, state)
            self.returned.append(member)


class ReturningSupervisor:
    """The supervisor in a worker: it sends members back when they pause, and all of them when the time is over."""

    def __init__(self, parent: ParentHandle, until: float) -> None:
        self._parent, self._until = parent, until

    def stop(self) -> None:
        """Send all members back at the next opportunity."""
        self._until = 0.0

    def update(self, run: Run) -> None:
        time_over = time.monotonic() >= self._until
        leaving = {m.index for m in run.waiting.values() if time_over or m.pausing}
        for runner in run.runners:
            all_leave = time_over and runner.unit.at_step_boundary
            leaving |= {member.index for member in runner.members if all_leave or member.pausing}
        returned = run.take_out(leaving, "sharing")
        if returned:
            run.save()
            if run.folder is not None:
                run.folder.flush()  # before the parent continues to train and save them
            for member in returned:
                self._parent.return_member(member)


def _continue(run: Run, member: Member) -> None:
    """Put a member that comes back into the queue or, if it pauses, let it wait for the supervisor's decision."""
    if member.pausing:
        run.paused[member.index] = member
    else:
        run.put_back([member])


def _in_training(run: Run) -> bool:
    """Return whether members that are not about to pause train or wait here."""
    running = itertools.chain(*(runner.members for runner in run.runners))
    return any(not member.pausing for member in (*running, *run.waiting.values()))


def _pieces(run: Run) -> list[Piece]:
    """Return the units of a run, and what waits for one, with the work of each before its next pause."""
    pieces = []
    for runner in run.runners:
        if any(member.pausing for member in runner.members) or not runner.unit.at_step_boundary:
            continue
        batches = max(member.batches_to_stop for member in runner.members)
        seconds = runner.batch_seconds * batches if runner.batch_seconds else weight(runner.members, run.planning)
        pieces.append(Piece(list(runner.members), seconds, all(movable(m, run.planning) for m in runner.members)))
    waiting = [member for member in run.waiting.values() if not member.pausing]
    for kind in kinds_of(waiting, run.planning):
        measured = [member.seconds / member.batches * member.batches_to_stop for member in kind if member.batches]
        seconds = sum(measured) if len(measured) == len(kind) else weight(kind, run.planning)
        pieces.append(Piece(kind, seconds, movable(kind[0], run.planning)))
    return pieces


def _merge(parts: list[Part], more: Iterable[Part]) -> None:
    """Add a worker's parts to the plan's; those of the same members become one."""
    for part in more:
        same = (p for p in parts if p.tier == part.tier and set(p.members) == set(part.members))
        existing = next(same, None)
        if existing is None:
            parts.append(part)
        elif "steps" in part.measured:
            existing.note(part.measured["seconds"], int(part.measured["steps"]))
