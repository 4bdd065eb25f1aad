"""Start a coordinator with workers that are forked on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from shoal.errors import SplitError
from shoal.jobs.job import Job
from shoal.net.links import Address
from shoal.net.local_workers import LocalWorker, ending, fork_local_workers, say
from shoal.split.core.method import Method
from shoal.split.core.report import optimizer_state
from shoal.split.net.coordinator import Distributed
from shoal.split.net.worker import CoordinatorEnded, serve_worker


def fork_workers(count: int, job: Job, method: Method, **settings: Any) -> list[LocalWorker]:
    """Fork worker processes on this machine that wait for the address of their coordinator (`LocalWorker.go`).

    `settings` are those of `serve_worker`.
    """

    def serve(number: int, where: Address) -> None:
        serve_worker(job, method, where, **{"log": say, **settings})

    return fork_local_workers(
        count, serve, CoordinatorEnded, device=settings.get("device", "cpu"), error=SplitError,
        instead="start the workers with `shoal split FILE --join HOST:PORT`",
        # makes torch load before the fork what its first step needs
        prepare=lambda: optimizer_state(method.member.job, method.model),
    )  # fmt: skip


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
    if settings.get("log") is None:
        worker_settings.setdefault("log", lambda line: None)
    forked = fork_workers(local, job, method, **worker_settings)
    with ending(forked), Distributed(job, method, workers=local + others, **settings) as executor:
        for process in forked:
            process.go(executor.address)
        yield executor, forked
