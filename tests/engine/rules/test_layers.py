"""Every kind of layer, stacked, against the reference loop: 50 steps in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.engine.equality import assert_as_alone, slowly
from tests.engine.rules.layers import ACTIVATIONS, INPUTS, LAYERS, LONG_TAIL, TARGETS
from torch import Tensor, nn

import shoal
from shoal.engine.tiers.stacked.forward import Forward

WEIGHTED = (
    "Linear", "Bilinear", "Conv2d", "ConvTranspose2d", "BatchNorm2d", "LayerNorm", "GroupNorm", "Embedding", "LSTM",
    "GRUCell", "TransformerEncoderLayer", "PReLU",
)  # fmt: skip
COMMON = (nn.ReLU, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Softplus)


def with_head(build: Callable[[], nn.Module], inputs: Tensor) -> nn.Module:
    """The body, and a Linear that makes three numbers of whatever it gives."""
    body = build().double()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        width = copy.deepcopy(body).eval()(inputs[:4]).flatten(1).shape[1]
    return nn.Sequential(body, nn.Flatten(), nn.Linear(width, 3)).double()


def jobs(build: Callable[[], nn.Module], inputs: Tensor, **changes: Any) -> list[shoal.Job]:
    """Three members with seeds and learning rates of their own."""
    settings: dict[str, Any] = {
        "data": (inputs, TARGETS),
        "loss": F.cross_entropy,
        "optimizer": torch.optim.Adam,
        "batch_size": 8,
        "steps": 50,
    }
    return [
        shoal.Job(
            model=lambda: with_head(build, inputs),
            hparams={"lr": lr, "eps": 1e-6},
            seed=seed,
            name=f"{seed}",
            **(settings | changes),
        )
        for seed, lr in ((1, 0.01), (2, 0.003), (3, 0.03))
    ]


@pytest.mark.parametrize("name", slowly(LAYERS, lambda name: name not in LONG_TAIL))
def test_layer_trains_as_it_does_alone(name: str) -> None:
    layer = LAYERS[name]
    assert_as_alone(jobs(layer.build, INPUTS[layer.inputs]), noise=layer.noise)


@pytest.mark.parametrize("kind", slowly(ACTIVATIONS, COMMON.__contains__), ids=lambda kind: kind.__name__)
def test_activation_trains_as_it_does_alone(kind: type[nn.Module]) -> None:
    def body() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), kind(), nn.Linear(8, 5), kind())

    assert_as_alone(jobs(body, INPUTS["rows"]))


@pytest.mark.parametrize("name", slowly(LAYERS, WEIGHTED.__contains__))
def test_layer_predicts_as_alone_where_members_have_weights_in_common(name: str) -> None:
    """Some of the weights, drawn, are equal in all members: what comes of them alone is computed once."""
    layer, draw = LAYERS[name], torch.Generator().manual_seed(4)
    inputs = INPUTS[layer.inputs]
    for share in (0.5, 0.5, 1.0):
        models = [with_head(layer.build, inputs).eval() for _ in range(3)]
        columns = list(zip(*([*model.parameters(), *model.buffers()] for model in models), strict=True))
        with torch.no_grad():
            for column in columns:
                alike = float(torch.rand((), generator=draw)) < share
                for tensor in column if column[0].is_floating_point() else ():
                    tensor.add_(0.2 * torch.rand(tensor.shape, generator=draw).to(tensor))
                    tensor.copy_(column[0] if alike else tensor)
            expected = torch.stack([model(inputs) for model in models])
            outputs = Forward(models)((inputs,))
        assert outputs.is_contiguous() and (outputs - expected).abs().max() < 1e-12
