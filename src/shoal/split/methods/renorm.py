"""Normalisation estimated again: the running statistics of a merged network, from training rows.

Parts see the inputs of their own narrow layers, so what they note of them is not what the whole network's layers see.
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
"""How many batches of training rows are looked at, at most."""


def renormalise(job: Job, model: nn.Module, data: View, batches: int = BATCHES) -> int:
    """Replace the running statistics of the batch norms by the mean over some batches. The network and the data
    are on one device.

    The rows are the first of the pure order, so that the same network always gets the same statistics. Layers that the
    user has frozen (in eval mode), and those without running statistics, are left alone. Gives how many were replaced.
    """
    norms = running(model)
    if not norms:
        return 0
    reading = Reading(job, len(data))
    groups = reading.groups(0, -(-min(batches, reading.num_batches) // job.accumulate))
    rows = [batch for _, group in groups for batch in group]
    taken = (data.source.take(data.rows(batch), seed=job.order_seed) for batch in rows if len(batch) > 1)
    device = data.source.device
    with seeded(job.seed, device), autocast(job, device):
        _estimate(job, model, norms, taken)
    return len(norms)


def device_of(model: nn.Module) -> torch.device:
    """Where a network is."""
    return next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))


def running(model: nn.Module) -> list[_NormBase]:
    """The layers whose running statistics move in training."""
    return [
        module
        for module in model.modules()
        if isinstance(module, _NormBase) and module.training and module.running_mean is not None
    ]


def _estimate(job: Job, model: nn.Module, norms: list[_NormBase], batches: Iterable[Any]) -> None:
    """All else is as in evaluation: dropout would change what the layers see."""
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
