"""Train on all cores of a CPU: forked processes, each with its share of the members, read the same data.

Python runs one thread at a time, and a step of a small network is mostly Python. A forked process has its own
interpreter and shares the parent's data without a copy. Every worker is a run of its own with one torch thread: it
saves its members, sends its events, and sends members back as they leave. A member's bits do not depend on how members
are shared. If a worker dies, only its members are affected.
"""

from __future__ import annotations

import itertools
import queue
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from shoal.engine.members.member import Member
from shoal.engine.members.resuming import beginning
from shoal.engine.planning.planner import Part
from shoal.engine.processes._messages import Message, receive
from shoal.engine.processes.child import Child
from shoal.engine.processes.parent import ParentHandle, take
from shoal.engine.processes.sharing import assign_members
from shoal.engine.runtime.planning_context import PlanningContext
from shoal.engine.runtime.run import Run
from shoal.errors import describe
from shoal.reporting.events import Event, Listener, Wire, new_event

READY_SECONDS = 20.0
"""If a worker has not answered after so many seconds, something that it inherited, such as a lock, blocks it, and its
members train in this process."""
READER_SECONDS = 20.0
"""How long to wait until a worker's last messages are read. If another process has the pipe open, it has no end."""

Requeue = Callable[[Member], None]
"""Resets a member that was lost to its last checkpoint, or to its beginning."""
MakeRun = Callable[..., Run]
"""Creates a run from its members, `notify`, and settings of `Run` by name."""


def run_shared(
    members: Sequence[Member],
    planning: PlanningContext,
    count: int,
    make: MakeRun,
    notify: Listener,
    *,
    all_members: list[Member] | None = None,
    requeue: Requeue = beginning,
) -> None:
    """Train these members in `count` processes, including this one. Members that are added later go to
    `all_members`."""
    own_members, *other_shares = assign_members(members, planning, count) if count > 1 else [list(members)]
    planning.budget /= max(1, count)
    if any(other_shares):
        planning.executor.most_threads = 0

    def make_in_child(number: int, share: Sequence[Member], parent: ParentHandle) -> Run:
        planning.plan.parts = []
        return make(share, parent.notify, numbers=itertools.count(1 + number, count))

    workers = [
        WorkerHandle(share, partial(make_in_child, number), requeue)
        for number, share in enumerate(other_shares, 1)
        if share
    ]
    threads = torch.get_num_threads()
    try:
        for worker in workers:
            if not worker.start():
                own_members += worker.members.values()
                notify(
                    new_event("note", text=f"a worker process could not begin: {worker.problem}; its jobs train here")
                )
        alive = [worker for worker in workers if worker.started]
        if alive:
            torch.set_num_threads(1)  # as in each worker; more would take their cores

        def drain(*, wait: bool) -> None:
            for worker in alive:
                worker.drain_messages(notify, wait=wait)

        run = make(
            own_members, notify, numbers=itertools.count(1, count), between=partial(drain, wait=False),
            all_members=list(members) if all_members is None else all_members,
        )  # fmt: skip
        try:
            run.go()
            drain(wait=True)
        except KeyboardInterrupt:
            for worker in alive:
                worker.cancel()
            drain(wait=True)
            raise
    finally:
        torch.set_num_threads(threads)
        for worker in workers:
            worker.close()
            planning.plan.parts += worker.parts


