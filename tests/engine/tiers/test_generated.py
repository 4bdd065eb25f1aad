"""Networks nobody thought of, layers, widths, options, optimizers and batches drawn at random: each as alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.engine.equality import assert_as_alone, numbers, planned, whole
from torch import Tensor, nn

import shoal

N, C = 19, 3
Y = whole(2, C, N)
PLAIN = [nn.ReLU, nn.Tanh, nn.GELU, nn.SiLU, nn.Softplus, nn.ELU, nn.LeakyReLU, nn.Hardswish, nn.Sigmoid, nn.Mish]


class Add(nn.Module):
    """A residual connection around a layer that keeps the width."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Gate(nn.Module):
    """Two branches, multiplied."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * torch.sigmoid(self.b(x))


Spec = list[tuple[Any, ...]]
"""What to build, as plain data, so that a failure prints as something to read and to build again."""

# Widths begin at 3: a norm over one or two numbers gives signs, and then every gradient is rounding.
rates = st.sampled_from([0.0, 0.1, 0.5])
flat_layers = st.one_of(
    st.tuples(st.just("linear"), st.integers(3, 9), st.booleans()),
    st.tuples(st.just("act"), st.integers(0, len(PLAIN) - 1)),
    st.tuples(st.just("layer norm"), st.booleans()),
    st.tuples(st.just("rms norm")),
    st.tuples(st.just("batch norm"), st.booleans(), st.sampled_from([0.1, 0.4])),
    st.tuples(st.just("dropout"), rates),
    st.tuples(st.just("residual"), st.booleans()),
    st.tuples(st.just("gate")),
    st.tuples(st.just("prelu")),
)
image_layers = st.one_of(
    st.tuples(st.just("conv"), st.integers(3, 4), st.sampled_from([1, 3]), st.integers(1, 2), st.booleans()),
    st.tuples(st.just("depthwise"), st.sampled_from(["zeros", "reflect", "circular"])),
    st.tuples(st.just("act"), st.integers(0, len(PLAIN) - 1)),
    st.tuples(st.just("batch norm"), st.booleans(), st.sampled_from([0.1, 0.4])),
    st.tuples(st.just("group norm")),
    st.tuples(st.just("dropout"), rates),
    st.tuples(st.just("pool"), st.sampled_from([nn.MaxPool2d, nn.AvgPool2d])),
    st.tuples(st.just("upsample"), st.sampled_from(["nearest", "bilinear"])),
)
sequence_layers = st.one_of(
    st.tuples(st.just("linear"), st.sampled_from([4, 6]), st.booleans()),
    st.tuples(st.just("lstm"), st.sampled_from([2, 4]), st.integers(1, 2), st.booleans(), st.sampled_from([0.0, 0.3])),
    st.tuples(st.just("gru"), st.sampled_from([2, 4]), st.integers(1, 2), st.booleans(), st.sampled_from([0.0, 0.3])),
    st.tuples(st.just("encoder"), st.sampled_from([0.0, 0.2]), st.booleans()),
    st.tuples(st.just("layer norm"), st.booleans()),
    st.tuples(st.just("act"), st.integers(0, len(PLAIN) - 1)),
    st.tuples(st.just("dropout"), rates),
)
optimizers = st.sampled_from(
    [
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.SGD, {"nesterov": True, "momentum": 0.5}),
        (torch.optim.Adam, {"eps": 1e-6}),
        (torch.optim.AdamW, {"amsgrad": True, "eps": 1e-6}),
        (torch.optim.RMSprop, {"eps": 1e-5}),
        (torch.optim.Adagrad, {}),
    ]
)


def common(kind: str, options: tuple[Any, ...], width: int) -> nn.Module:
    """Layers that do not change the width."""
    if kind == "act":
        return PLAIN[options[0]]()
    if kind == "dropout":
        return nn.Dropout(options[0])
    if kind == "layer norm":
        return nn.LayerNorm(width, elementwise_affine=options[0])
    if kind == "rms norm":
        return nn.RMSNorm(width)
    if kind == "residual":
        return Add(nn.Linear(width, width, bias=options[0]))
    if kind == "gate":
        return Gate(width)
    assert kind == "prelu", kind
    return nn.PReLU(width)


def build_flat(spec: Spec, width: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(5, width)]
    for kind, *options in spec:
        if kind == "linear":
            layers.append(nn.Linear(width, options[0], bias=options[1]))
            width = options[0]
        elif kind == "batch norm":
            layers += [Gate(width), nn.BatchNorm1d(width, affine=options[0], momentum=options[1])]
        else:
            layers.append(common(kind, tuple(options), width))
    return nn.Sequential(*layers, nn.Linear(width, C)).double()


def build_image(spec: Spec, width: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(2, width, 3, padding=1)]
    for kind, *options in spec:
        if kind == "conv":
            layers.append(
                nn.Conv2d(width, options[0], options[1], options[2], padding=options[1] // 2, bias=options[3])
            )
            width = options[0]
        elif kind == "depthwise":
            layers += [
                nn.AdaptiveAvgPool2d(4),
                nn.Conv2d(width, width, 3, padding=1, groups=width, padding_mode=options[0]),
            ]
        elif kind == "batch norm":
            square = nn.Conv2d(width, width, 1, bias=False)
            layers += [nn.Tanh(), square, nn.BatchNorm2d(width, affine=options[0], momentum=options[1])]
        elif kind == "group norm":
            layers.append(nn.GroupNorm(1, width))
        elif kind == "pool":
            layers += [nn.AdaptiveAvgPool2d(4), options[0](2)]
        elif kind == "upsample":
            layers += [nn.AdaptiveMaxPool2d(3), nn.Upsample(scale_factor=2, mode=options[0])]
        else:
            layers.append(common(kind, tuple(options), width))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, C)).double()


class Recurrent(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)[0]
        assert isinstance(out, Tensor)
        return out


def build_sequence(spec: Spec, width: int) -> nn.Module:
    width = 4
    layers: list[nn.Module] = [nn.Linear(5, width)]
    for kind, *options in spec:
        if kind == "linear":
            layers.append(nn.Linear(width, options[0], bias=options[1]))
            width = options[0]
        elif kind in ("lstm", "gru"):
            hidden, depth, both, p = options
            make = nn.LSTM if kind == "lstm" else nn.GRU
            inner = make(width, hidden, depth, dropout=p if depth > 1 else 0.0, bidirectional=both, batch_first=True)
            layers.append(Recurrent(inner))
            width = hidden * (2 if both else 1)
        elif kind == "encoder":
            layers.append(nn.TransformerEncoderLayer(width, 2, 5, options[0], batch_first=True, norm_first=options[1]))
        else:
            layers.append(common(kind, tuple(options), width))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * width, C)).double()


KINDS = {
    "flat": (flat_layers, build_flat, numbers(1, N, 5)),
    "image": (image_layers, build_image, numbers(3, N, 2, 5, 5)),
    "sequence": (sequence_layers, build_sequence, numbers(4, N, 4, 5)),
}
networks = st.sampled_from(list(KINDS)).flatmap(lambda k: st.tuples(st.just(k), st.lists(KINDS[k][0], max_size=5)))


@st.composite
def packs(draw: st.DrawFn) -> dict[str, Any]:
    """A list of jobs as plain data: one network, what differs between the members, and what they share."""
    return {
        "network": draw(networks),
        "width": draw(st.integers(3, 7)),
        "optimizer": draw(optimizers),
        "members": draw(
            st.lists(st.tuples(st.integers(0, 99), st.sampled_from([0.003, 0.01, 0.05])), min_size=1, max_size=3)
        ),
        "batch_size": draw(st.sampled_from([3, 5, 8, 19, 32])),
        "accumulate": draw(st.sampled_from([1, 1, 2])),
        "clip_norm": draw(st.sampled_from([None, 0.5])),
        "steps": draw(st.integers(5, 25)),
        "one order": draw(st.booleans()),
    }


def noise(model: nn.Module) -> list[str]:
    """The biases that hold the biases of attention's keys, whose exact gradient is zero."""
    return [name for name, _ in model.named_parameters() if name.endswith("in_proj_bias")]


