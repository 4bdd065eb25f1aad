"""The network, the metric and the optimizer that examples/kinds.toml uses.

shoal train examples/kinds.toml
"""

from typing import Any

import torch
from torch import Tensor, nn


class Patches(nn.Module):
    """Cuts an 8 x 8 image into four patches and mixes them."""

    def __init__(self, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, width, 4, stride=4)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.embed(x).flatten(2).transpose(1, 2)  # [rows, 4, width]
        return self.head(torch.relu(self.norm(patches)).flatten(1))


def top3(outputs: Tensor, targets: Tensor) -> float:
    """Share of rows whose class is among the three largest outputs."""
    return (outputs.topk(3, dim=-1).indices == targets.unsqueeze(-1)).any(-1).double().mean().item()


def slow_adam(params: Any, lr: float = 1e-3) -> torch.optim.Optimizer:
    """AdamW with a longer memory."""
    return torch.optim.AdamW(params, lr=lr, betas=(0.95, 0.999))


if __name__ == "__main__":
    print(Patches()(torch.zeros(2, 1, 8, 8)).shape)
