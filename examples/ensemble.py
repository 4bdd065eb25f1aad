"""An ensemble: the average of ten networks that differ only in their seed. Its spread shows where it is unsure.

python examples/ensemble.py
"""

import torch
import torch.nn.functional as F
from torch import nn

import shoal

if __name__ == "__main__":
    g = torch.Generator().manual_seed(0)
    x = torch.rand(256, 1, generator=g) * 4 - 2  # seen in training: -2 to 2
    y = torch.sin(3 * x) + 0.1 * torch.randn(256, 1, generator=g)

    jobs = [
        shoal.Job(
            model=lambda: nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)),
            data=(x, y),
            loss=F.mse_loss,
            optimizer=torch.optim.Adam,
            hparams={"lr": 3e-3},
            batch_size=32,
            epochs=40,
            seed=seed,
            name=f"seed={seed}",
        )
        for seed in range(10)
    ]
    results = shoal.train(jobs)

    points = torch.tensor([[-1.0], [0.5], [1.5], [3.0], [4.0]])
    outputs = results.predict(points)  # [M, rows, 1]: all members in one forward
    for point, mean, spread in zip(points, outputs.mean(0), outputs.std(0), strict=True):
        print(f"x = {point.item():4.1f}   mean {mean.item():6.2f}   spread {spread.item():.2f}")
