"""What the demonstration trains: one small network in 64 settings, as jobs and as a plain PyTorch loop."""

import itertools

import torch
import torch.nn.functional as F
from torch import nn

from shoal import Job
from shoal.evidence.bench.datasets import accuracy, digits
from shoal.evidence.bench.ways import Loop

LEARNING_RATES = (3e-4, 1e-3, 3e-3, 1e-2)
DROPOUTS = (0.0, 0.1, 0.2, 0.4)
SEEDS = (0, 1, 2, 3)
WIDTH, BATCH_SIZE, EPOCHS, ROWS = 32, 32, 8, 1437
CHECKED_EPOCHS = 2
"""The number of epochs in float64, where packed and alone must be equal."""


def network(dropout: float) -> nn.Module:
    return nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Dropout(dropout), nn.Linear(WIDTH, 10))


def jobs(dtype: torch.dtype = torch.float32, epochs: int | None = None) -> list[Job]:
    """Return the sweep on handwritten digits: 1437 rows to train on, 360 to validate."""
    x, y = digits(dtype)
    return [
        Job(
            model=lambda dropout=dropout: network(dropout).to(dtype),  # type: ignore[misc]
            data=(x[:ROWS], y[:ROWS]),
            val=(x[ROWS:], y[ROWS:]),
            loss=F.cross_entropy,
            optimizer=torch.optim.Adam,
            hparams={"lr": lr},
            batch_size=BATCH_SIZE,
            epochs=EPOCHS if epochs is None else epochs,
            seed=seed,
            metrics={"accuracy": accuracy},
            name=f"lr={lr:g} dropout={dropout:g} seed={seed}",
        )
        for lr, dropout, seed in itertools.product(LEARNING_RATES, DROPOUTS, SEEDS)
    ]


def train_alone(job: Job) -> tuple[nn.Module, list[dict[str, float]]]:
    """Do the same training as most people write it, without Shoal."""
    loop = Loop([job], torch.device("cpu"))
    model, (x, y), history = loop.solos[0].model, job.val, []
    for _ in range(job.epochs or 0):
        model.train()
        loop.step(-(-len(job.data[0]) // job.batch_size))
        model.eval()
        with torch.no_grad():
            outputs = model(x)
        history.append({"val_loss": float(F.cross_entropy(outputs, y)), "accuracy": float(accuracy(outputs, y))})
    return model, history
