"""Steps and networks that ask autograd themselves are validated, and predict, with gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.engine.equality import assert_close, distance, numbers
from torch import Tensor, nn

import shoal
from shoal.reference import solo

X = numbers(1, 40, 3)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def residual(model: nn.Module, batch: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """Of a differential equation, u' = -u."""
    points = batch.clone().requires_grad_()
    u = model(points)
    (slope,) = torch.autograd.grad(u.sum(), points, create_graph=True)
    return (slope.sum(1) + u[:, 0]).square().mean(), {"size": u.detach().abs().mean()}


class Forces(nn.Module):
    """A potential whose forces are its output; it counts what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = net()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        if not x.requires_grad:
            x = x.clone().requires_grad_()
        return -torch.autograd.grad(self.energy(x + 0.01 * torch.randn_like(x)).sum(), x, create_graph=True)[0]


def job(seed: int, **changes: Any) -> shoal.Job:
    settings: dict[str, Any] = {"model": net, "batch_size": 8, "epochs": 3, "name": f"{seed}", "hparams": {"lr": 0.01}}
    return shoal.Job(seed=seed, **(settings | changes))


@pytest.mark.parametrize("keep", ["last", "best"])
def test_a_step_that_asks_for_gradients(keep: Any) -> None:
    jobs = [job(i, data=X, val=X[:17] + 1, step=residual, keep=keep) for i in range(2)]
    for result, own in zip(shoal.train(jobs, device="cpu"), jobs, strict=True):
        assert_close(result, solo(own))
        assert {"val_loss", "val_size"} <= result.history[0].keys()


def test_what_is_validated_is_the_trained_network() -> None:
    result = shoal.train([job(0, data=X, val=X + 1, step=residual, batch_size=40)], device="cpu")[0]
    loss, _ = residual(result.model, X + 1)
    assert distance(result.history[-1]["val_loss"], float(loss.detach())) < 1e-9


def test_a_network_that_asks_for_gradients() -> None:
    """A validation batch is counted once, though it is tried without gradients first; draws are those of one try."""
    metric = {"size": lambda out, target: out.abs().mean()}
    settings: dict[str, Any] = {"model": Forces, "data": (X, -X), "val": (X[:17], X[:17]), "loss": F.mse_loss}
    jobs = [job(i, **settings, metrics=metric) for i in range(2)]
    results = shoal.train(jobs, device="cpu")
    for result, own in zip(results, jobs, strict=True):
        assert_close(result, solo(own))
        assert float(result.model.seen) == 3 * (40 + 17)
    outputs = results.predict(X[:4])
    assert outputs.shape == (2, 4, 3) and not outputs.requires_grad


def test_a_pack_that_is_evaluated() -> None:
    pack = shoal.Pack([Forces(), Forces()], loss=F.mse_loss)
    pack.step(X[:8], X[:8])
    assert pack.eval(X[:4]).shape == (2, 4, 3)


def test_what_fails_with_gradients_too_is_a_mistake() -> None:
    with pytest.raises(shoal.JobError, match=r"validating on the first 8 rows of val raised RuntimeError: mat1"):
        shoal.train([job(0, data=X, val=X[:, :2], step=residual)], device="cpu")


def test_other_validation_is_without_gradients() -> None:
    modes: list[bool] = []

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        if not model.training:
            modes.append(torch.is_grad_enabled())
        return residual(model, batch)[0] if model.training else model(batch).square().mean()

    shoal.train([job(0, data=X, val=X[:17], step=step)], device="cpu")
    assert modes and not any(modes)
