"""Train one way in its own process, so that its peak memory can be compared with the other way's.

Every way sends (networks done, networks in total) while it trains, then a dict: `alone` and `packed` with the weights
as NumPy arrays, `checked` with the largest difference of both in float64.
"""

import math
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import nn

from shoal import Job
from shoal.evidence.bench.datasets import finished
from shoal.evidence.bench.memory import peak_resident
from shoal.evidence.demo import task
from shoal.evidence.demo.compare import largest_difference

Send = Callable[[Any], None]
THREADS = 1
"""Threads for both ways: the fastest choice for networks this small, and stable on a busy machine."""


def weights(model: nn.Module, index: int) -> dict[str, np.ndarray[Any, Any]]:
    """Return a network's weights as arrays, by the network's number and the weight's name."""
    return {f"{index}/{key}": value.numpy() for key, value in model.state_dict().items()}


def alone(send: Send, longest: float) -> dict[str, Any]:
    """Train one network after the other, as many as there is time for."""
    torch.set_num_threads(THREADS)
    jobs = task.jobs()
    import_bytes, start = peak_resident(), time.perf_counter()
    models, histories = [], []
    for done, job in enumerate(jobs, 1):
        model, history = task.train_alone(job)
        models.append(model)
        histories.append(history)
        seconds = time.perf_counter() - start
        send((done, len(jobs)))
        if seconds > longest:
            break
    return summary(seconds, import_bytes, jobs, models, histories)


def packed(send: Send, longest: float) -> dict[str, Any]:
    """Train all networks together."""
    import shoal

    jobs = task.jobs()
    import_bytes, start = peak_resident(), time.perf_counter()
    results = finished(shoal.train(jobs, device="cpu", threads=THREADS))
    seconds = time.perf_counter() - start
    histories = [[dict(row) for row in result.history] for result in results]
    tiers = sorted({result.tier for result in results})
    return summary(seconds, import_bytes, jobs, [result.model for result in results], histories) | {"tiers": tiers}


def checked(send: Send, longest: float) -> dict[str, Any]:
    """Train both ways in float64 for a few epochs, where they must be equal, as many networks as there is time for.

    In float32 that is not well defined: another order of summation may flip a ReLU, and Adam makes a full step of it.
    """
    import shoal

    jobs = task.jobs(torch.float64, task.CHECKED_EPOCHS)
    results = finished(shoal.train(jobs, device="cpu", threads=THREADS))
    start, difference = time.perf_counter(), 0.0
    for done, index in enumerate(spread(len(jobs)), 1):
        model, _ = task.train_alone(jobs[index])
        difference = max(difference, largest_difference(weights(model, index), weights(results[index].model, index)))
        send((done, len(jobs)))
        if time.perf_counter() - start > longest:
            break
    return {"trained": done, "total": len(jobs), "difference": difference, "steps": results[0].steps}


def spread(count: int) -> list[int]:
    """Return all numbers below `count`, each far from the one before, so that any first part covers the whole sweep."""
    stride = next(s for s in range(count // 3, count + 2) if math.gcd(s, count) == 1)
    return [i * stride % count for i in range(count)]


def summary(
    seconds: float,
    before: int | None,
    jobs: Sequence[Job],
    models: Sequence[nn.Module],
    histories: list[list[dict[str, float]]],
) -> dict[str, Any]:
    """Return what the parent process compares."""
    return {
        "seconds": seconds,
        "trained": len(histories),
        "total": len(jobs),
        "before": before,
        "peak": peak_resident(),
        "histories": histories,
        "names": [job.name for job in jobs],
        "rates": [job.hparams["lr"] for job in jobs],
        "weights": {key: value for i, model in enumerate(models) for key, value in weights(model, i).items()},
    }


def run(way: str, longest: float, pipe: Connection) -> None:
    """Train one way and send its result."""
    ways = {"alone": alone, "packed": packed, "checked": checked}
    pipe.send(ways[way](pipe.send, longest))
