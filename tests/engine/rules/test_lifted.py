"""What differs between members in plain Python: numbers are lifted, one each; all else keeps them apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.engine.equality import assert_as_alone, numbers, planned, reasons, slowly, whole
from tests.engine.rules.layers import INPUTS, TARGETS, Attention, SelfAttention
from torch import Tensor, nn

import shoal

Build = Callable[[Any], nn.Module]


class Fixed(nn.Module):
    """A function of what comes in, and of a value that differs."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def rows(layer: Build) -> tuple[str, Build]:
    return "rows", lambda value: nn.Sequential(nn.Linear(6, 8, bias=False), layer(value), nn.Linear(8, 3))


def image(layer: Build) -> tuple[str, Build]:
    return "image", lambda v: nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=False), layer(v), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    )


def sequence(layer: Build, width: int) -> tuple[str, Build]:
    return "sequence", lambda v: nn.Sequential(layer(v), nn.Flatten(), nn.Linear(5 * width, 3))


def function(body: Callable[[Tensor, Any], Tensor]) -> tuple[str, Build]:
    return rows(lambda value: Fixed(lambda x: body(x, value)))


class Recurrent(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 3, 3, dropout=p, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.lstm(x)[0]
        assert isinstance(out, Tensor)
        return out


LIFTED: dict[str, tuple[tuple[str, Build], tuple[Any, ...]]] = {
    "Dropout p": (rows(nn.Dropout), (0.1, 0.5, 0.8)),
    "Dropout p, none for one": (rows(nn.Dropout), (0.5, 0.0, 0.2)),
    "Dropout p, all for one": (rows(nn.Dropout), (0.5, 1.0)),
    "Dropout2d p": (image(nn.Dropout2d), (0.1, 0.6)),
    "AlphaDropout p": (rows(nn.AlphaDropout), (0.1, 0.4)),
    "LSTM dropout": (sequence(Recurrent, 3), (0.1, 0.5)),
    "LSTM dropout, none for one": (sequence(Recurrent, 3), (0.3, 0.0)),
    "attention dropout": (sequence(lambda p: Attention("causal", p), 8), (0.1, 0.4)),
    "attention dropout, none for one": (sequence(lambda p: Attention("bool", p), 8), (0.0, 0.4)),
    "MultiheadAttention dropout": (sequence(lambda p: SelfAttention(p, True), 6), (0.1, 0.4)),
    "Transformer dropout": (
        sequence(lambda p: nn.TransformerEncoderLayer(6, 2, 8, p, batch_first=True), 6),
        (0.1, 0.4),
    ),
    "BatchNorm eps": (rows(lambda eps: nn.BatchNorm1d(8, eps=eps)), (1e-5, 1e-1)),
    "BatchNorm momentum": (image(lambda m: nn.BatchNorm2d(4, momentum=m)), (0.1, 0.7, 0.01)),
    "LayerNorm eps": (rows(lambda eps: nn.LayerNorm(8, eps=eps)), (1e-5, 1e-1)),
    "RMSNorm eps": (rows(lambda eps: nn.RMSNorm(8, eps=eps)), (1e-5, 1e-1)),
    "GroupNorm eps": (image(lambda eps: nn.GroupNorm(2, 4, eps=eps)), (1e-5, 1e-1)),
    "InstanceNorm momentum": (image(lambda m: nn.InstanceNorm2d(4, momentum=m, track_running_stats=True)), (0.1, 0.4)),
    "LeakyReLU slope": (rows(nn.LeakyReLU), (0.01, 0.3)),
    "ELU alpha": (rows(nn.ELU), (1.0, 0.5)),
    "CELU alpha": (rows(nn.CELU), (1.0, 0.5)),
    "Softplus beta": (rows(nn.Softplus), (1.0, 3.0)),
    "Hardtanh bounds": (rows(lambda v: nn.Hardtanh(-v, v)), (0.3, 0.9)),
    "Softshrink": (rows(nn.Softshrink), (0.1, 0.4)),
    "Threshold": (rows(lambda v: nn.Threshold(v, v / 2)), (0.1, 0.4)),
    "a factor": (function(lambda x, v: x * v), (0.5, 2.0)),
    "a factor, whole in one": (function(lambda x, v: v * torch.tanh(x)), (0.5, 2)),
    "a summand": (function(lambda x, v: torch.tanh(x + v) - v), (0.5, -1.5)),
    "a divisor": (function(lambda x, v: torch.tanh(x) / v + v / (2 + x.abs())), (0.5, 3.0)),
    "a power": (function(lambda x, v: x.abs() ** v), (1.5, 2.5)),
    "bounds": (function(lambda x, v: x.clamp(-v, v)), (0.2, 0.7)),
    "lerp": (function(lambda x, v: torch.lerp(x, x.tanh(), v)), (0.2, 0.7)),
    "alpha of add": (function(lambda x, v: torch.add(x, x.tanh(), alpha=v)), (0.2, 0.7)),
    "a filled tensor": (function(lambda x, v: x * torch.full((8,), v, dtype=x.dtype)), (0.2, 0.7)),
    "masked_fill": (function(lambda x, v: x.masked_fill(x > v, v)), (0.2, 0.7)),
    "where": (function(lambda x, v: torch.where(x > v, x, v)), (0.2, 0.7)),
    "noise": (function(lambda x, v: x + v * torch.randn_like(x)), (0.01, 0.3)),
    "an eps of one's own": (function(lambda x, v: F.normalize(x, eps=v) + F.layer_norm(x, (8,), eps=v)), (1e-9, 1.0)),
    "a tensor": (function(lambda x, v: x * v), (numbers(1, 8), numbers(2, 8))),
    "a tensor without dimensions": (function(lambda x, v: x * torch.tensor(v, dtype=torch.float64)), (0.3, 0.6)),
    "a mask": (function(lambda x, v: x.masked_fill(v > 0, 0.0)), (numbers(1, 8), numbers(2, 8))),
    "an index": (function(lambda x, v: x[:, v]), (whole(1, 8, 8), whole(2, 8, 8))),
}

LOSSES: dict[str, tuple[Callable[[Any], Callable[[Tensor, Tensor], Tensor]], tuple[Any, ...]]] = {
    "label smoothing": (lambda v: lambda o, y: F.cross_entropy(o, y, label_smoothing=v), (0.0, 0.1, 0.3)),
    "class weights": (
        lambda v: lambda o, y: F.cross_entropy(o, y, torch.tensor(v).double()),
        ([1.0, 2.0, 0.1], [0.3, 0.3, 4.0]),
    ),
    "a temperature": (lambda v: lambda o, y: F.cross_entropy(o / v, y), (1.0, 4.0)),
    "a penalty": (lambda v: lambda o, y: F.cross_entropy(o, y) + v * o.square().mean(), (0.0, 0.5)),
    "Huber's delta": (lambda v: lambda o, y: F.huber_loss(o[:, 0], y.double(), delta=v), (0.2, 1.0)),
    "a quantile": (lambda v: lambda o, y: torch.maximum(v * (y - o[:, 0]), (v - 1) * (y - o[:, 0])).mean(), (0.1, 0.9)),
}

APART: dict[str, tuple[tuple[str, Build], tuple[Any, Any], str]] = {
    "stride": (image(lambda v: nn.Conv2d(4, 4, 3, stride=v, padding=1)), (1, 2), "shapes"),
    "groups of a norm": (image(lambda v: nn.GroupNorm(v, 4)), (1, 2), "group_norm"),
    "padding mode": (image(lambda v: nn.Conv2d(4, 4, 3, padding=1, padding_mode=v)), ("zeros", "reflect"), ""),
    "heads": (sequence(lambda v: nn.TransformerEncoderLayer(6, v, 8, 0.0, batch_first=True), 6), (2, 3), ""),
    "norm first": (
        sequence(lambda v: nn.TransformerEncoderLayer(6, 2, 8, 0.0, norm_first=v, batch_first=True), 6),
        (False, True),
        "",
    ),
    "an approximation": (rows(lambda v: nn.GELU(approximate=v)), ("none", "tanh"), "gelu"),
    "another operator": (rows(lambda v: v()), (nn.Tanh, nn.Sigmoid), "another operator"),
    "a bias": (rows(lambda v: nn.Linear(8, 8, bias=v)), (True, False), "names"),
    "a dimension": (function(lambda x, v: x.softmax(v)), (0, 1), "softmax"),
    "a shift": (function(lambda x, v: x.roll(v, 1)), (1, 2), "roll"),
    "how often": (function(lambda x, v: x if v == 1 else x.tanh()), (1, 2), ""),
    "width": (rows(lambda v: nn.Sequential(nn.Linear(8, v), nn.Linear(v, 8))), (4, 5), "shapes"),
    "trained or not": (rows(lambda v: nn.Linear(8, 8).requires_grad_(v)), (True, False), ""),
    "training or not": (rows(lambda v: nn.BatchNorm1d(8).train(v)), (True, False), "batch_norm"),
}


def jobs(inputs: str, build: Build, values: tuple[Any, ...], **changes: Any) -> list[shoal.Job]:
    settings: dict[str, Any] = {
        "data": (INPUTS[inputs], TARGETS),
        "loss": F.cross_entropy,
        "batch_size": 8,
        "steps": 30,
    }
    return [
        shoal.Job(
            model=lambda v=v: build(v).double(),
            seed=i,
            name=f"{i}",
            hparams={"lr": 0.01, "eps": 1e-6},
            **(settings | changes),
        )
        for i, v in enumerate(values)
    ]


NOISY = ("0.qkv.bias", "0.attention.in_proj_bias", "0.self_attn.in_proj_bias")
"""They hold the bias of attention's keys, whose exact gradient is zero."""


OFTEN = {
    "Dropout p",
    "Dropout p, none for one",
    "LSTM dropout, none for one",
    "attention dropout, none for one",
    "BatchNorm eps",
    "BatchNorm momentum",
    "LayerNorm eps",
    "LeakyReLU slope",
    "a factor, whole in one",
    "a power",
    "alpha of add",
    "noise",
    "a tensor",
    "a tensor without dimensions",
    # and of what keeps members apart
    "stride",
    "groups of a norm",
    "an approximation",
    "another operator",
    "a bias",
    "trained or not",
    "training or not",
}
"""The cases of the fast tests."""


@pytest.mark.parametrize("name", slowly(LIFTED, OFTEN.__contains__))
def test_a_number_that_differs_is_each_members_own(name: str) -> None:
    (inputs, build), values = LIFTED[name]
    pack = jobs(inputs, build, values)
    assert len(planned(pack).parts) == 1, reasons(pack)
    assert_as_alone(pack, noise=NOISY)


@pytest.mark.parametrize("name", LOSSES)
def test_a_number_of_the_loss_that_differs(name: str) -> None:
    make, values = LOSSES[name]
    inputs, build = rows(lambda _: nn.Tanh())
    pack = [jobs(inputs, build, (i,), loss=make(value))[0] for i, value in enumerate(values)]
    for i, job in enumerate(pack):
        job.name, job.seed = f"{i}", i
    assert len(planned(pack).parts) == 1, reasons(pack)
    assert_as_alone(pack)


@pytest.mark.parametrize("name", slowly(APART, OFTEN.__contains__))
def test_what_is_no_number_keeps_members_apart(name: str) -> None:
    (inputs, build), values, reason = APART[name]
    pack = jobs(inputs, build, (values[0], values[1], values[0]), steps=6)
    parts = planned(pack).parts
    assert [part.members for part in parts] == [[0, 2], [1]]
    assert reason in parts[0].reason, parts[0].reason
    assert_as_alone(pack, noise=NOISY)


def test_a_class_attribute_of_the_module_is_read_for_every_member() -> None:
    """Two classes of one name, as a function makes them: their constants must not be taken for the same."""

    def build(constant: float) -> nn.Module:
        class Scaled(nn.Module):
            by = constant

            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.Linear(6, 3)

            def forward(self, x: Tensor) -> Tensor:
                return self.inner(x) * self.by

        return Scaled()

    pack = jobs("rows", build, (0.5, 2.0))
    assert_as_alone(pack)


def test_a_setting_that_changes_while_the_list_is_built_is_read_for_every_member() -> None:
    class Settings:
        rate = 0.1

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.rate = nn.Linear(6, 3), Settings.rate

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(self.inner(x), self.rate, self.training)

    def build(rate: float) -> nn.Module:
        Settings.rate = rate
        return Reads()

    assert_as_alone(jobs("rows", build, (0.1, 0.5)))