def check(pack: dict[str, Any]) -> None:
    kind, spec = pack["network"]
    optimizer, hparams = pack["optimizer"]
    _, build, data = KINDS[kind]
    jobs = [
        shoal.Job(
            model=lambda: build(spec, pack["width"]),
            data=(data, Y),
            loss=F.cross_entropy,
            optimizer=optimizer,
            hparams={"lr": lr, **hparams},
            seed=seed,
            data_seed=7 if pack["one order"] else None,
            name=f"{place}",
            drop_last=N % pack["batch_size"] == 1,  # batch norm cannot train on one row
            **{name: pack[name] for name in ("batch_size", "accumulate", "clip_norm", "steps")},
        )
        for place, (seed, lr) in enumerate(pack["members"])
    ]
    assert len(planned(jobs).parts) == 1
    assert_as_alone(jobs, noise=noise(build(spec, pack["width"])))


QUIET = {"deadline": None, "derandomize": True, "database": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=15, **QUIET)
@given(packs())
def test_a_drawn_network_trains_as_it_does_alone(pack: dict[str, Any]) -> None:
    check(pack)


@pytest.mark.slow
@settings(max_examples=200, **QUIET)
@given(packs())
def test_many_drawn_networks_train_as_they_do_alone(pack: dict[str, Any]) -> None:
    check(pack)
