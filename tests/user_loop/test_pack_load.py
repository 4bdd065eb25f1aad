"""Members of a `Pack` that are given other weights, added, or left out of a step, alike in every tier."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.engine.equality import distance, numbers, whole
from torch import Tensor, nn
from torch.optim import lr_scheduler

import shoal

X, Y = numbers(0, 12, 5), whole(1, 3, 12)


class Counting(nn.Module):
    """A classifier that counts its batches in a buffer that is not saved."""

    def __init__(self, branches: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3).double()
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.branches = branches

    def forward(self, x: Tensor) -> Any:
        self.seen += 1
        if self.branches and float(x.sum()) > 1e9:  # such a network cannot be stacked
            x = -x
        return self.layer(x) / self.seen.sqrt()


class OwnAdam(torch.optim.Adam):
    """A class without a stacking rule."""


TIERS = [
    pytest.param(torch.optim.AdamW, False, "stacked", id="stacked"),
    pytest.param(OwnAdam, False, "stacked", id="stacked with optimizers of their own"),
    pytest.param(torch.optim.AdamW, True, "serial", id="serial"),
]


def trained(optimizer: Any, branches: bool, tier: str, **settings: Any) -> shoal.Pack:
    torch.manual_seed(0)
    models = [Counting(branches) for _ in range(3)]
    pack = shoal.Pack(models, optimizer=optimizer, hparams={"lr": 0.1}, loss=F.cross_entropy, **settings)
    for _ in range(4):
        pack.step(X, Y)
    assert {t for t, _ in pack.tiers.values()} == {tier}
    return pack


@pytest.mark.parametrize(("optimizer", "branches", "tier"), TIERS)
def test_members_that_are_given_one_state_train_apart(optimizer: Any, branches: bool, tier: str) -> None:
    pack = trained(optimizer, branches, tier)
    weights, state = pack.member(0).state_dict(), pack.optimizer_state(0)
    untouched = copy.deepcopy(state)
    for id in (1, 2):
        pack.load(id, weights, optimizer_state=state)
    plain = Counting(branches)
    plain.load_state_dict(weights)
    plain.seen.fill_(4)  # load replaces what a state_dict has, and nothing else
    own = optimizer(plain.parameters(), lr=0.1)
    own.load_state_dict(copy.deepcopy(untouched))
    for _ in range(3):
        pack.step(X, Y)
        own.zero_grad()
        F.cross_entropy(plain(X), Y).backward()
        own.step()
    for id in pack.ids:
        assert distance(pack.member(id).layer.weight, plain.layer.weight) < 1e-9
        assert distance(pack.optimizer_state(id)["state"][0]["exp_avg"], own.state_dict()["state"][0]["exp_avg"]) < 1e-9
    assert torch.equal(state["state"][0]["exp_avg"], untouched["state"][0]["exp_avg"])


@pytest.mark.parametrize(("optimizer", "branches", "tier"), TIERS)
def test_a_fresh_state_leaves_the_schedule(optimizer: Any, branches: bool, tier: str) -> None:
    pack = trained(optimizer, branches, tier, schedule=lambda o: lr_scheduler.ExponentialLR(o, 0.5))
    pack.load(1, pack.member(0).state_dict())
    assert not pack.optimizer_state(1)["state"]
    assert pack.optimizer_state(1)["param_groups"][0]["lr"] == pytest.approx(0.1 * 0.5**4)
    pack.step(X, Y)
    assert float(pack.optimizer_state(1)["state"][0]["step"]) == 1
    assert pack.optimizer_state(1)["param_groups"][0]["lr"] == pytest.approx(0.1 * 0.5**5)


@pytest.mark.parametrize(("optimizer", "branches", "tier"), TIERS)
def test_a_state_that_does_not_fit_changes_nothing(optimizer: Any, branches: bool, tier: str) -> None:
    pack, untouched = (trained(optimizer, branches, tier) for _ in range(2))
    weights = nn.Linear(5, 3).state_dict()
    with pytest.raises(RuntimeError, match="Missing key"):
        pack.load(1, {"layer.weight": weights["weight"]})
    with pytest.raises(ValueError, match="number of parameter groups"):
        pack.load(1, pack.member(0).state_dict(), optimizer_state={"state": {}, "param_groups": []})
    assert torch.equal(pack.step(X, Y), untouched.step(X, Y))


def test_a_step_of_no_member() -> None:
    pack = trained(*TIERS[0].values)
    assert pack.step(X, Y, members=[]).shape == (0,)


def test_a_new_member_steps_before_the_others_do() -> None:
    pack = trained(*TIERS[0].values)
    alone = Counting(branches=False)
    new = pack.add(alone, hparams={"lr": 0.1})
    pack.step(X[None], Y[None], per_member=True, members=[new])
    assert pack.tiers[new] == ("stacked", "one computation")
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.1)
    F.cross_entropy(alone(X), Y).backward()
    optimizer.step()
    assert distance(pack.member(new).layer.weight, alone.layer.weight) < 1e-9
