"""The cores of a CPU, each with its own share of the units: forked processes that read the same data.

Python lets one thread run at a time, and a step of a small network is mostly Python; a forked process has an
interpreter of its own and sees the parent's data without a copy. Every worker trains its units to their ends with one
torch thread, tells of each epoch, and sends members back whole as they leave. A member's bits do not depend on the
split. A worker that dies takes only its members with it.

Members whose step could not be traced stay in the calling process: their Python may have effects that somebody is
waiting for. So do streams, whose reading threads do not survive a fork.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from time import perf_counter, process_time
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from shoal.errors import describe
from shoal.pack.members import Member
from shoal.pack.plan import Plan
from shoal.pack.ride import Watcher
from shoal.pack.run import run
from shoal.pack.unit import Executor, Unit

WORTH_SECONDS = 2.0
"""Predicted work from which other processes are asked to help."""
SPIN_SECONDS = 0.1
READY_SECONDS = 20.0
"""A worker that has not answered by then is stuck in something it inherited, and its units run here."""

_STATE = ("status", "error", "tier", "step", "epoch", "seconds", "batches")
_parents: list[Connection] = []
"""This process's ends of the pipes to its workers; a later worker must not keep them open."""


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
    if told.isdigit() and int(told) > 0:
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
    crew = [fork(_spin) for _ in range(count)]
    total = 0.0
    for pid, pipe in crew:
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


def movable(unit: Unit) -> bool:
    """Whether a unit may train in another process."""
    streamed = any(member.data.source.streamed for member in unit.members)
    return not streamed and (unit.tier == "stacked" or bool(getattr(unit, "traced", False)))


