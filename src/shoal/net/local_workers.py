"""Forked worker processes on this machine, which wait for the address of their coordinator or server."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection

import torch

from shoal.engine.processes.child import CANNOT_TRAIN, Child, forks_can_train
from shoal.errors import ShoalError, describe
from shoal.net.links import Address

END_SECONDS = 5.0
"""How long local workers may take to end by themselves after the run."""


class LocalWorker(Child):
    """A forked worker process on this machine."""

    def go(self, where: Address) -> None:
        """Send it the address of its coordinator."""
        with suppress(OSError):
            self.pipe.send(where)

    def end(self, until: float = 0.0) -> str:
        """Wait until the given time for its end, then end it."""
        self.close()  # ends a worker that never got an address
        return super().end(until)


def fork_local_workers(
    count: int,
    serve: Callable[[int, Address], None],
    ended: type[Exception],
    *,
    device: torch.device | str,
    error: type[ShoalError],
    instead: str,
    prepare: Callable[[], object] | None = None,
) -> list[LocalWorker]:
    """Fork worker processes on this machine that wait for an address (`LocalWorker.go`) and then `serve` there.

    Because they are forked, a job may contain lambdas and its data is not copied. Fork before this process listens,
    since threads are not copied.

    Args:
        serve: Called in each worker, with its number and the address.
        ended: The type of the other side's errors, which that side reports in the same terminal.
        device: Where the workers compute.
        error: The type of the error that is raised if workers cannot be forked.
        instead: How workers can be started then.
        prepare: Called once they can be forked, for what they inherit.
    """
    if not hasattr(os, "fork"):
        raise error(f"workers cannot be forked on this system; {instead}")
    busy = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if busy and str(device).startswith("cuda"):
        raise error(
            f"workers cannot be forked once CUDA is in use here; begin this first, use device='cpu', or {instead}"
        )
    if count and not forks_can_train():
        raise error(f"{CANNOT_TRAIN}, or {instead}")
    if prepare is not None:
        prepare()
    return [LocalWorker(partial(_work, partial(serve, number), ended)) for number in range(count)]


def say(line: str) -> None:
    """Print a line of a forked worker."""
    print("shoal: worker:", line, file=sys.stderr, flush=True)


def _work(serve: Callable[[Address], None], ended: type[Exception], pipe: Connection) -> None:
    """Run a forked worker: wait for an address, serve there, and report an error in one line, without a traceback."""
    try:
        where = pipe.recv()
    except EOFError:  # the parent ended without an address
        return
    try:
        serve(where)
    except ended:
        raise
    except Exception as error:
        say(str(error) if isinstance(error, ShoalError) else describe(error))
        raise


@contextmanager
def ending(workers: Sequence[LocalWorker]) -> Iterator[None]:
    """Wait a little on exit for these workers to end by themselves, then end them."""
    try:
        yield
    finally:
        until = time.monotonic() + END_SECONDS
        for worker in workers:
            worker.end(until)
