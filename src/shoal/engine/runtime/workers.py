"""The cores of a CPU, each with its own share of the members: forked processes that read the same data.

Python lets one thread run at a time, and a step of a small network is mostly Python; a forked process has an
interpreter of its own and sees the parent's data without a copy. Every worker is a run of its own, with one torch
thread: it saves its members itself, sends its events, and sends members back whole as they leave. A member's bits do
not depend on how members are shared. A worker that dies takes only its members with it.
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
from shoal.engine.runtime._messages import Message, receive
from shoal.engine.runtime.planning_context import PlanningContext
from shoal.engine.runtime.processes import Child, Line, take
from shoal.engine.runtime.run import Run
from shoal.engine.runtime.sharing import deal
from shoal.errors import describe
from shoal.reporting.events import Event, Wire, happened

READY_SECONDS = 20.0
"""A worker that has not answered by then is stuck in something it inherited, and its units run here."""
READER_SECONDS = 20.0
"""For a worker's last messages to be read; a pipe that another process holds open is left open."""

Tell = Callable[[Event], None]
Requeue = Callable[[Member], None]
"""Puts a member that was lost back to where it was last saved, or to its beginning."""
MakeRun = Callable[..., Run]
"""Makes a run, given its members, `tell` and settings of `Run` by name."""


