"""A forked process, and the pipe to it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, Pipe
from typing import Any, ClassVar, NoReturn

import torch

from shoal.utils import garbage_collection
from shoal.utils.locks import locks_kept
from shoal.utils.torch_flags import backward_prevents_forking, flush_output

Body = Callable[[Connection], None]
"""A function that a child runs, called with its end of the pipe."""


class Child:
    """A forked process with one torch thread, which ends with its parent, and the pipe to it."""

    _pipes: ClassVar[set[Connection]] = set()
    """This process's ends of the pipes to its children. Later children close them."""

    def __init__(self, body: Body) -> None:
        self.pipe, theirs = Pipe()
        flush_output()
        parent = os.getpid()
        with warnings.catch_warnings(), locks_kept():
            warnings.simplefilter("ignore", DeprecationWarning)  # other threads exist; the child uses nothing of theirs
            self.pid = os.fork()
        if not self.pid:
            _run_child(body, theirs, (*self._pipes, self.pipe), parent)
        theirs.close()
        self._pipes.add(self.pipe)
        self._status: int | None = None

    def alive(self) -> bool:
        """Return whether it has not ended yet."""
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = status if pid else None
        return self._status is None

    def signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.alive():
            os.kill(self.pid, number)

    def end(self, until: float = 0.0) -> str:
        """Wait for its end until that moment (of `time.monotonic`), then kill it. Returns how it ended."""
        while self.alive() and time.monotonic() < until:
            time.sleep(0.005)
        self.signal(signal.SIGKILL)
        return self.wait()

    def wait(self) -> str:
        """Wait for its end, and return how it ended."""
        if self._status is None:
            self._status = os.waitpid(self.pid, 0)[1]
        if os.WIFSIGNALED(self._status):
            name = signal.Signals(os.WTERMSIG(self._status)).name
            return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
        return f"ended with exit code {os.waitstatus_to_exitcode(self._status)}"

    def close(self) -> None:
        """Close the pipe to it."""
        if self.pipe in self._pipes:
            self._pipes.remove(self.pipe)
            self.pipe.close()


def _run_child(body: Body, pipe: Connection, inherited: Iterable[Connection], parent: int) -> NoReturn:
    """Run `body` in the child, and exit."""
    code = 1
    try:
        _end_with_parent(parent)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for other in inherited:
            other.close()
        garbage_collection.freeze(collect=False)  # the collector need not visit the parent's objects
        torch.set_num_threads(1)
        body(pipe)
        code = 0
    except BaseException:
        code = 1
    finally:
        flush_output()
        os._exit(code)


def _end_with_parent(parent: int) -> None:
    """Make the kernel end this process when its parent is killed, and exit now if that has already happened."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


def ask_children(bodies: Iterable[Body]) -> list[Any]:
    """Run children at the same time, and return one message from each; fewer if some could not run."""
    children: list[Child] = []
    with suppress(OSError):  # no more processes can be created
        for body in bodies:
            children.append(Child(body))
    answers = []
    for child in children:
        with suppress(EOFError):
            answers.append(child.pipe.recv())
        child.wait()
        child.close()
    return answers


def compute_in_fork(compute: Callable[[], Any]) -> Any:
    """Return the result of a function that runs a backward pass and changes nothing in this process.

    If that would prevent this process from forking workers later, it runs in a forked process, with the number of
    threads of this one. If it fails there, it runs here, and raises here.
    """
    may_fork = hasattr(os, "fork") and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if not may_fork or not backward_prevents_forking():
        return compute()
    try:
        child = Child(partial(_send_result, compute, torch.get_num_threads()))
    except OSError:  # no more processes can be created
        return compute()
    try:
        with suppress(EOFError):  # it failed
            return child.pipe.recv()
    finally:
        child.end()  # also after Ctrl-C
        child.close()
    return compute()


def _send_result(compute: Callable[[], Any], threads: int, pipe: Connection) -> None:
    def run() -> None:
        torch.set_num_threads(threads)
        with suppress(Exception):
            pipe.send(compute())

    thread = threading.Thread(target=run)  # OpenMP would wait for ever for threads that the main thread had before
    thread.start()
    thread.join()


def forks_can_train() -> bool:
    """Return whether processes that are forked now can run a backward pass; see `backward_prevents_forking`."""
    return not backward_prevents_forking() or ask_children([_try_backward]) == [True]


def _try_backward(pipe: Connection) -> None:
    torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]
    pipe.send(True)


CANNOT_TRAIN = (
    "workers cannot be forked here: this process has run a backward pass or used the GPU, and where torch sees one no "
    "process that is forked after that can train; begin this before any training (in a notebook: restart the kernel)"
)
"""The reason why processes that are forked now cannot train, and what to do; a place to add other ways to go."""
