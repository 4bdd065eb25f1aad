"""bf16 and fp16: a stack against the reference loop, and against what that loop differs from itself by."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.engine.equality import (
    assert_close,
    distances,
    numbers,
    optimizer_tensors,
    planned,
    reasons,
    slowly,
    train,
    whole,
)
from tests.engine.rules.layers import INPUTS, LAYERS, TARGETS, N
from tests.engine.rules.test_layers import with_head
from torch import Tensor, nn

import shoal

# Of torch itself, where autocast leaves a norm's weight in float32.
pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")

EPS = {"bf16": 2.0**-7, "fp16": 2.0**-10}
"""The rounding of one number, of which a few thousand are made."""
KINDS = [
    "Linear", "Conv2d", "BatchNorm2d", "LayerNorm", "GroupNorm", "RMSNorm", "Embedding", "Dropout", "RNN", "GRU",
    "GRUCell", "attention, bool mask", "attention, causal, dropout", "MultiheadAttention", "MaxPool2d",
    "PReLU", "spectral norm", "FractionalMaxPool2d", "CosineSimilarity",
]  # fmt: skip


def jobs(build: Any, inputs: Tensor, precision: str, **changes: Any) -> list[shoal.Job]:
    data = inputs.float() if inputs.is_floating_point() else inputs
    settings: dict[str, Any] = {
        "data": (data, TARGETS),
        "loss": F.cross_entropy,
        "optimizer": torch.optim.SGD,
        "hparams": {"lr": 0.05, "momentum": 0.5},
        "batch_size": 8,
        "steps": 20,
    }
    return [
        shoal.Job(
            model=lambda: with_head(build, inputs).float(),
            precision=precision,  # type: ignore[arg-type]
            seed=seed,
            name=f"{seed}",
            **(settings | changes),
        )
        for seed in (1, 2)
    ]


def backwards(model: nn.Module, batch: Any) -> Tensor:
    """The same batch with its rows in another order, and so its sums."""
    x, y = batch
    return F.cross_entropy(model(x.flip(0)), y.flip(0))


OFTEN = {"Linear", "Conv2d", "BatchNorm2d", "LayerNorm", "RMSNorm", "GRU", "FractionalMaxPool2d"}
PAIRS = [(name, precision) for name in KINDS for precision in EPS]


@pytest.mark.parametrize("pair", slowly(PAIRS, lambda pair: pair[0] in OFTEN and pair[1] == "fp16"), ids=str)
def test_layer_in_half_precision(pair: tuple[str, str]) -> None:
    name, precision = pair
    layer = LAYERS[name]
    pack = jobs(layer.build, INPUTS[layer.inputs], precision)
    results = train(pack)
    assert {result.tier for result in results} == {"stacked"}, reasons(pack)
    draws = any(word in name.lower() for word in ("dropout", "fractional"))  # then rows have their own masks
    for result, job, other in zip(
        results, pack, jobs(layer.build, INPUTS[layer.inputs], precision, loss=None, step=backwards), strict=True
    ):
        alone = shoal.solo(job)
        noise = 0.0 if draws else max(distances(shoal.solo(other), alone).values())
        apart = {
            k: d for k, d in distances(result, alone).items() if not k.split("/")[0].endswith(layer.noise or ("\0",))
        }
        assert max(apart.values()) <= 10 * max(noise, EPS[precision] / 3), max(apart, key=lambda k: apart[k])


def test_transformer_layer_in_half_precision() -> None:
    def build() -> nn.Module:
        return nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)

    pack = jobs(build, INPUTS["sequence"], "fp16")
    noisy = jobs(build, INPUTS["sequence"], "fp16", loss=None, step=backwards)
    for result, job, other in zip(train(pack), pack, noisy, strict=True):
        alone = shoal.solo(job)
        names = alone.model.state_dict().keys() - {"0.self_attn.in_proj_bias"}
        apart, noise = distances(result, alone), distances(shoal.solo(other), alone)
        assert max(apart[n] for n in names) <= 10 * max(EPS["fp16"] / 3, *(noise[n] for n in names))


X, Y = numbers(1, N, 6, dtype=torch.float32), whole(2, 3, N)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))


def job(seed: int, **changes: Any) -> shoal.Job:
    settings: dict[str, Any] = {
        "model": net,
        "data": (X, Y),
        "loss": F.cross_entropy,
        "hparams": {"lr": 0.01},
        "batch_size": 8,
        "steps": 50,
        "name": f"{seed}",
        "precision": "fp16",
    }
    return shoal.Job(seed=seed, **(settings | changes))


def rounding(own: shoal.Job, alone: shoal.Result, times: float = 1.0) -> float:
    """How far the reference loop is from itself when the first layer and the loss sum in another order.

    Rows stay in their order, so that dropout draws the same mask for each of them.
    """

    def step(model: Any, batch: Any) -> Tensor:
        x, y = batch
        hidden = F.linear(x.flip(1), model[0].weight.flip(1))
        return F.cross_entropy(model[1:](hidden).flip(0), y.flip(0)) * times

    return max(distances(shoal.solo(replace(own, loss=None, step=step)), alone).values())


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_fifty_steps_with_batch_norm_and_dropout(kind: Any, precision: str, clip: float | None) -> None:
    """Two reference loops whose sums have another order are up to 2e-3 apart here in fp16 with AdamW, 1e-6 with SGD."""
    least = EPS[precision] * (1 if kind is torch.optim.AdamW else 0.1)
    pack = [job(s, optimizer=kind, precision=precision, clip_norm=clip) for s in (1, 2)]
    for result, own in zip(train(pack), pack, strict=True):
        assert result.tier == "stacked"
        alone = shoal.solo(own)
        assert_close(result, alone, 10 * max(least, rounding(own, alone)))


def loud(times: float) -> Any:
    return lambda outputs, targets: F.cross_entropy(outputs, targets) * times


def test_an_overflow_skips_that_members_step_alone() -> None:
    """One scale for all would halve everybody's, and skip everybody's step."""
    factors = (0.5, 1e3, 0.25)
    pack = [job(s, loss=loud(times)) for s, times in enumerate(factors, 1)]
    assert len(planned(pack).parts) == 1
    results = train(pack)
    assert {result.tier for result in results} == {"stacked"}
    for result, own, times in zip(results, pack, factors, strict=True):
        assert_as_loop(result, own, times)
    steps = [float(optimizer_tensors(result)["0.weight/step"]) for result in results]
    assert steps[1] < min(steps[0], steps[2])


def assert_as_loop(result: shoal.Result, own: shoal.Job, times: float) -> None:
    """The same steps taken and skipped, exactly; weights and state within what another order of sums makes of them."""
    alone = shoal.solo(own)
    ours, theirs = optimizer_tensors(result), optimizer_tensors(alone)
    assert all(torch.equal(ours[name], value) for name, value in theirs.items() if name.endswith("/step"))
    assert_close(result, alone, 10 * max(EPS["fp16"], rounding(own, alone, times)))


def test_a_first_step_that_overflows_leaves_no_optimizer_state() -> None:
    for steps in (1, 5, 9):
        pack = [job(1, loss=loud(0.5), steps=steps), job(2, loss=loud(1e3), steps=steps)]
        for result, own, times in zip(train(pack), pack, (0.5, 1e3), strict=True):
            assert_as_loop(result, own, times)


class Recurrent(nn.Module):
    """Recurrent layers take their first state in the dtype that autocast made of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.gru, self.out = nn.Linear(6, 5), nn.GRU(5, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.gru(self.inward(x))[0][:, -1])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_recurrent_layer_behind_a_linear(precision: str) -> None:
    pack = [
        job(
            s,
            model=Recurrent,
            data=(INPUTS["sequence"].float(), Y),
            precision=precision,
            steps=10,
            optimizer=torch.optim.SGD,
        )
        for s in (1, 2)
    ]
    for result, own in zip(train(pack), pack, strict=True):
        assert result.tier == "stacked"
        assert_close(result, shoal.solo(own), tolerance=2 * EPS[precision])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_in_a_dtype_of_its_own(dtype: torch.dtype) -> None:
    pack = [job(s, model=lambda: net().to(dtype), data=(X.to(dtype), Y), precision=None, steps=20) for s in (1, 2)]
    for result, own in zip(train(pack), pack, strict=True):
        assert result.tier == "stacked"
        alone = shoal.solo(own)
        assert_close(result, alone, 10 * max(0.01, rounding(own, alone)) if dtype is torch.bfloat16 else 1e-9)
