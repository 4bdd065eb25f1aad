"""Networks that treat batches of different shapes differently, fed by a DataLoader, against a plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.engine.equality import distance
from torch import Tensor, nn
from torch.utils.data import DataLoader

import shoal

GENERATOR = torch.Generator().manual_seed(0)
ROWS = [
    (torch.randn(3 + i % 4, 4, dtype=torch.float64, generator=GENERATOR), torch.tensor([i / 24], dtype=torch.float64))
    for i in range(24)
]
RATE = 0.05


class Remembers(nn.Module):
    """Keeps the length of its first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.length = nn.Linear(4, 1).double(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.length = self.length or x.shape[1]
        out: Tensor = self.layer(x).mean(1) * self.length / x.shape[1]
        return out


class TwoHeads(nn.Module):
    """Uses its second head on long batches only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 1).double(), nn.Linear(4, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.first(x).mean(1)
        return out + self.second(x).mean(1) if x.shape[1] > 5 else out


def padded(rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    longest = max(len(x) for x, _ in rows)
    return torch.stack([F.pad(x, (0, 0, 0, longest - len(x))) for x, _ in rows]), torch.stack([y for _, y in rows])


@pytest.mark.filterwarnings("ignore:.*changed during an epoch")
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("model", [Remembers, TwoHeads])
def test_equal_to_a_plain_loop(model: type[nn.Module], optimizer: Any) -> None:
    loader = DataLoader(ROWS, batch_size=3, collate_fn=padded)  # type: ignore[arg-type]
    fields: dict[str, Any] = {"data": loader, "loss": F.mse_loss, "optimizer": optimizer, "hparams": {"lr": RATE}}
    results = shoal.train([shoal.Job(model=model, epochs=3, seed=seed, **fields) for seed in range(3)], device="cpu")
    for seed, result in enumerate(results):
        torch.manual_seed(seed)
        network = model()
        alone = optimizer(network.parameters(), lr=RATE)
        for _ in range(3):
            for x, y in loader:
                alone.zero_grad()
                F.mse_loss(network(x), y).backward()
                alone.step()
        for name, tensor in network.state_dict().items():
            assert distance(result.model.state_dict()[name], tensor) <= 1e-9
