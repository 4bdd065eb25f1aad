"""The optimizer state of a stack's members, where callbacks change which weights a step trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.engine.equality import TOLERANCE, distance, numbers
from torch import Tensor, nn

import shoal

X, Y = numbers(1, 24, 6), numbers(2, 24, 1)
EPOCHS = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8, dtype=torch.float64), nn.Linear(8, 1, dtype=torch.float64)


def make_step(settings: dict[str, bool]) -> Any:
    def step(model: Net, batch: tuple[Tensor, Tensor]) -> Tensor:
        hidden = torch.tanh(model.a(batch[0]))
        return F.mse_loss(model.b(hidden.detach() if settings["frozen"] else hidden), batch[1])

    return step


def plain_loop(job: shoal.Job, frozen_in: set[int]) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(job.seed)
    model, order = Net(), torch.Generator().manual_seed(job.seed)
    optimizer = job.optimizer(model.parameters(), **job.hparams)
    for epoch in range(EPOCHS):
        step = make_step({"frozen": epoch in frozen_in})
        for rows in torch.randperm(len(X), generator=order).split(8):
            optimizer.zero_grad()
            step(model, (X[rows], Y[rows])).backward()
            optimizer.step()
    return model, optimizer.state_dict()["state"]


@pytest.mark.parametrize("frozen_in", [{2, 3}, {2}], ids=["to the end", "for an epoch"])
@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.RMSprop])
def test_weights_that_get_no_gradient_any_more_keep_their_state(frozen_in: set[int], optimizer: Any) -> None:
    settings = {"frozen": False}
    common: dict[str, Any] = {"model": Net, "data": (X, Y), "step": make_step(settings), "batch_size": 8}
    jobs = [
        shoal.Job(optimizer=optimizer, hparams={"lr": 0.01 * (seed + 1)}, seed=seed, epochs=EPOCHS, **common)
        for seed in range(3)
    ]

    def freeze(view: shoal.MemberView) -> None:
        settings["frozen"] = view.epoch in frozen_in

    results = shoal.train(jobs, device="cpu", callbacks=[freeze])
    assert {result.tier for result in results} == {"stacked"}
    for job, result in zip(jobs, results, strict=True):
        model, state = plain_loop(job, frozen_in)
        weights, found = result.model.state_dict(), result.optimizer_state["state"]
        assert all(distance(weights[name], value) < TOLERANCE for name, value in model.state_dict().items())
        assert found.keys() == state.keys()
        entries = ((found[index][name], value) for index, entry in state.items() for name, value in entry.items())
        assert all(distance(ours, value) < TOLERANCE for ours, value in entries)
