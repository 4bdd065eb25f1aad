"""The benchmark's networks are what they are called."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from shoal import models
from shoal.evidence.bench import published
from shoal.evidence.bench.ways import build
from shoal.evidence.bench.workloads import TINY, Spec, names, workload


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("make", "number"),
    [
        (TINY, 64 * 32 + 32 + 32 * 10 + 10),
        (models.MLP, 784 * 256 + 256 + 256 * 256 + 256 + 256 * 10 + 10),
        (models.CNN, 32 * 9 + 32 + 64 * 32 * 9 + 64 + 64 * 49 * 128 + 128 + 128 * 10 + 10),
        (models.ResNet18, 11_173_962),
        (models.GPT, 2 * 256 * 128 + 256 + 128 * 128 + 2 * 128 + 4 * (12 * 128 * 128 + 13 * 128)),
        (published.mobilenet_v2, 3_504_872),
        (published.ResNet50, 25_557_032),
        (published.densenet121, 7_978_856),
        (published.mlp3, 150_528 * 128 + 128 + 128 * 128 + 128 + 128 * 1000 + 1000),
    ],
)
def test_parameter_counts(make: Callable[[], nn.Module], number: int) -> None:
    with torch.device("meta"):
        assert parameters(make()) == number


@pytest.mark.parametrize("name", [name for name in names() if name != "mixed"])
def test_every_network_gives_a_finite_loss_and_a_gradient_everywhere(name: str) -> None:
    (job,) = workload(Spec(network=name, members=1, batches=1, batch_size=2, side=32))
    model = build(job, torch.device("cpu"))
    x, y = job.data
    loss = job.loss(model(x), y)
    loss.backward()
    assert torch.isfinite(loss)
    assert all(p.grad is not None for p in model.parameters())


def test_published_networks_give_a_thousand_classes_for_imagenet_shaped_input() -> None:
    for make in (published.mlp3, published.mobilenet_v2, published.ResNet50, published.densenet121):
        with torch.device("meta"):
            assert make()(torch.empty(2, 3, 224, 224)).shape == (2, 1000)
