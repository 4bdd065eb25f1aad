"""Evaluate the whole network between rounds, and step it if the parts send gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shoal.data import View
from shoal.engine.members.member import seeded
from shoal.engine.members.optimizers import make_optimizer
from shoal.engine.members.step import autocast, evaluating
from shoal.engine.optim.gradients import clip_gradients
from shoal.engine.tiers.evaluate import ValidationTotals
from shoal.jobs.job import Job
from shoal.split.core.moments import load_moments, moments_of
from shoal.split.core.parts import Tensors
from shoal.split.core.state import State
from shoal.split.executors.local import set_rates


def evaluate(job: Job, model: nn.Module, val: View, device: torch.device) -> dict[str, float]:
    """Return val_loss and metrics of a network over all validation rows, which are on the same device."""
    totals = ValidationTotals(job)
    with seeded(job.seed, device), evaluating(model), autocast(job, device):
        for batch in val.feed(job.batch_size):
            totals.add(model, batch)
        return totals.values()


class MeanGradientOptimizer:
    """Steps the job's optimizer on the whole network with the mean of the gradients that parts send."""

    def __init__(self, job: Job, model: nn.Module, state: State) -> None:
        self.job, self.model, self.state = job, model, state
        for name, parameter in model.named_parameters():
            parameter.data = state.tensors[name]
        self.optimizer = make_optimizer(job, model)
        self.base = [group.get("lr") for group in self.optimizer.param_groups]
        load_moments(self.optimizer, model, state.moments)
        self.trained = {name for name, _ in model.named_parameters()}

    def step(self, gradients: Tensors, step: int, steps_per_epoch: int) -> None:
        """Take one step of the job's optimizer, clipped as the job says."""
        set_rates(self.job, self.optimizer, self.base, step, steps_per_epoch)
        for name, parameter in self.model.named_parameters():
            gradient: Tensor | None = gradients.get(name)
            parameter.grad = gradient
        clip_gradients(self.job, self.model)
        self.optimizer.step()
        self.state.moments = moments_of(self.optimizer, self.model)
