"""Handwritten digits for networks of different architectures, as many users would train them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.evidence.bench.datasets import DIGITS_TEST, digits
from shoal.evidence.bench.ways import Loop
from shoal.jobs.job import Job
from shoal.models import CNN, MLP, Encoder, LSTMClassifier

BATCH = 32


class Rows(nn.Module):
    """Reads an image as a sequence of its rows."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x_BCHW: Tensor) -> Tensor:
        out: Tensor = self.network(x_BCHW.squeeze(1))
        return out


def _lstm() -> nn.Module:
    return Rows(LSTMClassifier(features=28))


def _encoder() -> nn.Module:
    return Rows(Encoder(features=28, dropout=0.0))  # no dropout, since the compared ways draw different numbers


NETWORKS: dict[str, Callable[[], nn.Module]] = {"CNN": CNN, "MLP": MLP, "LSTM": _lstm, "encoder": _encoder}


def load() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return train and test images [N, 1, 28, 28] with their classes: scikit-learn's digits, scaled up from 8 x 8."""
    x, y = digits()
    x = F.interpolate(x.view(-1, 1, 8, 8), size=(28, 28), mode="bilinear", align_corners=False)
    return x[DIGITS_TEST:], y[DIGITS_TEST:], x[:DIGITS_TEST], y[:DIGITS_TEST]


def jobs(members: int, epochs: int, data: tuple[Tensor, Tensor], *, same: bool) -> list[Job]:
    """Return `members` jobs: all the small CNN, or the four networks in turn, each with its own seed and learning
    rate."""
    names = ["CNN"] if same else list(NETWORKS)
    rates = (1e-3, 2e-3, 5e-4)
    return [
        Job(
            model=NETWORKS[names[i % len(names)]],
            data=data,
            loss=F.cross_entropy,
            optimizer=torch.optim.Adam,
            hparams={"lr": rates[i % len(rates)]},
            batch_size=BATCH,
            epochs=epochs,
            seed=i,
            name=f"{names[i % len(names)]} {i}",
        )
        for i in range(members)
    ]


def vanilla(job: Job, device: torch.device) -> nn.Module:
    """Train the network with the plain loop, as its owner would, and return it."""
    loop = Loop([job], device)
    loop.step((job.epochs or 0) * -(-len(job.data[0]) // job.batch_size))
    return loop.solos[0].model


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the fraction of rows whose largest output is their class."""
    device = next(model.parameters()).device
    return float((model.eval()(x.to(device)).argmax(1).cpu() == y).double().mean())
