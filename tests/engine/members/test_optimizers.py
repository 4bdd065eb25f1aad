"""Optimizers that draw random numbers in their steps draw those of their own job."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.engine.equality import distance, numbers, reasons
from torch import nn

import shoal

X, Y = numbers(1, 24, 6), numbers(2, 24, 2)


class Noisy(torch.optim.SGD):
    """Gradient descent with noise, as Langevin dynamics has it."""

    draw: Callable[..., Any] = staticmethod(torch.randn_like)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(group["lr"] * (parameter.grad + self.draw(parameter)))


class FromPython(Noisy):
    draw = staticmethod(lambda parameter: random.random())


class FromNumpy(Noisy):
    draw = staticmethod(lambda parameter: np.random.random())


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 2)).double()


def plain_loop(job: shoal.Job) -> nn.Module:
    torch.manual_seed(job.seed)
    model = network()
    optimizer = job.optimizer(model.parameters(), **job.hparams)
    order = torch.Generator().manual_seed(job.seed)
    random.seed(job.seed)
    np.random.seed(job.seed)
    for _ in range(3):
        for rows in torch.randperm(24, generator=order).split(8):
            optimizer.zero_grad()
            F.mse_loss(model(X[rows]), Y[rows]).backward()
            optimizer.step()
    return model


@pytest.mark.parametrize("optimizer", [Noisy, FromPython, FromNumpy])
def test_an_optimizer_draws_from_the_streams_of_its_job(optimizer: type[torch.optim.Optimizer]) -> None:
    jobs = [
        shoal.Job(model=network, data=(X, Y), loss=F.mse_loss, optimizer=optimizer, hparams={"lr": 0.1}, batch_size=8,
                  epochs=3, seed=seed, name=str(seed))
        for seed in range(2)
    ]  # fmt: skip
    for result in shoal.train(jobs, device="cpu"):
        for name, value in plain_loop(result.job).state_dict().items():
            assert distance(result.model.state_dict()[name], value) < 1e-9, name
    assert f"its optimizer {optimizer.__name__} draws random numbers" in reasons(jobs)
