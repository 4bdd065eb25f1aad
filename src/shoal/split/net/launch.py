"""How the processes of a run come to be: forked here, or started by torchrun or by hand on other machines."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Iterator, Mapping
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
from shoal.split.net._codec import EXACT
from shoal.split.net._forecast import TrafficForecast
from shoal.split.net.coordinator import Distributed, Tell
from shoal.split.net.links import Address
from shoal.split.net.worker import CoordinatorEnded, serve_worker

END_SECONDS = 5.0
"""For local workers to end by themselves after the run."""


class LocalWorker(Child):
    """A forked worker of this machine."""

    def go(self, where: Address) -> None:
        """Tell it where its coordinator is."""
        with suppress(OSError):
            self.pipe.send(where)

    def end(self, until: float = 0.0) -> str:
        """Wait for its end until then, and end it."""
        self.close()  # one that was never told where to go ends by this
        return super().end(until)


def fork_workers(count: int, job: Job, method: Method, **settings: Any) -> list[LocalWorker]:
    """Worker processes of this machine that wait to be told where their coordinator is (`LocalWorker.go`).

    They are forked, so a job may hold lambdas and its data is not copied. Fork before the coordinator opens its door:
    threads do not come along. `settings` are those of `serve_worker`.
    """
    if not hasattr(os, "fork"):
        raise SplitError("workers cannot be forked on this system; start them with `shoal split FILE --join HOST:PORT`")
    busy = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if busy and str(settings.get("device", "cpu")).startswith("cuda"):
        raise SplitError(
            "workers cannot be forked once CUDA is in use here; begin the split first, or use device='cpu'"
        )
    TrafficForecast(job, method, EXACT)  # what torch loads with its first optimizer step is loaded once, here
    return [LocalWorker(partial(_work, job, method, settings)) for _ in range(count)]


def _work(job: Job, method: Method, settings: Mapping[str, Any], pipe: Connection) -> None:
    """A forked worker: nothing it meets is told with a traceback."""
    gc.freeze()  # process groups that this process inherited have no threads here, and would wait for them at their end
    try:
        where = pipe.recv()
    except EOFError:  # there is nothing to do
        return
    say = partial(print, "shoal: worker:", file=sys.stderr, flush=True)
    try:
        serve_worker(job, method, where, **{"tell": say, **settings})
    except CoordinatorEnded:  # which tells its user itself, in this same terminal
        raise
    except ShoalError as error:
        say(str(error))
        raise
    except Exception as error:
        say(describe(error))
        raise


def quiet(line: str) -> None:
    """For workers that need not be heard."""


@contextmanager
def local_crew(
    job: Job,
    method: Method,
    workers: int,
    *,
    device: torch.device | str = "cpu",
    codec: str = "exact",
    deadline: float | None = None,
    patience: float = 20.0,
    speeds: bool = False,
    address: Address | None = None,
    tell: Tell | None = None,
) -> Iterator[Distributed]:
    """A crew of processes forked from this one, for as long as the block runs.

    >>> with local_crew(job, method, 4) as crew:
    ...     result = train_split(job, method, crew)
    """
    crew_settings = {"codec": codec, "deadline": deadline, "speeds": speeds, "address": address, "tell": tell}
    with crew_of(job, method, workers, crew_settings, device=device, patience=patience) as (executor, _):
        yield executor


@contextmanager
def crew_of(
    job: Job,
    method: Method,
    local: int,
    crew_settings: Mapping[str, Any],
    *,
    others: int = 0,
    **worker_settings: Any,
) -> Iterator[tuple[Distributed, list[LocalWorker]]]:
    """A coordinator with so many forked workers, that waits for so many others besides."""
    worker_settings.setdefault("codec", crew_settings.get("codec", "exact"))
    if crew_settings.get("tell") is None:
        worker_settings.setdefault("tell", quiet)
    local_workers = fork_workers(local, job, method, **worker_settings)
    try:
        with Distributed(job, method, workers=local + others, **crew_settings) as executor:
            for worker in local_workers:
                worker.go(executor.address)
            yield executor, local_workers
    finally:
        until = time.monotonic() + END_SECONDS
        for worker in local_workers:
            worker.end(until)


@dataclass(frozen=True, slots=True)
class Torchrun:
    """What torchrun says about this process."""

    rank: int
    world: int
    where: Address

    @staticmethod
    def found(environment: Mapping[str, str] = os.environ) -> Torchrun | None:
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