def shares(units: list[Unit], count: int) -> list[list[Unit]]:
    """Units dealt out to `count` workers, the first of which is this process. Large stacks are cut."""
    pieces: list[Unit] = []
    for unit in units:
        cuts = min(count, len(unit.members) // 2) if movable(unit) else 1
        if cuts > 1:
            slots = list(range(len(unit.members)))
            pieces += [unit.keep(slots[i::cuts]) for i in range(cuts)]
        else:
            pieces.append(unit)
    out: list[list[Unit]] = [[] for _ in range(count)]
    loads = [0.0] * count
    for unit in sorted(pieces, key=lambda u: (movable(u), -_weight(u))):
        place = loads.index(min(loads)) if movable(unit) else 0
        out[place].append(unit)
        loads[place] += _weight(unit)
    return out


def _weight(unit: Unit) -> float:
    """Work of a unit, roughly: weights touched over all batches."""
    member = unit.members[0]
    size = sum(p.numel() for p in member.model.parameters()) + 10_000
    return float(size) * member.job.batch_size * num_batches(member) * len(unit.members)


def num_batches(member: Member) -> int:
    """Batches of the whole job."""
    job = member.job
    return job.steps * job.accumulate if job.steps is not None else (job.epochs or 0) * member.num_batches


def predicted_seconds(plan: Plan, members: list[Member]) -> float:
    """What a plan takes in one process: from timed steps, else from the size of the networks (too little rather than
    too much)."""
    by_index = {member.index: member for member in members}
    total = 0.0
    for part in plan.parts:
        batches = max(num_batches(by_index[index]) for index in part.members)
        step = part.predicted.get("step_seconds")
        if step is None:
            step = sum(_least_seconds(by_index[index]) for index in part.members)
        total += step * batches
    return total


def _least_seconds(member: Member) -> float:
    """A step at 20 GFLOP/s, every weight used once a row."""
    weights = sum(p.numel() for p in member.model.parameters() if not is_lazy(p))
    return 6e0 * weights * member.job.batch_size / 2e10


def run_shared(units: list[Unit], count: int, executor: Executor, watch: Watcher) -> None:
    """`run`, with the units shared among `count` processes, this one included."""
    own, *others = shares(units, count) if count > 1 else [units]
    crew = [Crewman(share) for share in others if share]
    try:
        for worker in crew:
            if not worker.start():
                own += worker.units
        alive = [worker for worker in crew if worker.started]

        def both(member: Member) -> None:
            watch(member)
            for worker in alive:
                worker.settle(watch, wait=False)

        try:
            run(own, executor, both)
            for worker in alive:
                worker.settle(watch, wait=True)
        except KeyboardInterrupt:
            for worker in alive:
                worker.cancel()
            for worker in alive:
                worker.settle(watch, wait=True)
            raise
    finally:
        for worker in crew:
            worker.close()


class Crewman:
    """One worker process, as its parent sees it."""

    def __init__(self, units: list[Unit]) -> None:
        self.units = units
        self.members = {member.index: member for unit in units for member in unit.members}
        self.started = False
        self.pid = 0
        self._pipe: Connection | None = None
        self._done = False
        self._inbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def start(self) -> bool:
        """Fork; whether the worker is up and can train."""
        self.pid, self._pipe = fork(lambda pipe: _train(self.units, pipe))
        threading.Thread(target=self._listen, daemon=True).start()
        try:
            self.started = pickle.loads(self._inbox.get(timeout=READY_SECONDS) or b"N.") == ("ready",)
        except queue.Empty:
            self.started = False
        if not self.started:
            self.close()
        return self.started

    def _listen(self) -> None:
        """Take in what the worker says as it says it: a worker must not wait for its parent's own training."""
        assert self._pipe is not None
        try:
            while True:
                self._inbox.put(self._pipe.recv_bytes())
        except (EOFError, OSError):
            self._inbox.put(None)

    def settle(self, watch: Watcher, *, wait: bool) -> None:
        """Carry what has come from the worker into the members; with `wait`, until it is done."""
        while not self._done:
            try:
                message = self._inbox.get(block=wait)
            except queue.Empty:
                return
            if message is None:
                self._lost(watch)
                return
            kind, *content = pickle.loads(message)
            if kind == "done":
                self._done = True
            elif kind == "raised":
                self._done = True
                raise content[0]
            else:
                member = self.members[content[0]]
                take(member, content[1])
                if member.status != "running":
                    del self.members[content[0]]
                watch(member)

    def _lost(self, watch: Watcher) -> None:
        """The worker is gone without a word: its members that had not left are lost with it."""
        self._done = True
        how = _ending(self._reap())
        for member in self.members.values():
            member.status, member.error = "failed", f"its worker process {how}; train it again"
            watch(member)
        self.members = {}

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
        if self._pipe is not None:
            forget(self._pipe)


def fork(body: Callable[[Connection], None]) -> tuple[int, Connection]:
    """Run `body` in a forked process that ends with its parent. Returns its process id and the pipe to it."""
    ours, theirs = Pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads exist; the worker touches none of theirs
        pid = os.fork()
    if pid:
        theirs.close()
        _parents.append(ours)
        return pid, ours
    _child(body, theirs, ours)


def forget(pipe: Connection) -> None:
    """Close the pipe to a worker that has ended."""
    if pipe in _parents:
        _parents.remove(pipe)
        pipe.close()


def _child(body: Callable[[Connection], None], pipe: Connection, ours: Connection) -> NoReturn:
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, and says what to do
        signal.signal(signal.SIGTERM, _interrupt)
        for inherited in (*_parents, ours):
            inherited.close()
        _end_with_parent()
        torch.set_num_threads(1)
        body(pipe)
        code = 0
    except BaseException:
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _interrupt(number: int, frame: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def _end_with_parent() -> None:
    """A worker whose parent was killed is nobody's: the kernel ends it."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _train(units: list[Unit], pipe: Connection) -> None:
    """The worker's life: train, tell, send members back."""

    def tell(*message: Any) -> None:
        data = pickle.dumps(message)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # half a message would be the end of all others
        pipe.send_bytes(data)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def watch(member: Member) -> None:
        left = member.status != "running"
        try:
            tell("member", member.index, give(member, whole=left))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            state = give(member, whole=False)
            state |= {"status": "failed", "error": f"its state cannot be sent between processes ({describe(error)})"}
            tell("member", member.index, state)

    x = torch.ones(1, requires_grad=True)
    x.sum().backward()  # type: ignore[no-untyped-call]  # raises where autograd's threads were lost in the fork
    tell("ready")
    try:
        run(units, Executor(), watch)
    except KeyboardInterrupt:
        pass
    except Exception as error:
        tell("raised", RuntimeError(f"a worker process raised {describe(error)}"))
        return
    tell("done")


def give(member: Member, *, whole: bool) -> dict[str, Any]:
    """A member's progress; with `whole`, all it has become."""
    state: dict[str, Any] = {name: getattr(member, name) for name in _STATE}
    first = 0 if whole else max(0, len(member.history) - 1)
    state["history"] = (first, member.history[first:])
    if whole:
        state |= {
            "model": _own(member.model.state_dict()),
            "optimizer_state": _own(member.optimizer_state),
            "best": member.best,
            "monitor": member.monitor,
            "generators": (member.rng.get_state(), member.orders.get_state()),
        }
    return state


def take(member: Member, state: dict[str, Any]) -> None:
    """Make the member what `give` told of it."""
    for name in _STATE:
        setattr(member, name, state[name])
    first, rows = state["history"]
    member.history[first:] = rows
    if "model" in state:
        member.model.load_state_dict(state["model"])
        member.optimizer_state, member.best, member.monitor = state["optimizer_state"], state["best"], state["monitor"]
        rng, orders = state["generators"]
        member.rng.set_state(rng)
        member.orders.set_state(orders)


def _own(values: Any) -> Any:
    """Tensors that are small parts of large ones as copies: a pickle holds all the memory behind a tensor."""

    def own(x: Any) -> Any:
        part = isinstance(x, Tensor) and x.untyped_storage().nbytes() > 2 * x.nbytes + 1024
        return x.clone() if part else x

    return pytree.tree_map(own, values)


def _ending(status: int) -> str:
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    return f"ended with exit code {os.waitstatus_to_exitcode(status)}"
