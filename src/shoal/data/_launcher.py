"""Start the workers of a DataLoader's epochs from a process that was forked once, not from the one that trains.

A fork copies the page tables of a process, which takes tens of milliseconds for each gigabyte that it holds, and keeps
Python from running meanwhile. For eight workers in each epoch this may take longer than reading the epoch. So where
nothing that the workers use can change between epochs, a process with a copy of it, the launcher, starts them all: each
epoch has new workers, which are as those that the training process would fork.

The DataLoader is used as it is: it gets a context whose processes are those workers, and whose queues are pipes to
them.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import struct
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

from torch.utils.data import DataLoader

from shoal.data._pipes import Count, Done, Flag, Indices, Receiver, Results, Sender
from shoal.utils.random_state import Generator, get_state, set_state

LOOK_SECONDS = 1.0
"""How often a launcher looks whether the process that trains still exists."""
END_SECONDS = 5.0
"""How long a launcher may take to end."""
MOST_STARTERS = 4
"""The most processes that start workers side by side."""
PIPES = 4
"""The number of pipes that a worker gets: for its indices, the end of the epoch, its results, and its life."""
_STARTED = struct.Struct("qd")
"""A worker's process id, and when it began, as it sends them."""


class Launcher:
    """Starts the workers of a loader's epochs, with a few processes that share this."""

    def __init__(self, loader: DataLoader[Any], generators: Sequence[Generator]) -> None:
        """Fork the processes. `generators`: those that the loader uses, whose states workers begin with."""
        self.generators = generators
        self.parts = {
            "dataset": loader.dataset, "collate_fn": loader.collate_fn, "worker_init_fn": loader.worker_init_fn
        }  # fmt: skip
        self._pid = os.getpid()
        self._starters: list[Starter] = []
        try:
            for _ in range(num_starters(loader.num_workers, os.cpu_count() or 1)):
                self._starters.append(Starter(self))
        except OSError:
            self.close()
            raise

    @property
    def usable(self) -> bool:
        """Whether this process can start workers with it."""
        return self._pid == os.getpid() and all(starter.process.is_alive() for starter in self._starters)

    def iterate(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Start to iterate over a copy of the loader, made for this, with workers that are started in the
        background."""
        loader.multiprocessing_context = _Epoch(self)
        return iter(loader)

    def starter(self, number: int) -> Starter:
        """Return the process that starts the worker with this number."""
        return self._starters[number % len(self._starters)]

    def close(self) -> None:
        """End the processes, and with them all workers that they have started."""
        if self._pid == os.getpid():
            for starter in self._starters:
                starter.stop()
            for starter in self._starters:
                starter.wait()

    def close_pipes(self) -> None:
        """Close this process's copies of the pipes to the processes that start workers."""
        for starter in self._starters:
            starter.pipe.close()


def num_starters(workers: int, cores: int) -> int:
    """Return how many processes start workers side by side.

    >>> num_starters(8, 16), num_starters(8, 2), num_starters(1, 64)
    (4, 1, 1)
    """
    return max(1, min(MOST_STARTERS, workers // 2, cores // 4))


class Starter:
    """A process that starts workers, as the process that trains sees it."""

    def __init__(self, launcher: Launcher) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, other_end = context.Pipe()
        self.process = context.Process(target=_serve, args=(launcher, self.pipe, other_end, os.getpid()))
        self.process.daemon = True  # it ends with this process
        self.process.start()
        other_end.close()

    def start(self, args: Sequence[Any], states: Sequence[Any] | None, pipes: Sequence[Connection]) -> None:
        """Start a worker in the background. `states`: of the generators, if they differ from the last worker's."""
        self.pipe.send((args, states))
        for pipe in pipes:
            send_handle(self.pipe, pipe.fileno(), self.process.pid)

    def stop(self) -> None:
        """Tell the process to end."""
        with suppress(OSError):
            self.pipe.send(None)
        self.pipe.close()

    def wait(self) -> None:
        """Wait until the process has ended; kill it if that takes long."""
        self.process.join(END_SECONDS)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _serve(launcher: Launcher, other_end: Connection, pipe: Connection, parent: int) -> None:
    """Run in a process that starts workers, until the training process stops it or ends."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may have children
    other_end.close()
    launcher.close_pipes()
    while True:
        if not pipe.poll(LOOK_SECONDS):
            multiprocessing.active_children()  # reaps workers that have ended
            if os.getppid() != parent:
                return
            continue
        try:
            message = pipe.recv()
            handles = [] if message is None else [recv_handle(pipe) for _ in range(PIPES)]
        except (EOFError, OSError):
            return
        if message is None:
            return
        args, states = message
        for generator, state in zip(launcher.generators, states or (), strict=False):
            set_state(generator, state)
        _fork(launcher, args, handles, pipe)


def _fork(launcher: Launcher, args: Sequence[Any], handles: Sequence[int], pipe: Connection) -> None:
    """Start a worker with these pipes."""
    index, done = (Connection(handle, writable=False) for handle in handles[:2])
    results, life = (Connection(handle, readable=False) for handle in handles[2:])
    named = launcher.parts | {"index": Receiver(index), "results": Sender(results), "done": Flag(done)}
    target, *rest = (named[arg.name] if isinstance(arg, _Named) else arg for arg in args)
    worker = multiprocessing.get_context("fork").Process(target=_work, args=(target, rest, life, pipe))
    worker.daemon = True
    try:
        worker.start()
    except OSError:  # no more processes or memory: its pipes end, and the epoch begins in another way
        traceback.print_exc()
    for end in (index, done, results, life):
        end.close()


def _work(target: Callable[..., Any], args: Sequence[Any], life: Connection, pipe: Connection) -> None:
    """Run in a worker. `life`: its only other end closes when this process is gone."""
    pipe.close()
    try:
        life.send_bytes(_STARTED.pack(os.getpid(), time.monotonic()))
    except OSError:  # the epoch was closed before this worker began
        return
    target(*args)


@dataclass(frozen=True, slots=True)
class _Named:
    """Stands for an argument of a worker that its process has or receives in another way."""

    name: str


class _Epoch(BaseContext):
    """The context of one epoch's queues and processes: what a DataLoader asks of multiprocessing."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self.began = time.monotonic()
        """When it was created."""
        self.results: Results | None = None
        self.done: Done | None = None
        self.states: list[Any] | None = None
        """The states of the generators with which workers begin; known when the first starts, since the loader draws a
        number before."""
        self.starters: list[Starter] = []
        """The processes that start this epoch's workers, one entry for each worker."""

    def Queue(self, maxsize: int = 0) -> Any:
        """Return a queue: the first is that of the results, the others are of the workers' indices."""
        if self.results is None:
            self.results = Results()
            return self.results
        return Indices()

    def Event(self) -> Any:
        self.done = Done()
        return self.done

    def Process(self, target: Callable[..., Any], args: Sequence[Any]) -> Worker:
        (index,) = (arg for arg in args if isinstance(arg, Indices))
        starter = self.launcher.starter(len(self.starters))
        return Worker(self, starter, index, [self._named(arg) for arg in (target, *args)])

    def _named(self, arg: Any) -> Any:
        queues = {"results": self.results, "done": self.done}
        for name, part in {**self.launcher.parts, **queues}.items():
            if arg is part and part is not None:
                return _Named(name)
        return _Named("index") if isinstance(arg, Indices) else arg


class Worker:
    """A worker process, as the DataLoader that reads from it sees it."""

    daemon = True

    def __init__(self, epoch: _Epoch, starter: Starter, indices: Indices, args: Sequence[Any]) -> None:
        self._epoch, self._starter, self._indices, self._args = epoch, starter, indices, args
        self._life: Connection | None = None
        self._ended = False
        self._process: int | None = None
        self._answers = Count()
        self._seconds: float | None = None

    def start(self) -> None:
        epoch = self._epoch
        assert epoch.results is not None and epoch.done is not None
        results, their_results = multiprocessing.Pipe(duplex=False)
        self._life, their_life = multiprocessing.Pipe(duplex=False)
        theirs = (self._indices.reader, epoch.done.reader, their_results, their_life)
        if epoch.states is None:
            epoch.states = [get_state(generator) for generator in epoch.launcher.generators]
        try:
            self._starter.start(self._args, None if self._starter in epoch.starters else epoch.states, theirs)
        finally:
            for pipe in (self._indices.reader, their_results, their_life):
                pipe.close()
        epoch.results.readers[results] = self._answers
        epoch.starters.append(self._starter)

    @property
    def pid(self) -> int:
        """Its process id; until that is known, that of the process which starts it."""
        self._look(0)
        return self._process or self._starter.process.pid or 0

    @property
    def seconds(self) -> float | None:
        """How long it took from the beginning of the epoch until it ran; None if it does not run yet."""
        if self._seconds is None:
            self._look(0)
        return self._seconds

    def is_alive(self) -> bool:
        """Whether more batches may come from it."""
        self._look(END_SECONDS if self._answers.closed else 0)  # its pipes close one after the other
        return self._life is not None and not (self._ended or self._answers.closed)

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end. One that has nothing left to do is not waited for, since it ends by itself."""
        if self._epoch.done is not None and self._epoch.done.is_set() and self._answers.value == self._indices.asked:
            self._ended = True
        until = None if timeout is None else time.monotonic() + timeout
        while not self._ended and self._life is not None:
            left = None if until is None else until - time.monotonic()
            if left is not None and left < 0:
                return
            self._look(left)

    @property
    def failed_to_start(self) -> bool:
        """Whether it ended before it ran, since there was no room for a process."""
        self._look(0)
        return self._ended and self._process is None

    def terminate(self) -> None:
        self._look(0)
        if self._process is not None and not self._ended:
            with suppress(ProcessLookupError):
                os.kill(self._process, signal.SIGKILL)

    def _look(self, timeout: float | None) -> None:
        """Read what it has sent about itself: its beginning or its end."""
        while not self._ended and self._life is not None and self._life.poll(timeout):
            try:
                self._process, began = _STARTED.unpack(self._life.recv_bytes())
                self._seconds, timeout = began - self._epoch.began, 0
            except (EOFError, OSError):
                self._ended = True
