"""Run a measurement in its own process, so that its memory is separate and its crash is an error of one line."""

from __future__ import annotations

import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from shoal.errors import describe


class ChildError(Exception):
    """An error in the process; the message is the reason, in one line."""


class Child:
    """Runs `target(*args, pipe)` in a new process, and exchanges messages with it."""

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_run, args=(target, args, theirs))
        with ignoring_interrupts():
            self.process.start()
        theirs.close()

    def send(self, message: Any = None) -> None:
        try:
            self.pipe.send(message)
        except OSError:
            raise self._died() from None

    def receive(self, deadline: float | None = None) -> Any:
        """Return its next message, or raise a ChildError if there is none until `deadline` (time.monotonic)."""
        if deadline is not None and not self.pipe.poll(max(0.0, deadline - time.monotonic())):
            raise ChildError("no time left: raise --limit")
        try:
            message = self.pipe.recv()
        except (EOFError, OSError):
            raise self._died() from None
        if isinstance(message, ChildError):
            raise message
        return message

    def ask(self, message: Any, deadline: float) -> Any:
        """Send a message and return the next one."""
        self.send(message)
        return self.receive(deadline)

    def _died(self) -> ChildError:
        self.process.join(5)
        return ChildError(f"its process died (exit code {self.process.exitcode})")

    def close(self, patience: float = 15.0) -> None:
        """End the process by closing the pipe, and by force if that takes too long."""
        self.pipe.close()
        self.process.join(patience)
        for end in (self.process.terminate, self.process.kill):
            if self.process.is_alive():
                end()
                self.process.join(5)


def _run(target: Callable[..., None], args: tuple[Any, ...], pipe: Connection) -> None:
    warnings.simplefilter("ignore")  # vmap warns about its speed, which the table shows
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # exit through `finally` blocks
    try:
        target(*args, pipe)
    except (EOFError, ConnectionError, KeyboardInterrupt):
        pass  # the other end has closed the pipe
    except Exception as error:
        with suppress(ConnectionError):
            pipe.send(ChildError(describe(error)))


@contextmanager
def ignoring_interrupts() -> Iterator[None]:
    """Make processes that are started inside this context ignore Ctrl-C until they handle it themselves.

    A process in the middle of its imports would only print a traceback. It ends when the other end of its pipe is
    closed.
    """
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set signal handlers
        yield
        return
    old_handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, old_handler)


def prepare_torch(device: str, threads: int | None) -> None:
    """Set torch's flags as a careful user would, the same for every way."""
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    if device.startswith("cuda"):
        torch.cuda.set_device(torch.device(device).index or 0)
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
