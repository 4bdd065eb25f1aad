"""Every member alone under the real torch.optim class: the slow reference the stacked rules are held against."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.engine.optim.columns import Columns
from shoal.engine.optim.hparams import PAIRS, merge_flags, rule_for, split_hparams
from shoal.engine.optim.rule import Rule
from shoal.engine.optim.state import torch_entry, torch_values

SHAPES = [(3, 4), (5,), ()]
"""What one member's parameters look like: a matrix, a vector, a scalar."""

CASES: dict[str, tuple[type[Optimizer], list[dict[str, Any]]]] = {
    "sgd": (torch.optim.SGD, [{"lr": 0.1}, {"lr": 0.03}, {"lr": 0.0}]),
    "sgd-decay": (torch.optim.SGD, [{"lr": 0.1, "weight_decay": 0.1}, {"lr": 0.03}, {"lr": 0.2, "weight_decay": 0.01}]),
    "sgd-momentum": (
        torch.optim.SGD,
        [
            {"lr": 0.1, "momentum": 0.9, "dampening": 0.3},
            {"lr": 0.03, "momentum": 0.5, "weight_decay": 0.1},
            {"lr": 0.05, "momentum": 0.0, "dampening": 0.7},
            {"lr": 0.02, "momentum": 0.99, "dampening": 0.1},
        ],
    ),
    "sgd-nesterov": (
        torch.optim.SGD,
        [{"lr": 0.1, "momentum": 0.9, "nesterov": True}, {"lr": 0.03, "momentum": 0.5, "nesterov": True}],
    ),
    "sgd-maximize": (
        torch.optim.SGD,
        [
            {"lr": 0.01, "momentum": 0.9, "maximize": True, "weight_decay": 0.2},
            {"lr": 0.02, "momentum": 0.3, "maximize": True},
        ],
    ),
    "adam": (
        torch.optim.Adam,
        [{"lr": 0.1}, {"lr": 0.01, "betas": (0.5, 0.9), "weight_decay": 0.3}, {"lr": 0.03, "eps": 1e-2}, {"lr": 0.0}],
    ),
    "adam-amsgrad": (
        torch.optim.Adam,
        [{"lr": 0.1, "amsgrad": True}, {"lr": 0.01, "betas": (0.7, 0.8), "amsgrad": True, "weight_decay": 0.1}],
    ),
    "adam-decoupled": (
        torch.optim.Adam,
        [
            {"lr": 0.1, "decoupled_weight_decay": True, "weight_decay": 0.4},
            {"lr": 0.01, "decoupled_weight_decay": True, "maximize": False},
        ],
    ),
    "adamw": (torch.optim.AdamW, [{"lr": 0.1}, {"lr": 0.02, "weight_decay": 0.5, "betas": (0.8, 0.95)}]),
    "adamw-amsgrad-maximize": (
        torch.optim.AdamW,
        [
            {"lr": 0.1, "amsgrad": True, "maximize": True},
            {"lr": 0.02, "amsgrad": True, "maximize": True, "weight_decay": 0.0},
        ],
    ),
    "nadam": (
        torch.optim.NAdam,
        [
            {"lr": 0.1},
            {"lr": 0.02, "betas": (0.8, 0.95), "momentum_decay": 0.1, "weight_decay": 0.3},
            {"lr": 0.01, "momentum_decay": 0.0, "eps": 1e-3},
        ],
    ),
    "nadam-decoupled": (
        torch.optim.NAdam,
        [
            {"lr": 0.1, "decoupled_weight_decay": True, "weight_decay": 0.2},
            {"lr": 0.02, "decoupled_weight_decay": True, "weight_decay": 0.01},
        ],
    ),
    "radam": (
        torch.optim.RAdam,
        [
            {"lr": 0.1},
            {"lr": 0.02, "betas": (0.8, 0.95), "weight_decay": 0.3},
            {"lr": 0.02, "betas": (0.8, 0.5)},
            {"lr": 0.02, "betas": (0.8, 0.0), "eps": 1e-3},
        ],
    ),
    "radam-decoupled-maximize": (
        torch.optim.RAdam,
        [
            {"lr": 0.1, "decoupled_weight_decay": True, "weight_decay": 0.2, "maximize": True},
            {"lr": 0.02, "decoupled_weight_decay": True, "maximize": True},
        ],
    ),
    "adamax": (torch.optim.Adamax, [{"lr": 0.1}, {"lr": 0.02, "betas": (0.8, 0.9), "weight_decay": 0.3, "eps": 1e-2}]),
    "adagrad": (
        torch.optim.Adagrad,
        [
            {"lr": 0.1},
            {"lr": 0.5, "lr_decay": 0.2, "weight_decay": 0.3, "initial_accumulator_value": 0.7},
            {"lr": 0.3, "initial_accumulator_value": 0.1, "eps": 1e-2},
        ],
    ),
    "rmsprop": (torch.optim.RMSprop, [{"lr": 0.1}, {"lr": 0.02, "alpha": 0.8, "eps": 1e-2, "weight_decay": 0.2}]),
    "rmsprop-centered-momentum": (
        torch.optim.RMSprop,
        [
            {"lr": 0.05, "centered": True, "momentum": 0.9},
            {"lr": 0.02, "centered": True, "momentum": 0.0, "alpha": 0.9},
            {"lr": 0.01, "centered": True, "momentum": 0.4, "weight_decay": 0.1},
        ],
    ),
    "adadelta": (torch.optim.Adadelta, [{}, {"lr": 0.3, "rho": 0.5, "eps": 1e-3, "weight_decay": 0.2}]),
    "asgd": (
        torch.optim.ASGD,
        [
            {"lr": 0.1},
            {"lr": 0.05, "lambd": 0.02, "alpha": 0.6, "t0": 10, "weight_decay": 0.1},
            {"lr": 0.05, "t0": 3.5},
        ],
    ),
    "rprop": (
        torch.optim.Rprop,
        [{"lr": 0.01}, {"lr": 0.1, "etas": (0.3, 1.7), "step_sizes": (1e-3, 0.3)}, {"lr": 0.05, "etas": (0.8, 1.05)}],
    ),
}


