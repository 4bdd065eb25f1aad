"""Estimate the batch norm statistics of a merged network again, from training rows.

Parts note statistics of their own narrow layers, which differ from those of the whole network's layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from shoal.data import View
from shoal.engine.members.member import seeded
from shoal.engine.members.step import autocast, evaluating, run_step
from shoal.jobs.job import Job
from shoal.split.core.reading import Reading

BATCHES = 50
"""At most this many batches of training rows are read."""


def renormalise(job: Job, model: nn.Module, data: View, batches: int = BATCHES) -> int:
    """Replace the running statistics of batch norms by the mean over some batches, and return how many were replaced.

    The network and the data must be on one device. The rows are always the same, so the same network gets the same
    statistics. Layers that the user has frozen (in eval mode) and layers without running statistics are left as they
    are.
    """
    norms = running(model)
    if not norms:
        return 0
    reading = Reading(job, len(data))
    groups = reading.groups(0, -(-min(batches, reading.num_batches) // job.accumulate))
    rows = [batch for _, group in groups for batch in group]
    batches_read = (data.source.take(data.rows(batch), seed=job.order_seed) for batch in rows if len(batch) > 1)
    device = data.source.device
    with seeded(job.seed, device), autocast(job, device):
        _estimate(job, model, norms, batches_read)
    return len(norms)


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a network."""
    return next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))


def running(model: nn.Module) -> list[_NormBase]:
    """List the layers whose running statistics change in training."""
    return [
        module
        for module in model.modules()
        if isinstance(module, _NormBase) and module.training and module.running_mean is not None
    ]


def _estimate(job: Job, model: nn.Module, norms: list[_NormBase], batches: Iterable[Any]) -> None:
    """Run the batches with the norms in training mode and everything else in eval mode: dropout would change their
    inputs."""
    momenta = [norm.momentum for norm in norms]
    counts = [None if norm.num_batches_tracked is None else norm.num_batches_tracked.clone() for norm in norms]
    with evaluating(model):
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # the mean over all batches
            norm.training = True
        for batch in batches:
            run_step(job, model, batch)
    with torch.no_grad():
        for norm, momentum, count in zip(norms, momenta, counts, strict=True):
            norm.momentum = momentum
            if count is not None and norm.num_batches_tracked is not None:
                norm.num_batches_tracked.copy_(count)
