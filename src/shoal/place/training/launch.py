"""How the processes of a placed training are started: forked here, or by torchrun on this and other machines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from shoal.errors import PlaceError, ShoalError, describe
from shoal.place.training.members import Workers
from shoal.place.training.roles import Built
from shoal.place.training.worker import ServerEnded, describe_placed, serve_worker
from shoal.split.net.launch import LocalWorker
from shoal.split.net.links import Address

END_SECONDS = 5.0
"""For local workers to end by themselves after the run."""


@contextmanager
def local_workers(
    built: Built,
    local: int,
    *,
    others: int = 0,
    device: torch.device | str = "cpu",
    address: Address | None = None,
    enter: Callable[[int], None] | None = None,
    **settings: Any,
) -> Iterator[tuple[Workers, list[LocalWorker]]]:
    """A server's workers: so many forked here, and so many others that join from elsewhere.

    They are forked, so a job may hold lambdas and its data is not copied. `settings` are those of `Workers`. `enter`:
    called in each forked worker first, with its number.
    """
    busy = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if busy and str(device).startswith("cuda"):
        raise PlaceError("workers cannot be forked once CUDA is in use here; begin this first, or use torchrun")
    forked = [LocalWorker(partial(_work, built, number, device, enter)) for number in range(local)]
    try:
        workers = Workers(describe_placed(built), expected=local + others, address=address, **settings)
        why = "the server ended"
        try:
            for process in forked:
                process.go(workers.address)
            yield workers, forked
            why = ""
        except BaseException as error:
            why = f"the server ended: {describe(error)}"
            raise
        finally:
            workers.close(why)
    finally:
        until = time.monotonic() + END_SECONDS
        for process in forked:
            process.end(until)


def _work(
    built: Built, number: int, device: torch.device | str, enter: Callable[[int], None] | None, pipe: Connection
) -> None:
    """A forked worker: it reports every error in one line, without a traceback."""
    try:
        where = pipe.recv()
    except EOFError:  # there is nothing to do
        return
    try:
        if enter is not None:
            enter(number)
        serve_worker(built, where, device=device, patience=20.0)
    except ServerEnded:  # which reports it in this same terminal
        raise
    except Exception as error:
        print("shoal: worker:", error if isinstance(error, ShoalError) else describe(error), file=sys.stderr, flush=True)
        raise