def gradient(param: Tensor, target: Tensor, step: int) -> Tensor:
    """A gradient that depends on the weights, changes sign, and grows now and then (for amsgrad)."""
    wave = torch.sin(param * 3 + step) + 0.1 * torch.cos(target * step)
    return (param - target) * 0.5 + wave * (3.0 if step % 17 == 5 else 1.0)


class Alone:
    """One member on the real class."""

    def __init__(self, cls: type[Optimizer], hparams: dict[str, Any], seed: int, dtype: torch.dtype) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.params = [torch.randn(s, generator=draw, dtype=dtype).requires_grad_() for s in SHAPES]
        self.targets = [torch.randn(s, generator=draw, dtype=dtype) for s in SHAPES]
        self.optimizer = cls(self.params, **{"foreach": False, **hparams})
        self.step_count = 0

    def take(self, other: Alone) -> None:
        """Start from another member's weights and targets, in this one's dtype."""
        with torch.no_grad():
            for ours, theirs in zip([*self.params, *self.targets], [*other.params, *other.targets], strict=True):
                ours.copy_(theirs)

    def step(self) -> None:
        for param, target in zip(self.params, self.targets, strict=True):
            param.grad = gradient(param.detach(), target, self.step_count)
        self.optimizer.step()
        self.step_count += 1

    def entries(self) -> list[dict[str, Tensor]]:
        state = self.optimizer.state_dict()["state"]
        return [state.get(i, {}) for i in range(len(self.params))]


class Stacked:
    """The same members as one stack under the rule."""

    def __init__(self, cls: type[Optimizer], members: list[Alone], hparams: list[dict[str, Any]]) -> None:
        split = [split_hparams(cls, own) for own in hparams]
        assert all(part is not None for part in split)
        flags = merge_flags(cls, [part[0] for part in split if part])
        assert flags is not None
        self.rule: Rule = rule_for(cls, flags)
        self.columns = Columns([[part[1]] for part in split if part])
        self.h = self.columns.groups[0]
        self.params = [torch.stack([m.params[i].detach() for m in members]) for i in range(len(SHAPES))]
        self.targets = [torch.stack([m.targets[i] for m in members]) for i in range(len(SHAPES))]
        self.states = self.rule.init_all(self.params, self.h)

    def grads(self, steps: list[int]) -> list[Tensor]:
        return [
            torch.stack([gradient(p[m], t[m], step) for m, step in enumerate(steps)])
            for p, t in zip(self.params, self.targets, strict=True)
        ]

    def step(self, steps: list[int], active: Tensor | None = None) -> None:
        self.rule.update_all_(self.params, self.grads(steps), self.states, self.h, active)


def distance(a: Tensor, b: Tensor) -> float:
    """max|a-b| / max|b|, the measure of the promise."""
    assert a.shape == b.shape, (a.shape, b.shape)
    return float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-300))


def assert_same(stacked: Stacked, members: list[Alone], tolerance: float) -> None:
    """Weights and every entry of the state, names and dtypes included."""

    for slot, member in enumerate(members):
        numbers = stacked.columns.row(slot)[0]
        for i, entry in enumerate(member.entries()):
            assert distance(stacked.params[i][slot], member.params[i].detach()) <= tolerance, (slot, i)
            ours = to_torch_state(stacked.rule, stacked.states[i], slot, numbers)
            assert set(ours) == set(entry), (slot, i)
            for name, value in entry.items():
                assert ours[name].dtype == value.dtype, name
                assert distance(ours[name], value) <= tolerance or torch.equal(ours[name], value), (slot, i, name)


def to_torch_state(rule: Rule, state: Mapping[str, Tensor], slot: int, h: Mapping[str, float]) -> dict[str, Tensor]:
    """The entry torch has for this parameter of a member."""
    return torch_entry(rule, {name: value[slot].clone() for name, value in state.items()}, h)


def from_torch_state(
    rule: Rule, entry: Mapping[str, Any], state: Mapping[str, Tensor], slot: int, step: int | None = None
) -> None:
    """Write torch's entry for one parameter into a member's slot."""
    for stacked, value in torch_values(rule, entry, state, step=step):
        stacked[slot] = value


def group_settings(columns: Mapping[str, float]) -> dict[str, Any]:
    """A group's columns under torch's names: beta1 and beta2 are `betas` again."""
    settings: dict[str, Any] = dict(columns)
    for name, parts in PAIRS.items():
        if parts[0] in settings:
            settings[name] = tuple(settings.pop(part) for part in parts)
    return settings
