"""Masks, sizes and conditions that a step computes from constants alone do not keep it from being stacked."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.engine.equality import assert_as_alone, numbers, reasons, train
from torch import Tensor, nn

import shoal

X = numbers(1, 20, 6)
EDGES = torch.tensor([[0, 1, 2, 2, 3], [1, 1, 0, 2, 4]])
Step = Callable[[nn.Module, Any], Tensor]


class Net(nn.Module):
    def __init__(self, kept: int = 3) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4, dtype=torch.float64)
        self.kept = torch.arange(4) < kept
        self.register_buffer("own", torch.arange(4) < 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = F.dropout(torch.tanh(self.layer(x)), 0.1, self.training)
        return out


def without_diagonal(model: nn.Module, batch: Any) -> Tensor:
    z = F.normalize(model(batch[0]))
    mask = ~torch.eye(len(z), dtype=torch.bool)
    return torch.logsumexp((z @ z.T)[mask].view(len(z), -1), 1).mean()


def selected(model: nn.Module, batch: Any) -> Tensor:
    z = model(batch[0])
    mask = torch.ones_like(z[:, 0], dtype=torch.bool)
    mask[:2] = False
    return z.masked_select(mask.unsqueeze(1)).pow(2).mean()


def written_in_a_view(model: nn.Module, batch: Any) -> Tensor:
    z = model(batch[0])
    table = z.new_zeros(len(z), 4)
    table[0].add_(1)
    return z[table > 0].sum() * table.max().item() + z.pow(2).mean()


def solved(model: nn.Module, batch: Any) -> Tensor:
    """Euler's method, as a library of solvers would do it."""
    times = torch.linspace(0, 1, 4, dtype=torch.float64)
    if not (times[1:] > times[:-1]).all():
        raise ValueError("times must increase")
    y = batch[0][:, :4]
    for a, b in pairwise(times):
        y = y + (b - a) * model(F.pad(y, (0, 2)))
    return y.pow(2).mean()


def over_axes(model: nn.Module, batch: Any) -> Tensor:
    axes = torch.arange(1, 3).tolist()
    return torch.sum(model(batch[0]).view(-1, 2, 2).pow(2), dim=axes).mean()


def graph(model: nn.Module, batch: Any) -> Tensor:
    edges = EDGES[:, EDGES[0] != EDGES[1]]
    z = model(batch[0])
    assert int(edges.max()) < 5
    return z.new_zeros(5, 4).index_add(0, edges[1], z[:4][edges[0]]).pow(2).mean() + z[edges[0].unique()].mean()


def of_the_model(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0])[:, model.kept].pow(2).mean()  # type: ignore[index]


def of_the_batch(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0])[batch[0][:, 0] > 0].pow(2).mean()


def of_a_buffer(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0])[:, model.own].pow(2).mean()  # type: ignore[index]


def of_weights(model: nn.Module, batch: Any) -> Tensor:
    z = model(batch[0])
    table = torch.zeros(len(z), 4, dtype=torch.float64)
    table[0].add_(z[0].detach())  # a view that is written to
    return z[table > 0].sum() + z.pow(2).mean()


def drawn(model: nn.Module, batch: Any) -> Tensor:
    z = model(batch[0])
    return z[torch.zeros(len(z)).bernoulli_(0.5) > 0].sum() + z.pow(2).mean()


def jobs(step: Step, make: Callable[[int], nn.Module] = lambda seed: Net(), **settings: Any) -> list[shoal.Job]:
    common: dict[str, Any] = {"data": (X,), "step": step, "batch_size": 8, "epochs": 3} | settings
    return [shoal.Job(model=lambda seed=seed: make(seed), seed=seed, **common) for seed in range(3)]


@pytest.mark.parametrize(
    "step", [without_diagonal, selected, written_in_a_view, solved, over_axes, graph, of_the_model]
)
def test_what_depends_on_constants_is_stacked(step: Step) -> None:
    assert_as_alone(jobs(step, val=(X,)))


@pytest.mark.parametrize("step", [of_the_batch, of_a_buffer, of_weights, drawn])
def test_what_depends_on_anything_else_is_not(step: Step) -> None:
    assert_as_alone(jobs(step), tier="serial")
    assert "depends on the data" in reasons(jobs(step))


def test_members_may_have_other_constants() -> None:
    pack = jobs(of_the_model, lambda seed: Net(kept=1 + seed))
    for result in train(pack):
        alone = shoal.solo(result.job)
        assert torch.allclose(result.model.layer.weight, alone.model.layer.weight, rtol=1e-12, atol=0.0)


def test_a_constant_may_change_between_epochs() -> None:
    shared = torch.tensor([True, True, False, False])

    def step(model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0])[:, shared].pow(2).mean()

    def change(view: shoal.MemberView) -> None:
        shared.copy_(torch.arange(4) > view.epoch)

    weights = []
    for pack in (jobs(step), jobs(step)[:1]):  # stacked, and one by itself
        shared.copy_(torch.tensor([True, True, False, False]))
        results = shoal.train(pack, device="cpu", callbacks=[change])
        weights.append(results[0].model.layer.weight)
    assert torch.allclose(*weights, rtol=1e-12, atol=0.0)
    shared.copy_(torch.tensor([True, True, False, False]))
    unchanged = shoal.train(jobs(step), device="cpu")[0].model.layer.weight
    assert not torch.allclose(unchanged, weights[0], rtol=1e-6)
