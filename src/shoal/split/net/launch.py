"""Start the processes of a run: forked here, or on other machines by torchrun or by hand."""

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

from shoal.engine.runtime.processes import CANNOT_TRAIN, Child, forks_can_train
from shoal.errors import ShoalError, SplitError, describe
from shoal.jobs.job import Job
from shoal.split.core.method import Method
from shoal.split.core.report import optimizer_state
from shoal.split.net.coordinator import Distributed
from shoal.split.net.links import Address
from shoal.split.net.worker import CoordinatorEnded, serve_worker

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


def fork_workers(count: int, job: Job, method: Method, **settings: Any) -> list[LocalWorker]:
    """Fork worker processes on this machine that wait for the address of their coordinator (`LocalWorker.go`).

    Because they are forked, a job may contain lambdas and its data is not copied. Fork before the coordinator listens,
    since threads are not copied. `settings` are those of `serve_worker`.
    """
    if not hasattr(os, "fork"):
        raise SplitError("workers cannot be forked on this system; start them with `shoal split FILE --join HOST:PORT`")
    busy = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if busy and str(settings.get("device", "cpu")).startswith("cuda"):
        raise SplitError(
            "workers cannot be forked once CUDA is in use here; begin the split first, or use device='cpu'"
        )
    if count and not forks_can_train():
        raise SplitError(f"{CANNOT_TRAIN}, or start the workers with `shoal split FILE --join HOST:PORT`")
    optimizer_state(method.member.job, method.model)  # makes torch load before the fork what its first step needs

    def serve(where: Address) -> None:
        serve_worker(job, method, where, **{"tell": say, **settings})

    return [LocalWorker(partial(work, serve, CoordinatorEnded)) for _ in range(count)]


def say(line: str) -> None:
    """Print a line of a forked worker."""
    print("shoal: worker:", line, file=sys.stderr, flush=True)


def work(serve: Callable[[Address], None], ended: type[Exception], pipe: Connection) -> None:
    """Run a forked worker: wait for an address, serve there, and report every error in one line, without a traceback.

    Args:
        ended: The type of the other side's errors, which that side reports in the same terminal.
    """
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
    """Start a coordinator with `local` forked workers, which waits for `others` more.

    `settings` are those of `Distributed`, `worker` those of `serve_worker`.

    >>> with local_workers(job, method, 4) as (executor, _):
    ...     result = train_split(job, method, executor)
    """
    worker_settings = {"codec": settings.get("codec", "exact"), "patience": 20.0, **(worker or {})}
    if settings.get("tell") is None:
        worker_settings.setdefault("tell", lambda line: None)
    forked = fork_workers(local, job, method, **worker_settings)
    with ending(forked), Distributed(job, method, workers=local + others, **settings) as executor:
        for process in forked:
            process.go(executor.address)
        yield executor, forked


@dataclass(frozen=True, slots=True)
class Torchrun:
    """The process information that torchrun provides."""

    rank: int
    world: int
    where: Address
    alone: bool = False
    """Whether it is the only process that torchrun has started on its machine."""

    @staticmethod
    def read(environment: Mapping[str, str] = os.environ) -> Torchrun | None:
        """Read RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or return None if torchrun did not start this process.

        torchrun's own store is at MASTER_PORT, so the coordinator listens at the next port.
        """
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if not all(name in environment for name in names):
            return None
        try:
            rank, world, port = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        except ValueError:
            raise SplitError("RANK, WORLD_SIZE or MASTER_PORT is not a number; start this with torchrun") from None
        alone = environment.get("LOCAL_WORLD_SIZE") == "1"
        return Torchrun(rank, world, Address(environment["MASTER_ADDR"], port + 1), alone)
