"""Plain PyTorch training, for comparison with Shoal: in one process, or with DistributedDataParallel over links."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.engine.processes.child import Child
from shoal.evidence.bench.ways import build, epochs
from shoal.evidence.reproduce.namespaces import Links
from shoal.jobs.job import Job

PORT = 29641
WAIT = 600.0
"""Seconds to wait for a process to answer."""
WARM_UP = 1
"""The number of first steps that are not counted."""


class PlainTraining:
    """One job, trained an epoch at a time, as people do who search without packing."""

    def __init__(self, job: Job, device: str) -> None:
        self.job, self.device = job, torch.device(device)
        self.model = build(job, self.device)
        self.optimizer = job.optimizer(self.model.parameters(), **job.hparams)
        self.order = epochs(job)
        self.data, self.val = (tuple(t.to(self.device) for t in pair) for pair in (job.data, job.val))

    def epoch(self) -> float:
        """Train one more epoch and return the accuracy after it."""
        job: Any = self.job
        x, y = self.data
        self.model.train()
        for rows in torch.split(self.order().to(self.device), job.batch_size):
            self.optimizer.zero_grad()
            job.loss(self.model(x[rows]), y[rows]).backward()
            self.optimizer.step()
        self.model.eval()
        with torch.no_grad():
            (metric,) = job.metrics.values()
            return float(metric(self.model(self.val[0]), self.val[1]))


@dataclass(frozen=True, slots=True)
class TimedTraining:
    """Steps of SGD with momentum whose seconds are measured; every worker trains the same."""

    make: Callable[[], nn.Module]
    data: tuple[Tensor, Tensor]
    rows: int
    """The rows of one worker in a step."""
    rate: float
    steps: int
    evaluate: Callable[[nn.Module], Any] = lambda network: None
    """Returns what to report of the trained network."""

    def step_seconds(self, model: nn.Module, number: int, workers: int, barrier: Callable[[], object]) -> float:
        """Train this worker's rows of each batch and return the median seconds of a step."""
        return median(list(self._steps(model, number, workers, barrier))[WARM_UP:])

    def _steps(self, model: nn.Module, number: int, workers: int, barrier: Callable[[], object]) -> Iterator[float]:
        x, y = self.data
        optimizer = torch.optim.SGD(model.parameters(), lr=self.rate, momentum=0.9)
        for step in range(max(self.steps, WARM_UP + 1)):
            rows = (torch.arange(self.rows) + (step * workers + number) * self.rows) % len(x)
            barrier()
            start = time.perf_counter()
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            yield time.perf_counter() - start


def time_ddp(training: TimedTraining, workers: int, links: Links, *, first: int = 0) -> tuple[float, Any]:
    """Return the seconds of a step of the slowest worker, and what `evaluate` returns for the first worker's network.

    Args:
        first: The namespace of the first worker; the others follow.

    Raises an OSError if a worker does not answer.
    """
    answers = ask([partial(_work, training, workers, links, first, number) for number in range(workers)])
    return max(seconds for seconds, _ in answers), answers[0][1]


def _work(training: TimedTraining, workers: int, links: Links, first: int, number: int, pipe: Connection) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    links.enter(first + number)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    where = f"tcp://{links.address(first)}:{PORT}"
    dist.init_process_group("gloo", init_method=where, rank=number, world_size=workers)
    torch.manual_seed(0)
    network = training.make()
    seconds = training.step_seconds(DistributedDataParallel(network), number, workers, dist.barrier)
    pipe.send((seconds, training.evaluate(network)))
    with suppress(RuntimeError):
        dist.barrier()
    dist.destroy_process_group()


def time_alone(training: TimedTraining, pipe: Connection) -> None:
    """Time the same training in a child process, as one worker without links."""
    torch.manual_seed(0)
    network = training.make()
    pipe.send((training.step_seconds(network, 0, 1, lambda: None), training.evaluate(network)))


def ask(bodies: list[Callable[[Connection], None]]) -> list[Any]:
    """Run processes at the same time and return the one message of each, or raise an OSError if one sends none."""
    children = [Child(body) for body in bodies]
    try:
        return [_answer(child) for child in children]
    finally:
        for child in children:
            child.end(time.monotonic() + 10.0)
            child.close()


def _answer(child: Child) -> Any:
    if not child.pipe.poll(WAIT):
        raise OSError(f"no answer in {WAIT:g} s")
    try:
        return child.pipe.recv()
    except EOFError:
        raise OSError(f"the process {child.wait()}") from None
