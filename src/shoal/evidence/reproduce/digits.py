"""Handwritten digits for networks of different architectures, as every one of many users would train them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.models import CNN, MLP, Encoder, LSTMClassifier

if TYPE_CHECKING:
    from shoal.jobs.job import Job

TEST_ROWS = 360
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
    return Rows(Encoder(features=28, dropout=0.0))  # no dropout: accuracies are compared between ways that draw apart


NETWORKS: dict[str, Callable[[], nn.Module]] = {"CNN": CNN, "MLP": MLP, "LSTM": _lstm, "encoder": _encoder}


@dataclass(frozen=True, kw_only=True)
class User:
    """One user's training."""

    network: str
    seed: int
    lr: float
    epochs: int


def users(members: int, epochs: int, *, same: bool) -> list[User]:
    """`members` trainings: all the small CNN, or the four networks in turn; a seed and a learning rate each."""
    names = ["CNN"] if same else list(NETWORKS)
    rates = (1e-3, 2e-3, 5e-4)
    return [
        User(network=names[i % len(names)], seed=i, lr=rates[i % len(rates)], epochs=epochs) for i in range(members)
    ]


def load() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Train and test images [N, 1, 28, 28] with their classes: scikit-learn's digits, scaled up from 8 x 8."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ValueError("this needs scikit-learn: pip install 'shoal[bench]'") from None

    images, classes = load_digits(return_X_y=True)
    x = torch.as_tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    x = F.interpolate(x, size=(28, 28), mode="bilinear", align_corners=False)
    y = torch.as_tensor(classes, dtype=torch.int64)
    mixed = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    test, train = mixed[:TEST_ROWS], mixed[TEST_ROWS:]
    return x[train], y[train], x[test], y[test]


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Share of rows whose largest output is their class."""
    model.eval()
    device = next(model.parameters()).device
    with torch.no_grad():
        right = [
            (model(a.to(device)).argmax(1).cpu() == b).sum()
            for a, b in zip(torch.split(x, 512), torch.split(y, 512), strict=True)
        ]
    return int(torch.stack(right).sum()) / len(y)


def vanilla(user: User, x: Tensor, y: Tensor, device: torch.device) -> nn.Module:
    """The training as its owner would write it."""
    torch.manual_seed(user.seed)
    model = NETWORKS[user.network]().to(device).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=user.lr)
    x, y = x.to(device), y.to(device)
    order = torch.Generator().manual_seed(user.seed)
    for _ in range(user.epochs):
        for rows in torch.split(torch.randperm(len(x), generator=order).to(device), BATCH):
            optimizer.zero_grad(set_to_none=True)
            F.cross_entropy(model(x[rows]), y[rows]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return model


def jobs(of: list[User], x: Tensor, y: Tensor) -> list[Job]:
    """The same trainings for Shoal."""
    from shoal.jobs.job import Job

    return [
        Job(
            model=NETWORKS[user.network],
            data=(x, y),
            loss=F.cross_entropy,
            optimizer=torch.optim.Adam,
            hparams={"lr": user.lr},
            batch_size=BATCH,
            epochs=user.epochs,
            seed=user.seed,
            name=f"{user.network} {i}",
        )
        for i, user in enumerate(of)
    ]
