"""A sweep: the same network with many settings, trained together, best one picked.

python examples/sweep.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal


def data(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Two spirals, wound around each other."""
    g = torch.Generator().manual_seed(seed)
    kind = torch.randint(2, (rows,), generator=g)
    turn = 3 * torch.rand(rows, generator=g)
    angle = turn * 2 + torch.pi * kind
    points = torch.stack([turn * angle.cos(), turn * angle.sin()], 1)
    return points + 0.1 * torch.randn(rows, 2, generator=g), kind


def network(dropout: float) -> nn.Module:
    return nn.Sequential(
        nn.Linear(2, 32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2)
    )


def accuracy(outputs: Tensor, targets: Tensor) -> float:
    return (outputs.argmax(-1) == targets).double().mean().item()


def jobs() -> list[shoal.Job]:
    """Also for the command line: `shoal explain examples/sweep.py:jobs`, `shoal train examples/sweep.py:jobs`."""
    train, val = data(512, seed=0), data(256, seed=1)
    return [
        shoal.Job(
            model=lambda p=p: network(p),
            data=train,
            val=val,
            loss=F.cross_entropy,
            optimizer=torch.optim.AdamW,
            hparams={"lr": lr, "weight_decay": 0.01},
            batch_size=64,
            epochs=10,
            seed=seed,
            metrics={"accuracy": accuracy},
            name=f"lr={lr:g} dropout={p:g} seed={seed}",
        )
        for lr in (1e-3, 3e-3, 1e-2)
        for p in (0.0, 0.2)
        for seed in range(4)
    ]


if __name__ == "__main__":
    print(shoal.explain(jobs()))
    results = shoal.train(jobs())
    best = max(results, key=lambda result: result.history[-1]["accuracy"])
    print(f"best of {len(results)}: {best.name}, accuracy {best.history[-1]['accuracy']:.1%}")
