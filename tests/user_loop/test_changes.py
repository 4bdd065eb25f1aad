"""`shoal.Pack`: what the user's own loop changes between two steps takes effect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.engine.equality import TOLERANCE, distance, numbers
from torch import Tensor, nn

import shoal
from shoal.engine.python_state import watch

X, Y = numbers(1, 8, 6), numbers(2, 8, 1)
CONFIG = {"beta": 0.0}
STEPS = 12


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(6, 8), nn.Linear(8, 1), nn.Dropout(0.2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.drop(torch.tanh(self.a(x)))) * (1.0 + CONFIG.get("scale", 0.0))


def loss_of(beta: Callable[[], float]) -> Callable[[Any, Any], Tensor]:
    return lambda out, target: F.mse_loss(out, target) + beta() * out.pow(2).mean()


def networks(count: int = 3) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Net() for _ in range(count)]


def rates(count: int = 3) -> list[dict[str, float]]:
    return [{"lr": 0.01 * (place + 1)} for place in range(count)]


def schedule(step: int) -> float:
    return 1.0 / (1 + step)


def alone(models: list[nn.Module], loss: Any, change: Callable[[int], object]) -> list[nn.Module]:
    """Every member in a plain loop of its own."""
    for place, model in enumerate(models):
        torch.manual_seed(place)
        optimizer = torch.optim.AdamW(model.parameters(), **rates()[place])
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
        for step in range(STEPS):
            change(step)
            optimizer.zero_grad()
            loss(model(X), Y).backward()
            optimizer.step()
            scheduler.step()
    return models


def assert_equal(pack: shoal.Pack, expected: list[nn.Module]) -> None:
    for id, model in zip(pack.ids, expected, strict=True):
        for name, value in pack.member(id).state_dict().items():
            assert distance(value, model.state_dict()[name]) <= TOLERANCE, (id, name)


def set_beta(step: int) -> None:
    CONFIG["beta"] = 0.5 * (step // 5)


@pytest.mark.parametrize("change", [set_beta, lambda step: CONFIG.update(scale=0.1 * (step // 4))])
def test_a_value_that_the_loop_changes_takes_effect(change: Callable[[int], object]) -> None:
    loss = loss_of(lambda: CONFIG["beta"])
    expected = alone(networks(), loss, change)
    CONFIG.clear()
    CONFIG["beta"] = 0.0
    pack = shoal.Pack(networks(), hparams=rates(), loss=loss, schedule=schedule, seeds=range(3))
    for step in range(STEPS):
        change(step)
        pack.step(X, Y)
    assert {tier for tier, _ in pack.tiers.values()} == {"stacked"}
    assert_equal(pack, expected)
    CONFIG.clear()
    CONFIG["beta"] = 0.0


def test_a_value_that_changes_at_every_step_costs_the_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "MOST_CHANGES", 2)
    loss = loss_of(lambda: CONFIG["beta"])

    def change(step: int) -> None:
        CONFIG["beta"] = 0.1 * step

    expected = alone(networks(), loss, change)
    CONFIG["beta"] = 0.0
    pack = shoal.Pack(networks(), hparams=rates(), loss=loss, schedule=schedule, seeds=range(3))
    for step in range(STEPS):
        change(step)
        pack.step(X, Y)
    assert_equal(pack, expected)
    assert {reason for tier, reason in pack.tiers.values() if tier == "serial"} == {
        f"what its step reads changes too often (CONFIG['beta'] of module {__name__})"
    }
    CONFIG["beta"] = 0.0


def test_only_whose_loss_reads_it_is_concerned_and_outputs_are_of_now() -> None:
    values = [{"beta": 0.0}, {"beta": 0.0}]
    losses = [loss_of(lambda own=own: own["beta"]) for own in values]  # type: ignore[misc]
    models = networks(2)
    pack = shoal.Pack(models, hparams={"lr": 0.01}, loss=losses, optimizer=torch.optim.SGD)
    plain = [networks(2)[place] for place in range(2)]
    states = [torch.Generator().manual_seed(place).get_state() for place in range(2)]
    for step in range(6):
        values[0]["beta"] = 0.5 * (step // 3)
        pack.step(X, Y)
        for place, model in enumerate(plain):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            torch.set_rng_state(states[place])
            losses[place](model(X), Y).backward()
            states[place] = torch.get_rng_state()
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(pack, plain)
    before = pack.eval(X)
    CONFIG["scale"] = 1.0
    assert torch.allclose(pack.eval(X), 2 * before)
    del CONFIG["scale"]
