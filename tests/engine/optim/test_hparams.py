"""Which settings become columns, which structure, and which mean that there is no rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.engine.optim.alone import from_torch_state
from torch import nn
from torch.optim import Optimizer

import shoal
from shoal.engine.optim.columns import Columns
from shoal.engine.optim.hparams import merge_flags, rule_for, split_hparams
from shoal.engine.optim.rule import Flags
from shoal.engine.optim.state import optimizer_state_dict


class MyAdam(torch.optim.Adam):
    """A subclass may override anything."""


@pytest.mark.parametrize(
    ("cls", "hparams"),
    [
        (MyAdam, {"lr": 0.1}),
        (torch.optim.LBFGS, {}),
        (torch.optim.SparseAdam, {}),
        (torch.optim.Adam, {"differentiable": True}),
        (torch.optim.SGD, {"lr": torch.tensor(0.1, requires_grad=True)}),
        (torch.optim.SGD, {"lr": 0.1, "momentun": 0.9}),
        (torch.optim.SGD, {"lr": "fast"}),
        (torch.optim.Adam, {"betas": 0.9}),
        (torch.optim.Adam, {"betas": (0.9, 0.99, 0.999)}),
        (torch.optim.SGD, {"lr": 0.1, "betas": (0.9, 0.99)}),
        (torch.optim.AdamW, {"lr": torch.ones(2)}),
    ],
)
def test_no_rule(cls: type[Optimizer], hparams: dict[str, Any]) -> None:
    assert split_hparams(cls, hparams) is None


def test_settings_are_complete() -> None:
    split = split_hparams(torch.optim.AdamW, {"lr": torch.tensor([0.5]), "fused": True, "foreach": None})
    assert split is not None
    flags, columns = split
    assert columns == {"lr": 0.5, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
    assert flags == {"decoupled_weight_decay", "weight_decay"}
    split = split_hparams(torch.optim.Rprop, {"etas": (0.2, 1.5), "step_sizes": (1e-3, 2)})
    assert split is not None
    assert split[1] == {"lr": 0.01, "etaminus": 0.2, "etaplus": 1.5, "step_size_min": 1e-3, "step_size_max": 2.0}


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_a_real_param_group_is_understood(cls: type[Optimizer]) -> None:
    """What a scheduler writes into the group is no obstacle."""
    optimizer = cls([torch.zeros(2, requires_grad=True)], lr=0.25)  # type: ignore[call-arg]
    torch.optim.lr_scheduler.StepLR(optimizer, 3)
    assert split_hparams(cls, optimizer.param_groups[0]) == split_hparams(cls, {"lr": 0.25})


def test_flags_group_members() -> None:
    plain, decayed, nesterov = (
        split_hparams(torch.optim.SGD, own)
        for own in (
            {"lr": 1.0},
            {"lr": 1.0, "weight_decay": 0.1},
            {"lr": 1.0, "momentum": 0.9, "nesterov": True},
        )
    )
    assert plain and decayed and nesterov
    merged = merge_flags(torch.optim.SGD, [plain[0], decayed[0]])
    assert merged == {"weight_decay"}
    assert merge_flags(torch.optim.SGD, [plain[0], nesterov[0]]) is None


def test_columns_are_one_block_with_one_number_per_member() -> None:
    columns = Columns(
        [[{"lr": 1.0, "eps": 2.0}, {"lr": 3.0, "eps": 4.0}], [{"eps": 6.0, "lr": 5.0}, {"lr": 7.0, "eps": 8.0}]]
    )
    assert columns.groups[0]["lr"].tolist() == [1, 5] and columns.groups[1]["eps"].tolist() == [4, 8]
    columns.groups[0]["eps"][1] = 9.0
    assert columns.packed[0].tolist() == [[1, 5], [2, 9]]
    columns.packed.copy_(columns.packed * 2)
    assert columns.groups[1]["lr"].tolist() == [6, 14]
    assert columns.row(1) == [{"lr": 10.0, "eps": 18.0}, {"lr": 14.0, "eps": 16.0}]
    columns.set_row(0, columns.row(1))
    assert columns.row(0) == columns.row(1)
    kept = columns.on(columns.packed[:, :, [1]])
    kept.groups[0]["lr"][0] = 0.0
    assert kept.packed.shape == (2, 2, 1) and columns.row(1)[0]["lr"] == 10.0


def test_state_that_does_not_fit_is_refused() -> None:
    rule = rule_for(torch.optim.Adam, Flags())
    state = rule.init(torch.zeros(2, 3))
    entry = {"step": torch.tensor(3.0), "exp_avg": torch.zeros(3)}
    with pytest.raises(ValueError, match=r"missing \['exp_avg_sq'\]"):
        from_torch_state(rule, entry, state, 0)
    with pytest.raises(ValueError, match=r"exp_avg has shape \(4,\), the parameter \(3,\)"):
        from_torch_state(rule, {**entry, "exp_avg": torch.zeros(4), "exp_avg_sq": torch.zeros(3)}, state, 0)


def test_state_is_copied_out_not_viewed() -> None:
    pack = shoal.Pack([nn.Linear(3, 1, bias=False) for _ in range(8)], loss=F.mse_loss)
    pack.step(torch.ones(4, 3), torch.ones(4, 1))
    assert pack.tiers[2][0] == "stacked"
    entry = pack.optimizer_state(2)["state"][0]
    assert entry["exp_avg"].untyped_storage().nbytes() == 3 * 4
    assert entry["step"].dtype == torch.float32 and entry["step"].shape == ()


def test_a_whole_state_dict_with_groups_and_a_schedule() -> None:
    params = [torch.zeros(2, requires_grad=True), torch.zeros(3, requires_grad=True)]
    optimizer = torch.optim.SGD([{"params": [params[0]]}, {"params": [params[1]], "momentum": 0.5}], lr=1, momentum=0)
    settings = [{"lr": 1.0, "initial_lr": 1.0}, {"lr": 0.25, "initial_lr": 1.0, "momentum": 0.5}]
    state = optimizer_state_dict(
        optimizer.state_dict()["param_groups"], [{}, {"momentum_buffer": torch.ones(3)}], settings
    )
    assert list(state["state"]) == [1]
    assert [group["params"] for group in state["param_groups"]] == [[0], [1]]
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[1]["lr"] == 0.25 and optimizer.param_groups[0]["initial_lr"] == 1.0
