"""Reductions over equal elements: who gets the gradient is as in torch, for a member in a stack too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.engine.equality import assert_as_alone, numbers, whole
from torch import Tensor, nn

import shoal

X, Y = numbers(1, 18, 6), whole(2, 3, 18)
REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda v: v.max(),
    "min": lambda v: v.min(),
    "amax": lambda v: v.amax(),
    "median": lambda v: v.median(),
    "aminmax": lambda v: torch.aminmax(v).max,
    "max by rows": lambda v: v.max(1).values.sum(),
    "amin by rows": lambda v: v.amin(1).sum(),
    "norm": lambda v: torch.linalg.vector_norm(v, float("inf")),
    "sort": lambda v: v.sort(1).values[:, 0].sum(),
    "topk": lambda v: v.topk(2, 1).values.sum(),
}


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.ones(2, 6))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)) * self.scale.mean(0))


@pytest.mark.parametrize("name", REDUCTIONS)
def test_equal_elements_share_a_gradient_as_they_do_alone(name: str) -> None:
    reduce = REDUCTIONS[name]

    def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        assert isinstance(model, Scaled)
        return F.cross_entropy(model(batch[0]), batch[1]) + reduce(model.scale)

    settings = {"data": (X, Y), "step": step, "optimizer": torch.optim.SGD, "batch_size": 9, "steps": 2}
    rates = (0.1, 0.03)
    assert_as_alone([shoal.Job(model=Scaled, hparams={"lr": r}, seed=i, **settings) for i, r in enumerate(rates)])
