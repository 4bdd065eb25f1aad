"""How the processes of a run are started: forked here, or by torchrun or by hand on other machines."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from shoal.engine.runtime.processes import Child
from shoal.errors import ShoalError, SplitError, describe
from shoal.jobs.job import Job
from shoal.split.core.method import Method
from shoal.split.core.report import optimizer_state
from shoal.split.net.coordinator import Distributed
from shoal.split.net.links import Address
from shoal.split.net.worker import CoordinatorEnded, serve_worker

END_SECONDS = 5.0
"""For local workers to end by themselves after the run."""


class LocalWorker(Child):
    """A forked worker of this machine."""

    def go(self, where: Address) -> None:
        """Send it the address of its coordinator."""
        with suppress(OSError):
            self.pipe.send(where)

    def end(self, until: float = 0.0) -> str:
        """Wait for its end until then, and end it."""
        self.close()  # one that never got an address ends by this
        return super().end(until)


def fork_workers(count: int, job: Job, method: Method, **settings: Any) -> list[LocalWorker]:
    """Worker processes of this machine that wait for the address of their coordinator (`LocalWorker.go`).

    They are forked, so a job may hold lambdas and its data is not copied. Fork before the coordinator listens: threads
    are not copied. `settings` are those of `serve_worker`.
    """
    if not hasattr(os, "fork"):
        raise SplitError("workers cannot be forked on this system; start them with `shoal split FILE --join HOST:PORT`")
    busy = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if busy and str(settings.get("device", "cpu")).startswith("cuda"):
        raise SplitError(
            "workers cannot be forked once CUDA is in use here; begin the split first, or use device='cpu'"
        )
    optimizer_state(method.member.job, method.model)  # loads here, once, what torch loads with its first step

    def serve(where: Address) -> None:
        serve_worker(job, method, where, **{"tell": say, **settings})

    return [LocalWorker(partial(work, serve, CoordinatorEnded)) for _ in range(count)]


def say(line: str) -> None:
    """Print a line of a forked worker."""
    print("shoal: worker:", line, file=sys.stderr, flush=True)


def work(serve: Callable[[Address], None], ended: type[Exception], pipe: Connection) -> None:
    """A forked worker: waits for an address, serves there, and reports every error in one line, without a traceback.

    `ended`: the error of the other side, which reports it in this same terminal.
    """
    try:
        where = pipe.recv()
    except EOFError:  # there is nothing to do
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
    """After the block: wait a little for these workers to end by themselves, and end them."""
    try:
        yield
    finally:
        until = time.monotonic() + END_SECONDS
        for worker in workers:
            worker.end(until)


@contextmanager
def local_workers(
    job: Job,
    method: Method,
    local: int,
    *,
    others: int = 0,
    worker: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Iterator[tuple[Distributed, list[LocalWorker]]]:
    """A coordinator with so many forked workers, that waits for so many others besides.

    `settings` are those of `Distributed`, `worker` those of `serve_worker`.

    >>> with local_workers(job, method, 4) as (executor, _):
    ...     result = train_split(job, method, executor)
    """
    given = {"codec": settings.get("codec", "exact"), "patience": 20.0, **(worker or {})}
    if settings.get("tell") is None:
        given.setdefault("tell", lambda line: None)
    forked = fork_workers(local, job, method, **given)
    with ending(forked), Distributed(job, method, workers=local + others, **settings) as executor:
        for process in forked:
            process.go(executor.address)
        yield executor, forked


@dataclass(frozen=True, slots=True)
class Torchrun:
    """What torchrun says about this process."""

    rank: int
    world: int
    where: Address

    @staticmethod
    def read(environment: Mapping[str, str] = os.environ) -> Torchrun | None:
        """From RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; None where torchrun did not start this process.

        torchrun's own store is at MASTER_PORT, so the coordinator listens at the next port.
        """
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if not all(name in environment for name in names):
            return None
        try:
            rank, world, port = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        except ValueError:
            raise SplitError("RANK, WORLD_SIZE or MASTER_PORT is no number; start this with torchrun") from None
        return Torchrun(rank, world, Address(environment["MASTER_ADDR"], port + 1))
