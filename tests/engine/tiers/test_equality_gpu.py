"""The equality suite on a GPU: the same cases in float64 to the same bar, in float32 and half to what sums make.

Random draws inside a network are on a GPU a function of seed, step, call and element; the reference makes the same.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.engine.equality import TOLERANCE, assert_as_alone, distances, numbers, train, whole
from tests.engine.rules import test_layers as layers
from tests.engine.rules.layers import INPUTS, LAYERS
from tests.engine.tiers import test_hard_cases as hard
from tests.engine.tiers import test_precision as half
from tests.engine.tiers import test_settings as cases
from torch import Tensor, nn

import shoal

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# Kernels whose sums go through atomic additions have no order to be held to; torch says which in its own documentation.
UNORDERED = {"FractionalMaxPool2d", "EmbeddingBag max"}
# Torch's own kernel scales a row of the table once or twice where a batch has its index twice: held to the CPU's loop.
RACES = "Embedding with max_norm"
# Torch's multi-tensor ASGD, which the plain loop takes on a GPU, computes eta in float32.
ROUNDED = {"ASGD": 1e-6}


@pytest.mark.parametrize("pack", [layers.jobs(LAYERS[RACES].build, INPUTS["tokens"]), hard.jobs(hard.CASES[RACES])])
def test_rows_of_a_table_kept_short(pack: list[shoal.Job]) -> None:
    for result, job in zip(train(pack, "cuda", False), pack, strict=True):
        apart = distances(result, shoal.solo(job, "cpu"))
        assert max(apart.values()) < 1e-9, apart


@pytest.mark.parametrize("name", [name for name in LAYERS if name not in UNORDERED and name != RACES])
def test_layer(name: str) -> None:
    layer = LAYERS[name]
    assert_as_alone(
        layers.jobs(layer.build, INPUTS[layer.inputs]), noise=layer.noise, tier=None, device="cuda", compile=False
    )


@pytest.mark.parametrize(
    "name", ["Linear", "Conv2d", "BatchNorm2d", "LayerNorm", "Dropout", "LSTM", "TransformerEncoderLayer"]
)
def test_layer_compiled_and_captured(name: str) -> None:
    layer = LAYERS[name]
    assert_as_alone(
        layers.jobs(layer.build, INPUTS[layer.inputs]), noise=layer.noise, tier=None, device="cuda", compile=True
    )


@pytest.mark.parametrize("name", cases.OPTIMIZERS)
def test_optimizer(name: str) -> None:
    kind, settings = cases.OPTIMIZERS[name]
    pack = [cases.job(seed, optimizer=kind, hparams=hparams) for seed, hparams in enumerate(settings)]
    assert_as_alone(pack, tier=None, device="cuda", compile=False, tolerance=ROUNDED.get(name, TOLERANCE))


@pytest.mark.parametrize("name", cases.SCHEDULES)
def test_schedule(name: str) -> None:
    every, make = cases.SCHEDULES[name]
    pack = [cases.job(seed, schedule=make(k), schedule_every=every) for seed, k in ((1, 0.3), (2, 0.8))]
    assert_as_alone(pack, tier=None, device="cuda", compile=False)


@pytest.mark.parametrize("name", cases.SETTINGS)
def test_setting(name: str) -> None:
    pack = [cases.job(seed, **changes) for seed, changes in enumerate(cases.SETTINGS[name], 1)]
    assert_as_alone(pack, tier=None, device="cuda", compile=False)


@pytest.mark.parametrize("name", [name for name, case in hard.CASES.items() if not case.reason and name != RACES])
def test_hard_case(name: str) -> None:
    assert_as_alone(hard.jobs(hard.CASES[name]), tier=None, device="cuda", compile=False)


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
def test_float32_and_half_to_what_another_order_of_sums_makes(precision: Any, compile: bool) -> None:
    """At most ten times the distance between two reference loops whose batches have their rows in another order."""
    x, y = numbers(1, 64, 32, dtype=torch.float32), whole(2, 10, 64)

    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(32, 64, bias=False), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 10))

    def job(seed: int, **how: Any) -> shoal.Job:
        optimizer = {"optimizer": torch.optim.SGD, "hparams": {"lr": 0.05, "momentum": 0.9}}
        return shoal.Job(
            model=net,
            data=(x, y),
            batch_size=16,
            steps=30,
            seed=seed,
            name=f"{seed}",
            precision=precision,
            **optimizer,
            **how,
        )

    pack = [job(seed, loss=F.cross_entropy) for seed in range(4)]
    for seed, result in enumerate(train(pack, "cuda", compile)):
        alone = shoal.solo(pack[seed], "cuda")
        other = shoal.solo(job(seed, step=half.backwards), "cuda")
        names = alone.model.state_dict().keys()
        noise, apart = distances(other, alone), distances(result, alone)
        floor = torch.finfo(torch.float32).eps if precision is None else half.EPS[precision] / 3
        assert max(apart[n] for n in names) <= 10 * max(floor, *(noise[n] for n in names))


def test_a_members_draws_do_not_depend_on_its_company() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(self.inner(x) + torch.randn_like(x[:, :3]), 0.4, self.training)

    pack = [cases.job(seed, model=lambda: Noisy().double(), steps=10) for seed in range(5)]
    together = train(pack, "cuda")
    for own, result in zip(pack[:2], together, strict=False):
        apart = distances(train([own], "cuda")[0], result)
        assert max(apart.values()) < 1e-9
