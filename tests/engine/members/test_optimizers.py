"""Optimizers of users: those that draw random numbers in their steps, and those that wrap another one."""

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


class Lookahead(torch.optim.Optimizer):
    """Wraps another optimizer without a call of `Optimizer.__init__`, as timm's and others do."""

    def __init__(self, params: Any, lr: float) -> None:
        self.inner = torch.optim.SGD(params, lr=lr)
        self.param_groups, self.state, self.defaults = self.inner.param_groups, self.inner.state, self.inner.defaults
        self.count = 0
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        self.count += 1
        for param, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
            if self.count % 2 == 0:
                param.copy_(slow.lerp_(param, 0.5))


def test_an_optimizer_that_wraps_another_without_its_init() -> None:
    jobs = [
        shoal.Job(model=network, data=(X, Y), loss=F.mse_loss, optimizer=Lookahead, hparams={"lr": 0.1}, batch_size=8,
                  epochs=3, seed=seed)
        for seed in range(2)
    ]  # fmt: skip
    for result, job in zip(shoal.train(jobs, device="cpu"), jobs, strict=True):
        assert result.status == "done", result.error
        for name, value in plain_loop(job).state_dict().items():
            assert distance(result.model.state_dict()[name], value) < 1e-9, name
