"""IST's comparison in seconds, with real workers, each behind a link of a given rate (see `namespaces.py`).

The coordinator is on this side of the links, which do not slow it down. Data parallel is timed in two ways: through the
coordinator, and as torch's DistributedDataParallel, whose workers reduce among themselves; the faster one counts.
"""

from __future__ import annotations

import time
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from shoal.evidence.reproduce.ist import DATA_PARALLEL, Network, Scene, Setting, job_of, method_of, trained
from shoal.evidence.reproduce.namespaces import Links
from shoal.evidence.reproduce.plain_training import WARM_UP, TimedTraining, time_ddp

ENDING = 10.0
"""Seconds that workers get to end by themselves."""


def over_links(
    scene: Scene, setting: Setting, seed: int, links: Links, *, codec: str = "exact", **how: Any
) -> dict[str, Any]:
    """Train once with workers behind these links; the result is that of `trained`, with measured seconds."""
    from shoal.net.links import Address
    from shoal.net.local_workers import LocalWorker
    from shoal.split.net.coordinator import Distributed

    job = job_of(scene, setting, seed)
    method = method_of(job, scene, setting)
    workers = [LocalWorker(partial(_behind, links, number, job, method, codec)) for number in range(scene.workers)]
    try:
        with Distributed(job, method, workers=scene.workers, codec=codec, address=Address(links.host, 0)) as executor:
            for worker in workers:
                worker.go(executor.address)
            return trained(scene, setting, seed, executor=lambda *_: executor, **how) | {
                "link": links.rate,
                "codec": codec,
            }
    finally:
        until = time.monotonic() + ENDING
        for worker in workers:
            worker.end(until)


def _behind(links: Links, number: int, job: Any, method: Any, codec: str, pipe: Connection) -> None:
    from shoal.split.net.worker import serve_worker

    where = pipe.recv()
    links.enter(number)
    serve_worker(job, method, where, codec=codec)


def seconds_a_step(scene: Scene, links: Links, steps: int) -> float:
    """Return the seconds of a step of torch's DistributedDataParallel over these links: the median of the slowest
    worker."""
    data = scene.data
    make = partial(Network, data.features, scene.width, data.classes)
    training = TimedTraining(make, (data.x, data.y), scene.batch, rate=0.1, steps=WARM_UP + steps)
    return time_ddp(training, scene.workers, links)[0]


def timed_steps(row: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Return a data-parallel training whose steps were counted in one process, with this many seconds for each step."""
    assert row["method"] == DATA_PARALLEL
    curve = [point | {"seconds": point["step"] * seconds} for point in row["curve"]]
    return row | {"curve": curve, "seconds": row["steps"] * seconds, "extrapolated": True}
