"""Those who carry parts out on this machine: one after another, or as a pack."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.data import Pool, View
from shoal.engine.members.member import open_data
from shoal.jobs.job import Job
from shoal.split.core.method import Method, Worker
from shoal.split.core.parts import Outcome, Task
from shoal.split.executors.local import carry_out
from shoal.split.methods.averaging import check_count


class Serial:
    """This process, part after part: the reference that every other crew is held to."""

    tier = "serial"
    home: torch.device
    """Where outcomes are: on the device itself, so that the state is kept there and rounds cross no bus."""

    def __init__(
        self, job: Job, method: Method, workers: int, device: torch.device | str = "cpu", data: View | None = None
    ) -> None:
        check_count("workers", workers)
        self.job, self.method = job, method
        self.device = self.home = torch.device(device)
        self.data = data if data is not None else open_data(Pool(self.device), job, "data")
        self.workers = [Worker(number) for number in range(workers)]

    def roll(self, number: int) -> Sequence[Worker]:
        return self.workers

    def run(self, tasks: Sequence[Task]) -> Sequence[Outcome | None]:
        return [carry_out(self.job, self.method, task, self.device, self.data, home=self.home) for task in tasks]
