"""Users' code that runs beside a step within an epoch, and changes what the step reads or the gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.engine.equality import assert_as_alone, numbers, whole
from torch import Tensor, nn

import shoal

X, Y = numbers(0, 30, 5), whole(1, 3, 30)


@pytest.fixture(autouse=True)
def _always_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_PACK", "always")


def job(i: int, **settings: Any) -> shoal.Job:
    settings = {"hparams": {"lr": 0.05}, "epochs": 3, "batch_size": 8, "val": (X, Y), **settings}
    return shoal.Job(model=lambda: nn.Linear(5, 3).double(), data=(X, Y), seed=i, name=f"{i}", **settings)


def annealed() -> tuple[dict[str, float], Callable[[Tensor, Tensor], Tensor]]:
    """A temperature, and a loss that reads it."""
    settings = {"temperature": 1.0}
    return settings, lambda outputs, targets: F.cross_entropy(outputs / settings["temperature"], targets)


def with_annealing_optimizer(i: int) -> shoal.Job:
    settings, loss = annealed()

    class Annealing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            settings["temperature"] *= 0.9
            return super().step(closure)

    return job(i, loss=loss, optimizer=Annealing)


def with_annealing_hook(i: int) -> shoal.Job:
    settings, loss = annealed()

    def optimizer(params: Any, **hparams: Any) -> torch.optim.Optimizer:
        made = torch.optim.SGD(params, **hparams)
        made.register_step_post_hook(lambda *_: settings.update(temperature=settings["temperature"] * 0.9))
        return made

    return job(i, loss=loss, optimizer=optimizer)


def with_annealing_metric(i: int) -> shoal.Job:
    settings, loss = annealed()

    def metric(outputs: Tensor, targets: Tensor) -> float:
        settings["temperature"] *= 0.9
        return settings["temperature"]

    return job(i, loss=loss, metrics={"temperature": metric}, val_every_steps=1)


def with_hook_of_its_schedule(i: int) -> shoal.Job:
    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        optimizer.register_step_pre_hook(sign_gradients)
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    return job(i, loss=F.cross_entropy, optimizer=torch.optim.SGD, schedule=schedule)


def sign_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad.sign_()


@pytest.mark.parametrize(
    ("make", "tier"),
    [
        (with_annealing_optimizer, "serial"),
        (with_annealing_hook, "serial"),
        (with_annealing_metric, "serial"),
        (with_hook_of_its_schedule, "stacked"),
    ],
)
def test_as_alone(make: Callable[[int], shoal.Job], tier: str) -> None:
    results = shoal.train([make(i) for i in range(3)], device="cpu")
    assert {result.tier for result in results} == {tier}
    for i, result in enumerate(results):
        assert_same_as(result, shoal.solo(make(i)))


def assert_same_as(result: shoal.Result, alone: shoal.Result) -> None:
    torch.testing.assert_close(result.model.state_dict(), alone.model.state_dict(), rtol=1e-9, atol=1e-12)
    columns = [key for key in alone.history[0] if key != "seconds"]
    for row, expected in zip(result.history, alone.history, strict=True):
        assert [row[key] for key in columns] == pytest.approx([expected[key] for key in columns])


def test_an_optimizer_that_only_counts_is_stacked() -> None:
    counts = {"steps": 0}

    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            counts["steps"] += 1
            return super().step(closure)

    assert_as_alone([job(i, loss=F.cross_entropy, optimizer=Counting) for i in range(3)])
    assert counts["steps"] > 0
