"""IST's comparison in seconds: real workers, each behind a link of a given rate (see `namespaces.py`).

The coordinator is on this side of the links, which do not slow it down. Data parallel is timed in two ways: through the
coordinator, and as torch's DistributedDataParallel, whose workers reduce among themselves; the faster one counts.
"""

from __future__ import annotations

import os
import time
from functools import partial
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from shoal.engine.runtime.processes import Child
from shoal.evidence.reproduce.ist import DATA_PARALLEL, MOMENTUM, Network, Scene, Setting, job_of, method_of, trained
from shoal.evidence.reproduce.namespaces import Links

ENDING = 10.0
"""Seconds for workers to end by themselves."""
DDP_PORT = 29641
WARM_UP = 2
WAIT = 600.0


def over_links(
    scene: Scene, setting: Setting, seed: int, links: Links, *, codec: str = "exact", **how: Any
) -> dict[str, Any]:
    """One training by workers behind these links; as `trained`, with the seconds that it took them."""
    from shoal.split.net.coordinator import Distributed
    from shoal.split.net.launch import LocalWorker
    from shoal.split.net.links import Address

    job = job_of(scene, setting, seed)
    method = method_of(job, scene, setting)
    workers = [
        LocalWorker(Child(partial(_behind, links, number, job, method, codec))) for number in range(scene.workers)
    ]
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


def seconds_a_step(scene: Scene, links: Links, steps: int = 8) -> float:
    """Of torch's DistributedDataParallel over these links: the median of some steps, the slowest worker's."""
    children = [Child(partial(_reduced, scene, links, number, steps)) for number in range(scene.workers)]
    try:
        times: list[float] = []
        for child in children:
            if not child.pipe.poll(WAIT):
                raise OSError(f"no answer from a worker in {WAIT:g} s")
            times.append(child.pipe.recv())
        return max(times)
    except EOFError:
        raise OSError("a worker of DistributedDataParallel ended early") from None
    finally:
        for child in children:
            child.wait()
            child.close()


def _reduced(scene: Scene, links: Links, number: int, steps: int, pipe: Connection) -> None:
    """One worker of data parallel training, as torch has it."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    links.enter(number)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    first = links.host.rpartition(".")[0] + ".10"  # the first worker's own address
    dist.init_process_group("gloo", init_method=f"tcp://{first}:{DDP_PORT}", rank=number, world_size=scene.workers)
    torch.manual_seed(0)
    data = scene.data
    model = DistributedDataParallel(Network(data.features, scene.width, data.classes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=MOMENTUM)
    took = []
    for step in range(WARM_UP + steps):
        rows = torch.arange(scene.batch) + (step * scene.workers + number) * scene.batch
        rows %= len(data.x)
        dist.barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        F.cross_entropy(model(data.x[rows]), data.y[rows]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        took.append(time.perf_counter() - start)
    pipe.send(median(took[WARM_UP:]))
    dist.barrier()
    dist.destroy_process_group()


def timed_steps(row: dict[str, Any], seconds: float) -> dict[str, Any]:
    """A data-parallel training whose steps were counted in one process, with so many seconds for each of them."""
    assert row["method"] == DATA_PARALLEL
    curve = [point | {"seconds": point["step"] * seconds} for point in row["curve"]]
    return row | {"curve": curve, "seconds": row["steps"] * seconds, "extrapolated": True}
