"""What the demonstration trains: one small network in 64 settings, as jobs and as a plain PyTorch loop."""

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal import Job
from shoal.evidence.bench.datasets import accuracy, digits

LEARNING_RATES = (3e-4, 1e-3, 3e-3, 1e-2)
DROPOUTS = (0.0, 0.1, 0.2, 0.4)
SEEDS = (0, 1, 2, 3)
WIDTH, BATCH_SIZE, EPOCHS = 32, 32, 8
CHECKED_EPOCHS = 2
"""Epochs in float64, where packed and alone are held to be equal."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One cell of the sweep."""

    lr: float
    dropout: float
    seed: int

    @property
    def name(self) -> str:
        return f"lr={self.lr:g} dropout={self.dropout:g} seed={self.seed}"


@dataclass(frozen=True, slots=True)
class Digits:
    """Handwritten digits of 8 x 8 pixels, as scikit-learn ships them: 1437 to train on, 360 to validate."""

    x: Tensor
    y: Tensor
    x_val: Tensor
    y_val: Tensor

    @classmethod
    def load(cls, dtype: torch.dtype = torch.float32) -> "Digits":
        inputs, targets = digits(dtype)
        return cls(inputs[:1437], targets[:1437], inputs[1437:], targets[1437:])


def settings() -> list[Setting]:
    return [Setting(*cell) for cell in itertools.product(LEARNING_RATES, DROPOUTS, SEEDS)]


def network(dropout: float) -> nn.Module:
    return nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Dropout(dropout), nn.Linear(WIDTH, 10))


def jobs(data: Digits, epochs: int | None = None) -> list[Job]:
    """The sweep as jobs, in the data's dtype."""
    return [
        Job(
            model=lambda s=s: network(s.dropout).to(data.x.dtype),  # type: ignore[misc]
            data=(data.x, data.y),
            val=(data.x_val, data.y_val),
            loss=F.cross_entropy,
            optimizer=torch.optim.Adam,
            hparams={"lr": s.lr},
            batch_size=BATCH_SIZE,
            epochs=EPOCHS if epochs is None else epochs,
            seed=s.seed,
            metrics={"accuracy": accuracy},
            name=s.name,
        )
        for s in settings()
    ]


def train_alone(s: Setting, data: Digits, epochs: int | None = None) -> tuple[nn.Module, list[dict[str, float]]]:
    """The same training as most people write it, without Shoal."""
    torch.manual_seed(s.seed)
    model = network(s.dropout).to(data.x.dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=s.lr)
    order = torch.Generator().manual_seed(s.seed)
    history = []
    for epoch in range(EPOCHS if epochs is None else epochs):
        model.train()
        for rows in torch.split(torch.randperm(len(data.x), generator=order), BATCH_SIZE):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data.x[rows]), data.y[rows])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        model.eval()
        with torch.no_grad():
            outputs = model(data.x_val)
            val_loss = F.cross_entropy(outputs, data.y_val).item()
        history.append({"epoch": epoch, "val_loss": val_loss, "accuracy": float(accuracy(outputs, data.y_val))})
    return model, history
