"""The cores of a CPU, each with its own share of the members: forked processes that read the same data.

Python lets one thread run at a time, and a step of a small network is mostly Python; a forked process has an
interpreter of its own and sees the parent's data without a copy. Every worker is a run of its own, with one torch
thread: it saves its members itself, tells what happens, and sends members back whole as they leave. A member's bits do
not depend on the split. A worker that dies takes only its members with it.

Members whose step could not be traced stay in the calling process: their Python may have effects that somebody is
waiting for. So do streams, whose reading threads do not survive a fork.
"""

from __future__ import annotations

import itertools
import os
import pickle
import queue
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from time import perf_counter, process_time
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from shoal.engine.members.member import Member
from shoal.engine.planning.planner import Part, predict
from shoal.engine.runtime.planning_context import PlanningContext
from shoal.engine.runtime.processes import Line, ending, forget, fork, take
from shoal.engine.runtime.run import Run
from shoal.errors import describe
from shoal.reporting.events import Event, Wire, happened

WORTH_SECONDS = 2.0
"""Predicted work from which other processes are asked to help."""
EVEN = 1.1
"""The busiest process's share of the work, over the mean, up to which no stack is cut."""
SPIN_SECONDS = 0.1
READY_SECONDS = 20.0
"""A worker that has not answered by then is stuck in something it inherited, and its units run here."""

HANG_UP_SECONDS = 20.0
"""For a worker's last words to be read; a pipe that somebody else holds open is left open."""


