"""Parts trained in this process, one after another."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.jobs.job import Job
from shoal.split.core.checks import check_count
from shoal.split.core.method import Method, Worker
from shoal.split.core.parts import Outcome, Task
from shoal.split.executors.local import carry_out


class Serial:
    """Trains the parts in this process, one after another: the reference for every other executor."""

    tier = "serial"
    home: torch.device
    """Where outcomes are: on the device itself, so that the state stays there and rounds cross no bus."""

    def __init__(self, job: Job, method: Method, workers: int, device: torch.device | str = "cpu") -> None:
        check_count("workers", workers)
        self.job, self.method = job, method
        self.device = self.home = torch.device(device)
        self.data = method.data_on(self.device)
        self.workers = [Worker(number) for number in range(workers)]

    def roll(self, number: int) -> Sequence[Worker]:
        return self.workers

    def run(self, tasks: Sequence[Task]) -> Sequence[Outcome | None]:
        return [carry_out(self.job, self.method, task, self.device, self.data, home=self.home) for task in tasks]
