"""Which settings become columns, which structure, and which mean that there is no rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from shoal.engine.optim import (
    Columns,
    Flags,
    from_torch_state,
    merge_flags,
    optimizer_state_dict,
    rule_for,
    split_hparams,
    to_torch_state,
)


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
    assert flags == {"amsgrad": False, "decoupled_weight_decay": True, "maximize": False, "weight_decay": True}
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
    assert len({plain[0], Flags(dict(plain[0])), decayed[0]}) == 2
    merged = merge_flags(torch.optim.SGD, [plain[0], decayed[0]])
    assert merged is not None and merged["weight_decay"] and not merged["momentum"]
    assert merge_flags(torch.optim.SGD, [plain[0], nesterov[0]]) is None


def test_rule_for_what_has_none() -> None:
    with pytest.raises(ValueError, match="no stacked rule for LBFGS"):
        rule_for(torch.optim.LBFGS, Flags())
    with pytest.raises(ValueError, match=r"has no flags \['amsgrad'\]"):
        rule_for(torch.optim.SGD, {"amsgrad": True})


def test_columns_are_one_block_with_one_number_per_member() -> None:
    columns = Columns(
        [[{"lr": 1.0, "eps": 2.0}, {"lr": 3.0, "eps": 4.0}], [{"eps": 6.0, "lr": 5.0}, {"lr": 7.0, "eps": 8.0}]]
    )
    assert columns.groups[0]["lr"].tolist() == [1, 5] and columns.groups[1]["eps"].tolist() == [4, 8]
    columns.set(1, 0, "eps", 9.0)
    assert columns.packed[0].tolist() == [[1, 5], [2, 9]]
    columns.packed.copy_(columns.packed * 2)
    assert columns.groups[1]["lr"].tolist() == [6, 14]
    assert columns.row(1) == [{"lr": 10.0, "eps": 18.0}, {"lr": 14.0, "eps": 16.0}]
    columns.set_row(0, columns.row(1))
    assert columns.row(0) == columns.row(1)
    kept = columns.on(columns.packed[:, :, [1]])
    kept.set(0, 0, "lr", 0.0)
    assert len(kept) == 1 and columns.row(1)[0]["lr"] == 10.0
    with pytest.raises(KeyError, match="no column 'momentum'"):
        columns.set(0, 0, "momentum", 0.9)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([], "at least one member"),
        ([[{"lr": 1.0}], [{"lr": 1.0}, {"lr": 1.0}]], "member 1 has 2 param groups"),
        ([[{"lr": 1.0}], [{"eps": 1.0}]], "member 1 has the numbers"),
    ],
)
def test_columns_must_agree(members: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Columns(members)


def test_state_that_does_not_fit_is_refused() -> None:
    rule = rule_for(torch.optim.Adam, Flags())
    state = rule.init(torch.zeros(2, 3))
    entry = {"step": torch.tensor(3.0), "exp_avg": torch.zeros(3)}
    with pytest.raises(ValueError, match=r"missing \['exp_avg_sq'\]"):
        from_torch_state(rule, entry, state, 0)
    with pytest.raises(ValueError, match=r"exp_avg has shape \(4,\), the parameter \(3,\)"):
        from_torch_state(rule, {**entry, "exp_avg": torch.zeros(4), "exp_avg_sq": torch.zeros(3)}, state, 0)


def test_state_is_copied_out_not_viewed() -> None:
    rule = rule_for(torch.optim.Adam, Flags())
    param = torch.ones(8, 3)
    h = Columns([[{"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.0}]] * 8).groups[0]
    state = rule.init(param)
    rule.update_(param, torch.ones(8, 3), state, h)
    entry = to_torch_state(rule, state, 2, {})
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
    with pytest.raises(ValueError, match="1 states in 2 groups for 2 parameters"):
        optimizer_state_dict(optimizer.state_dict()["param_groups"], [{}], settings)