def usable_cores() -> int:
    """Cores this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def workers_for(threads: int | None, device: torch.device, seconds: float) -> int:
    """How many processes a run of so many predicted seconds is worth.

    `threads=None` leaves it to us: one process for each core that is free, whatever torch's own thread count. A number
    keeps everything in this process, with so many torch threads. SHOAL_WORKERS overrides both.
    """
    if device.type != "cpu" or not hasattr(os, "fork"):
        return 1
    told = os.environ.get("SHOAL_WORKERS", "")
    if told and not (told.isdigit() and int(told) > 0):
        raise ValueError(f"SHOAL_WORKERS is {told!r}; set it to a whole number, 1 or more, or not at all")
    if told:
        return int(told)
    if threads is not None or seconds < WORTH_SECONDS:
        return 1
    cores = usable_cores()
    return min(cores, max(1, round(free_cores(cores)))) if cores > 1 else 1


def free_cores(count: int) -> float:
    """How many of so many cores we really get: others may be at work on them, or a quota may hold us back.

    So many processes count for a moment; what each got of a core is added up. On a busy core a worker would only make
    the others wait for it.
    """
    handles = []
    with suppress(OSError):  # no more processes may be had
        for _ in range(count):
            handles.append(fork(_spin))
    total = 0.0
    for pid, pipe in handles:
        with suppress(EOFError):
            total += pipe.recv()
        forget(pipe)
        os.waitpid(pid, 0)
    return total


def _spin(pipe: Connection) -> None:
    start, used = perf_counter(), process_time()
    while perf_counter() < start + SPIN_SECONDS:
        pass
    pipe.send((process_time() - used) / (perf_counter() - start))


def movable(member: Member, planning: PlanningContext) -> bool:
    """Whether a member may train in another process."""
    return member.index in planning.recipes and not member.data.source.streamed


def deal(members: Sequence[Member], planning: PlanningContext, count: int) -> list[list[Member]]:
    """Members dealt out to `count` processes, the first of which is this one.

    Stacks stay whole where that gives the processes equal work, and are halved, the largest first, where it does not.
    """
    pieces = [_Piece(kind, _weight(kind, planning), movable(kind[0], planning)) for kind in _kinds(members, planning)]
    while True:
        shares = _dealt(pieces, count)
        busiest = max(shares, key=_load)
        cut = max((p for p in busiest if p.movable and len(p.members) >= 4), key=lambda p: p.weight, default=None)
        if cut is None or _load(busiest) <= EVEN * sum(p.weight for p in pieces) / count:
            break
        pieces.remove(cut)
        pieces += [_Piece(half, _weight(half, planning), True) for half in (cut.members[::2], cut.members[1::2])]
    return [sorted((m for piece in share for m in piece.members), key=lambda m: m.index) for share in shares]


@dataclass(slots=True, eq=False)
class _Piece:
    """Members that go to one process together."""

    members: list[Member]
    weight: float
    movable: bool


def _load(share: list[_Piece]) -> float:
    return sum(piece.weight for piece in share)


def _dealt(pieces: list[_Piece], count: int) -> list[list[_Piece]]:
    """The heaviest first, each to whom has the least; what cannot be moved stays here."""
    shares: list[list[_Piece]] = [[] for _ in range(count)]
    for piece in sorted(pieces, key=lambda own: (own.movable, -own.weight)):
        (min(shares, key=_load) if piece.movable else shares[0]).append(piece)
    return shares


def _kinds(members: Sequence[Member], planning: PlanningContext) -> list[list[Member]]:
    """Members that could be one stack; the others by themselves."""
    kinds: dict[object, list[Member]] = {}
    for member in members:
        request = planning.request(member)
        alone = request.tier == "serial" or not movable(member, planning)
        kinds.setdefault(member.index if alone else request.key, []).append(member)
    return list(kinds.values())


def _weight(members: Sequence[Member], planning: PlanningContext) -> float:
    """Seconds of work left in members of one kind, as far as can be said beforehand.

    A step is taken to cost something by itself and something for each member; those with less to do leave earlier.
    """
    batches = [member.batches_left for member in members]
    timed = [member for member in members if _step_seconds([member], planning) is not None]
    if not timed:
        return sum(n * _least_seconds(member) for n, member in zip(batches, members, strict=True))
    count, some = len(timed), timed[: max(1, len(timed) // 2)]
    whole, half = (_step_seconds(own, planning) or 0.0 for own in (timed, some))
    each = max(0.0, whole - half) / max(1, count - len(some))
    return max(0.0, whole - each * count) * max(batches) + each * sum(batches)


def _step_seconds(members: Sequence[Member], planning: PlanningContext) -> float | None:
    return predict(list(map(planning.request, members))).get("step_seconds")


def predicted_seconds(planning: PlanningContext, members: Sequence[Member]) -> float:
    """What these members take in one process: from timed steps, else from the size of the networks (too little rather
    than too much)."""
    return sum(_weight(kind, planning) for kind in _kinds(members, planning))


def _least_seconds(member: Member) -> float:
    """A step at 20 GFLOP/s, every weight used once a row."""
    weights = sum(p.numel() for p in member.model.parameters() if not is_lazy(p))
    return 6e0 * weights * member.job.batch_size / 2e10


MakeRun = Callable[[Sequence[Member], Callable[[Event], None]], Run]
"""A run of some of the members, which tells what happens."""


def run_shared(
    members: Sequence[Member],
    planning: PlanningContext,
    count: int,
    make: MakeRun,
    tell: Callable[[Event], None],
    everybody: list[Member] | None = None,
) -> None:
    """Train these members in `count` processes, this one included; those that come later are added to `everybody`."""
    own, *others = deal(members, planning, count) if count > 1 else [list(members)]
    planning.budget /= max(1, count)
    handles = [
        WorkerHandle(share, planning, make, (1 + place, count)) for place, share in enumerate(others, 1) if share
    ]
    threads = torch.get_num_threads()
    try:
        for worker in handles:
            if not worker.start():
                own += worker.members.values()
                tell(happened("note", text=f"a worker process could not begin: {worker.problem}; its jobs train here"))
        alive = [worker for worker in handles if worker.started]
        if alive:
            torch.set_num_threads(1)  # as each of them has: more would take their cores
        mine = make(own, tell)
        mine.numbers = itertools.count(1, count)
        mine.between = partial(_settle, alive, tell)
        mine.everybody = everybody if everybody is not None else list(members)
        try:
            mine.go()
            for worker in alive:
                worker.drain_messages(tell, wait=True)
        except KeyboardInterrupt:
            for worker in alive:
                worker.cancel()
            for worker in alive:
                worker.drain_messages(tell, wait=True)
            raise
    finally:
        torch.set_num_threads(threads)
        for worker in handles:
            worker.close()


def _settle(handles: list[WorkerHandle], tell: Callable[[Event], None]) -> None:
    for worker in handles:
        worker.drain_messages(tell, wait=False)


class WorkerHandle:
    """One worker process, as its parent sees it."""

    def __init__(
        self, members: Sequence[Member], planning: PlanningContext, make: MakeRun, numbers: tuple[int, int] = (1, 1)
    ) -> None:
        self._numbers = numbers
        self.members = {member.index: member for member in members}
        self._all = dict(self.members)
        self._planning, self._make = planning, make
        self.started = False
        self.problem = ""
        """Why it could not begin."""
        self.pid = 0
        self._pipe: Connection | None = None
        self._listener: threading.Thread | None = None
        self._done = False
        self._again = False
        self._inbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def body(self, members: Sequence[Member], pipe: Connection) -> None:
        """The worker's life."""
        _train(members, self._planning, self._make, Line(pipe), self._numbers)

    def requeue(self, member: Member) -> None:
        """To where it was last saved, or to its beginning."""
        self._planning.requeue(member)

    def start(self) -> bool:
        """Fork; whether the worker is up and can train."""
        share = list(self.members.values())
        try:
            self.pid, self._pipe = fork(partial(self.body, share))
        except OSError as error:
            self.problem = describe(error)
            return False
        self._listener = threading.Thread(target=self._listen, args=(self._pipe, self._inbox), daemon=True)
        self._listener.start()
        try:
            message = self._inbox.get(timeout=READY_SECONDS)
            kind, *content = pickle.loads(message) if message is not None else ("cannot", "it ended without a word")
        except queue.Empty:
            kind, content = "cannot", [f"it did not answer within {READY_SECONDS:.0f} seconds"]
        self.started = kind == "ready"
        if not self.started:
            self.problem = str(content[0]) if content else str(kind)
            self.close()
        return self.started

    def _listen(self, pipe: Connection, inbox: queue.SimpleQueue[bytes | None]) -> None:
        """Take in what the worker says as it says it: a worker must not wait for its parent's own training."""
        try:
            while True:
                inbox.put(pipe.recv_bytes())
        except (EOFError, OSError):
            inbox.put(None)

    def drain_messages(self, tell: Callable[[Event], None], *, wait: bool) -> None:
        """Carry what has come from the worker into the members; with `wait`, until it is done."""
        while not self._done:
            try:
                message = self._inbox.get(block=wait)
            except queue.Empty:
                return
            if message is None:
                if self._lost(tell):
                    continue
                return
            kind, *content = pickle.loads(message)
            if kind == "done":
                self._done = True
                self.parts(content[0])
            elif kind == "raised":
                self._done = True
                raise content[0]
            elif kind == "event":
                self._hear(content[0], content[1], tell)
            else:
                self.heard(kind, content)

    def parts(self, parts: list[Part]) -> None:
        """Take in the worker's plan, with what was measured."""
        self._planning.plan.parts += parts

    def heard(self, kind: str, content: list[Any]) -> None:
        """Something else was said."""

    def _hear(self, wire: Wire, state: dict[str, Any] | None, tell: Callable[[Event], None]) -> None:
        event = Event.from_wire(wire, self._all)
        if event.member is not None and state is not None:
            take(event.member, state)
            if event.member.status != "running":
                self.members.pop(event.member.index, None)
        tell(event)

    def _lost(self, tell: Callable[[Event], None]) -> bool:
        """The worker is gone without a word. Another one has its members go on, once; whether there is one."""
        how = ending(self._reap())
        self._hang_up()
        if not self._again:
            self._again = True
            for member in self.members.values():
                self.requeue(member)
                tell(happened("note", member, text=f"its worker process {how}; it goes on in another one"))
            self._inbox = queue.SimpleQueue()
            if self.start():
                return True
        self._done = True
        for member in self.members.values():
            member.status, member.error = "failed", f"its worker process {how}, twice; train it again"
            tell(happened("leave", member, status="failed", error=member.error, steps=member.step, seconds=0.0))
        self.members = {}
        return False

    def cancel(self) -> None:
        """Ask the worker to stop where it is and send its members back."""
        if not self._done and self.pid:
            os.kill(self.pid, signal.SIGTERM)

    def _reap(self) -> int:
        pid, self.pid = self.pid, 0
        return os.waitpid(pid, 0)[1] if pid else 0

    def close(self) -> None:
        """End the process, if it has not ended by itself."""
        if self.pid:
            if not self._done:
                os.kill(self.pid, signal.SIGKILL)
            self._reap()
        self._hang_up()

    def _hang_up(self) -> None:
        """Close the pipe to a worker that has ended, once nobody reads from it any more: the next pipe may get its
        number, and a reader that is late would take what is said there."""
        if self._listener is not None:
            self._listener.join(HANG_UP_SECONDS)  # it reads up to the end, which is there
            if self._listener.is_alive():
                return
        if self._pipe is not None:
            forget(self._pipe)


def _train(
    members: Sequence[Member], planning: PlanningContext, make: MakeRun, line: Line, numbers: tuple[int, int]
) -> None:
    """Train, tell, send members back."""
    try:
        x = torch.ones(1, requires_grad=True)
        x.sum().backward()  # type: ignore[no-untyped-call]  # raises where autograd's threads were lost in the fork
        planning.plan.parts = []
        run = make(members, line.tell)
        run.numbers = itertools.count(*numbers)
        signal.signal(signal.SIGTERM, lambda number, frame: run.interrupt())
    except Exception as error:
        line.send("cannot", describe(error))
        return
    line.send("ready")
    try:
        run.go()
    except KeyboardInterrupt:
        pass
    except Exception as error:
        line.raised(error)
        return
    line.send("done", planning.plan.parts)
