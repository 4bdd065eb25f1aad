"""One job trained by a plain PyTorch loop, an epoch at a time: what people write when they search without packing."""

from __future__ import annotations

from typing import Any

import torch

from shoal.evidence.bench.ways import build, epochs
from shoal.jobs.job import Job


class PlainTraining:
    """A job's network and optimizer, kept between epochs."""

    def __init__(self, job: Job, device: str) -> None:
        self.job, self.device = job, torch.device(device)
        self.model = build(job, self.device)
        self.optimizer = job.optimizer(self.model.parameters(), **job.hparams)
        self.order = epochs(job)
        self.data, self.val = (tuple(t.to(self.device) for t in pair) for pair in (job.data, job.val))

    def epoch(self) -> float:
        """Train one more epoch; the accuracy after it."""
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