class WorkerHandle:
    """One worker process, as its parent sees it. Some methods run in the worker."""

    on_device = False
    """Whether the worker trains on another device, so that weights which it does not write stay as they were here."""

    def __init__(
        self, members: Sequence[Member], make: Callable[[Sequence[Member], ParentHandle], Run], requeue: Requeue
    ) -> None:
        """Prepare a worker for these members. `make` is called in the worker."""
        self.members = {member.index: member for member in members}
        self._all = dict(self.members)
        self._make, self._requeue = make, requeue
        self.started = False
        self.problem = ""
        """The reason why it could not start."""
        self.parts: list[Part] = []
        """Its part of the plan, with measurements; known when it is done."""
        self._child: Child | None = None
        self._reader: threading.Thread | None = None
        self._done = False
        self._cancelled = False
        self._restarted = False
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()

    # --- in the worker ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise if this process cannot train."""
        x = torch.ones(1, requires_grad=True)
        x.sum().backward()  # type: ignore[no-untyped-call]  # raises if autograd's threads were lost in the fork

    def finish(self, parent: ParentHandle) -> None:
        """Send further results after the run has ended; here there are none."""

    def fail(self, error: Exception, parent: ParentHandle) -> None:
        """Report an exception that ended the run."""
        parent.raised(error)

    def _prepare(self, members: Sequence[Member], parent: ParentHandle) -> Callable[[], Run]:
        """Do what must succeed before the parent relies on this worker, and return a function that makes its run."""
        self.check()
        run = self._make(members, parent)
        return lambda: run

    def _run_in_worker(self, pipe: Connection) -> None:
        """Run in the worker: train, send events, send members back."""
        members = list(self.members.values())
        parent = ParentHandle(pipe, frozen=members if self.on_device else ())
        try:
            make_run = self._prepare(members, parent)
        except Exception as error:
            parent.send("cannot", describe(error))
            return
        parent.send("ready")
        try:
            run = make_run()
            signal.signal(signal.SIGTERM, lambda number, frame: run.interrupt())
            try:
                with suppress(KeyboardInterrupt):
                    run.go()
            finally:
                for member in run.members.values():
                    member.data.source.close()
            self.finish(parent)
            parent.send("done", run.planning.plan.parts)
        except Exception as error:
            self.fail(error, parent)

    # --- in its parent ----------------------------------------------------------------------------------------------

    def start(self) -> bool:
        """Fork, and return whether the worker has started and can train."""
        try:
            self._child = Child(self._run_in_worker)
        except OSError as error:
            self.problem = describe(error)
            return False
        self._reader = threading.Thread(target=self._read, args=(self._child.pipe, self._inbox), daemon=True)
        self._reader.start()
        try:
            message = self._inbox.get(timeout=READY_SECONDS)
            kind, *content = message.load() if message is not None else ("cannot", "it ended without a message")
        except queue.Empty:
            kind, content = "cannot", [f"it did not answer within {READY_SECONDS:.0f} seconds"]
        self.started = kind == "ready"
        if not self.started:
            self.problem = str(content[0]) if content else str(kind)
            self.close()
        return self.started

    def _read(self, pipe: Connection, inbox: queue.SimpleQueue[Message | None]) -> None:
        """Read messages as they come, so that a worker does not wait while its parent trains."""
        try:
            while True:
                inbox.put(receive(pipe))
        except (EOFError, OSError):
            inbox.put(None)

    def drain_messages(self, notify: Listener, *, wait: bool) -> None:
        """Apply messages from the worker to the members; with `wait`, until it is done."""
        while not self._done:
            try:
                message = self._inbox.get(block=wait)
            except queue.Empty:
                return
            if message is None:
                self._lost(notify)
                continue
            kind, *content = message.load()
            if kind == "event":
                self._take_event(content[0], content[1], notify)
            elif kind == "raised":
                self._done = True
                raise content[0]
            elif kind == "done":
                self._done, self.parts = True, content[0]
            else:
                self.take_message(kind, *content)

    def take_message(self, kind: str, *content: Any) -> None:
        """Handle a message of another kind."""

    def _take_event(self, wire: Wire, state: dict[str, Any] | None, notify: Listener) -> None:
        event = Event.from_wire(wire, self._all)
        if event.member is not None and state is not None:
            take(event.member, state)
            if event.member.status != "running":
                self.members.pop(event.member.index, None)
        notify(event)

    def _lost(self, notify: Listener) -> None:
        """Handle a worker that has died. Another one trains its members, once, unless they were cancelled."""
        how = self._release()
        if not self._restarted and not self._cancelled:
            self._restarted = True
            for member in self.members.values():
                self._requeue(member)
                notify(new_event("note", member, text=f"its worker process {how}; it continues in another one"))
            self._inbox = queue.SimpleQueue()
            if self.start():
                return
        self._done = True
        status, error = ("cancelled", None) if self._cancelled else ("failed", f"its worker process {how}, twice")
        for member in self.members.values():
            member.status, member.error = status, error and f"{error}; train it again"
            notify(new_event("leave", member, status=status, error=member.error, steps=member.step, seconds=0.0))
        self.members = {}

    def cancel(self) -> None:
        """Ask the worker to stop now and send its members back."""
        self._cancelled = True
        if not self._done and self._child is not None:
            self._child.signal(signal.SIGTERM)

    def close(self) -> None:
        """Kill the process if it has not ended."""
        if self._child is not None and not self._done:
            self._child.signal(signal.SIGKILL)
        self._release()

    def _release(self) -> str:
        """Wait for the process's end, close the pipe, and return how the process ended.

        The pipe is closed only after its reader has ended: the next pipe may get the same descriptor, and a late reader
        would read its messages.
        """
        if self._child is None:
            return ""
        child, self._child = self._child, None
        how = child.wait()
        if self._reader is not None:
            self._reader.join(READER_SECONDS)  # the process has ended, so the reader reaches the end
        if self._reader is None or not self._reader.is_alive():
            child.close()
        return how