def run_shared(
    members: Sequence[Member],
    planning: PlanningContext,
    count: int,
    make: MakeRun,
    tell: Tell,
    *,
    all_members: list[Member] | None = None,
    requeue: Requeue = beginning,
) -> None:
    """Train these members in `count` processes, this one included; those that come later are added to `all_members`."""
    ours, *others = deal(members, planning, count) if count > 1 else [list(members)]
    planning.budget /= max(1, count)
    if any(others):
        planning.executor.most_threads = 0

    def make_in_child(place: int, share: Sequence[Member], line: Line) -> Run:
        planning.plan.parts = []
        return make(share, line.tell, numbers=itertools.count(1 + place, count))

    workers = [
        WorkerHandle(share, partial(make_in_child, place), requeue) for place, share in enumerate(others, 1) if share
    ]
    threads = torch.get_num_threads()
    try:
        for worker in workers:
            if not worker.start():
                ours += worker.members.values()
                tell(happened("note", text=f"a worker process could not begin: {worker.problem}; its jobs train here"))
        alive = [worker for worker in workers if worker.started]
        if alive:
            torch.set_num_threads(1)  # as each of them has: more would take their cores

        def drain(*, wait: bool) -> None:
            for worker in alive:
                worker.drain_messages(tell, wait=wait)

        run = make(
            ours, tell, numbers=itertools.count(1, count), between=partial(drain, wait=False),
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
    """One worker process, as its parent sees it."""

    def __init__(
        self, members: Sequence[Member], make: Callable[[Sequence[Member], Line], Run], requeue: Requeue
    ) -> None:
        """`make` is called in the worker."""
        self.members = {member.index: member for member in members}
        self._all = dict(self.members)
        self._make, self._requeue = make, requeue
        self.started = False
        self.problem = ""
        """Why it could not begin."""
        self.parts: list[Part] = []
        """Its plan, with what was measured; known when it is done."""
        self._child: Child | None = None
        self._reader: threading.Thread | None = None
        self._done = False
        self._cancelled = False
        self._restarted = False
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()

    # --- in the worker ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise where this process cannot train."""
        x = torch.ones(1, requires_grad=True)
        x.sum().backward()  # type: ignore[no-untyped-call]  # raises where autograd's threads were lost in the fork

    def finish(self, line: Line) -> None:
        """The run is over: send what else is to be known."""

    def fail(self, error: Exception, line: Line) -> None:
        """The run has raised."""
        line.raised(error)

    def _prepare(self, members: Sequence[Member], line: Line) -> Callable[[], Run]:
        """Do what must succeed before the parent counts on this worker; return how to get its run."""
        self.check()
        run = self._make(members, line)
        return lambda: run

    def _live(self, pipe: Connection) -> None:
        """Train, send events, send members back."""
        line, members = Line(pipe), list(self.members.values())
        try:
            make_run = self._prepare(members, line)
        except Exception as error:
            line.send("cannot", describe(error))
            return
        line.send("ready")
        try:
            run = make_run()
            signal.signal(signal.SIGTERM, lambda number, frame: run.interrupt())
            try:
                with suppress(KeyboardInterrupt):
                    run.go()
            finally:
                for member in run.members.values():
                    member.data.source.close()
            self.finish(line)
            line.send("done", run.planning.plan.parts)
        except Exception as error:
            self.fail(error, line)

    # --- in its parent ----------------------------------------------------------------------------------------------

    def start(self) -> bool:
        """Fork; whether the worker is up and can train."""
        try:
            self._child = Child(self._live)
        except OSError as error:
            self.problem = describe(error)
            return False
        self._reader = threading.Thread(target=self._read, args=(self._child.pipe, self._inbox), daemon=True)
        self._reader.start()
        try:
            message = self._inbox.get(timeout=READY_SECONDS)
            kind, *content = message.load() if message is not None else ("cannot", "it ended without a word")
        except queue.Empty:
            kind, content = "cannot", [f"it did not answer within {READY_SECONDS:.0f} seconds"]
        self.started = kind == "ready"
        if not self.started:
            self.problem = str(content[0]) if content else str(kind)
            self.close()
        return self.started

    def _read(self, pipe: Connection, inbox: queue.SimpleQueue[Message | None]) -> None:
        """Read messages as they come: a worker must not wait for its parent's own training."""
        try:
            while True:
                inbox.put(receive(pipe))
        except (EOFError, OSError):
            inbox.put(None)

    def drain_messages(self, tell: Tell, *, wait: bool) -> None:
        """Carry what has come from the worker into the members; with `wait`, until it is done."""
        while not self._done:
            try:
                message = self._inbox.get(block=wait)
            except queue.Empty:
                return
            if message is None:
                self._lost(tell)
                continue
            kind, *content = message.load()
            if kind == "event":
                self._take_event(content[0], content[1], tell)
            elif kind == "raised":
                self._done = True
                raise content[0]
            elif kind == "done":
                self._done, self.parts = True, content[0]
            else:
                self.take_message(kind, *content)

    def take_message(self, kind: str, *content: Any) -> None:
        """Take in a message of another kind."""

    def _take_event(self, wire: Wire, state: dict[str, Any] | None, tell: Tell) -> None:
        event = Event.from_wire(wire, self._all)
        if event.member is not None and state is not None:
            take(event.member, state)
            if event.member.status != "running":
                self.members.pop(event.member.index, None)
        tell(event)

    def _lost(self, tell: Tell) -> None:
        """The worker has ended without a word. Another one trains its members, once, unless they were cancelled."""
        how = self._release()
        if not self._restarted and not self._cancelled:
            self._restarted = True
            for member in self.members.values():
                self._requeue(member)
                tell(happened("note", member, text=f"its worker process {how}; it continues in another one"))
            self._inbox = queue.SimpleQueue()
            if self.start():
                return
        self._done = True
        status, error = ("cancelled", None) if self._cancelled else ("failed", f"its worker process {how}, twice")
        for member in self.members.values():
            member.status, member.error = status, error and f"{error}; train it again"
            tell(happened("leave", member, status=status, error=member.error, steps=member.step, seconds=0.0))
        self.members = {}

    def cancel(self) -> None:
        """Ask the worker to stop where it is and send its members back."""
        self._cancelled = True
        if not self._done and self._child is not None:
            self._child.signal(signal.SIGTERM)

    def close(self) -> None:
        """End the process, if it has not ended by itself."""
        if self._child is not None and not self._done:
            self._child.signal(signal.SIGKILL)
        self._release()

    def _release(self) -> str:
        """Wait for the process's end, and close the pipe once its reader has ended: the next pipe may get its
        number, and a reader that is late would take what is sent there. Returns how the process ended."""
        if self._child is None:
            return ""
        child, self._child = self._child, None
        how = child.wait()
        if self._reader is not None:
            self._reader.join(READER_SECONDS)  # it reads up to the end, which is there
        if self._reader is None or not self._reader.is_alive():
            child.close()
        return how
