"""Weights that are put back."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal


class Remembers(nn.Module):
    """Its buffer grows by a row with every batch."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2).double()
        self.register_buffer("seen", torch.zeros(1, 2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        if self.training:
            self.seen = torch.cat([self.seen, out.detach()[:1]])
        return out - self.seen.mean(0)


def _job(epochs: int = 3, lr: float = 5.0) -> shoal.Job:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 3, dtype=torch.float64, generator=generator)
    y = torch.randint(0, 2, (12,), generator=generator)
    return shoal.Job(
        model=Remembers, data=(x, y), val=(x[:4], y[:4]), loss=F.cross_entropy, optimizer=torch.optim.SGD,
        hparams={"lr": lr}, keep="best", batch_size=5, epochs=epochs, seed=1, name="grows",
    )  # fmt: skip


def test_the_best_weights_of_a_network_whose_buffer_changes_its_shape() -> None:
    alone = shoal.solo(_job())
    (result,) = shoal.train([_job()], device="cpu")
    assert result.status == alone.status == "done"
    expected = alone.model.state_dict()
    assert expected["seen"].shape[0] < 1 + 3 * 3, "the best epoch is not the last, or nothing is tried here"
    for name, value in result.model.state_dict().items():
        assert torch.allclose(value, expected[name], rtol=1e-9, atol=0)


def test_a_folder_is_resumed(tmp_path: Path) -> None:
    first = shoal.train([_job()], device="cpu", out=tmp_path)
    again = shoal.train([_job()], device="cpu", out=tmp_path)
    for name, value in first[0].model.state_dict().items():
        assert torch.equal(value, again[0].model.state_dict()[name])
