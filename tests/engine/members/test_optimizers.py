"""Optimizers of users: those that draw random numbers in their steps, and those that wrap another one."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.engine.equality import distance, numbers, reasons
from torch import Tensor, nn

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


def plain_loop(job: shoal.Job, rates: Sequence[float] = ()) -> nn.Module:
    """`rates`: the learning rate of each epoch, if it changes."""
    torch.manual_seed(job.seed)
    model = network()
    optimizer = job.optimizer(model.parameters(), **job.hparams)
    order = torch.Generator().manual_seed(job.seed)
    random.seed(job.seed)
    np.random.seed(job.seed)
    for epoch in range(3):
        if rates:
            optimizer.param_groups[0]["lr"] = rates[epoch]
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


class WithSlowWeights(Lookahead):
    """Has a `state_dict()` in a form of its own, as torch_optimizer's Lookahead does."""

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict(), "slow": [slow.clone() for slow in self.slow], "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict["inner"])
        self.count, self.slow = state_dict["count"], [slow.clone() for slow in state_dict["slow"]]


def loss_by_number(outputs: Tensor, targets: Tensor) -> Tensor:
    """Is not stacked, because it branches on a value."""
    loss = F.mse_loss(outputs, targets)
    return loss if float(loss.detach()) >= 0 else -loss


def with_slow_weights(seed: int, loss: Any = F.mse_loss) -> shoal.Job:
    return shoal.Job(model=network, data=(X, Y), loss=loss, optimizer=WithSlowWeights, hparams={"lr": 0.1},
                     batch_size=8, epochs=3, seed=seed, name=f"{seed}")  # fmt: skip


@pytest.mark.parametrize(("loss", "tier"), [(F.mse_loss, "stacked"), (loss_by_number, "serial")])
def test_a_state_dict_in_a_form_of_its_own_is_resumed(tmp_path: Path, loss: Any, tier: str) -> None:
    halved: dict[str, Any] = {"schedule": lambda epoch: 0.5**epoch, "schedule_every": "epoch"}
    jobs = [replace(with_slow_weights(seed, loss), **halved) for seed in range(2)]

    def interrupt(view: shoal.MemberView) -> None:
        if view.epoch == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shoal.train(jobs, device="cpu", out=tmp_path, checkpoint_every=1e-3, callbacks=[interrupt])
    results = shoal.train(jobs, device="cpu", out=tmp_path)
    assert {result.tier for result in results} == {tier}
    for result, job in zip(results, jobs, strict=True):
        for name, value in plain_loop(job, rates=[0.1, 0.05, 0.025]).state_dict().items():
            assert distance(result.model.state_dict()[name], value) < 1e-9, name


def test_a_clone_of_an_optimizer_whose_state_dict_has_a_form_of_its_own() -> None:
    def clone(view: shoal.MemberView) -> None:
        if view.name == "0" and view.epoch == 1:
            assert view.run is not None
            view.run.clone("0", "clone", hparams={"lr": 0.2})

    results = shoal.start([with_slow_weights(0)], device="cpu", callbacks=[clone]).wait()
    for name, value in plain_loop(with_slow_weights(0), rates=[0.1, 0.2, 0.2]).state_dict().items():
        assert distance(results["clone"].model.state_dict()[name], value) < 1e-9, name


@pytest.mark.parametrize("loss", [F.mse_loss, loss_by_number])
def test_pack_load_begins_an_optimizer_anew_whose_state_dict_has_a_form_of_its_own(loss: Any) -> None:
    models = [network(), network()]
    pack = shoal.Pack(models, optimizer=WithSlowWeights, hparams={"lr": 0.1}, loss=loss)
    pack.step(X, Y)
    pack.load(0, models[0].state_dict())
    pack.step(X, Y)
    assert [pack.optimizer_state(id)["count"] for id in pack.ids] == [1, 2]
