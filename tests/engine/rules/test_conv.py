"""Convolutions of members, against the plain loop and against the same member in a pack of one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal

G = torch.Generator().manual_seed(0)
Y = torch.randint(3, (22,), generator=G)


class Network(nn.Module):
    def __init__(self, channels: int, settings: dict[str, Any]) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, 3, **settings)
        self.second, self.head = nn.Conv2d(3, 2, 3, padding=1), nn.LazyLinear(3)
        self(torch.zeros(1, channels, 9, 8))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(F.relu(self.second(F.relu(self.first(x)))).flatten(1))
        return out


CASES: list[tuple[int, dict[str, Any]]] = [
    (1, {"kernel_size": 3, "padding": 1}),
    (3, {"kernel_size": 3, "stride": 2}),
    (1, {"kernel_size": (5, 3), "stride": (1, 2), "padding": (2, 0), "bias": False}),
    (2, {"kernel_size": 4, "padding": 1}),
    (1, {"kernel_size": 3, "dilation": 2}),
    (1, {"kernel_size": 3, "padding": "same"}),
]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("channels", "settings"), CASES, ids=str)
def test_equal_to_the_loop_and_the_same_bits_in_any_pack(channels: int, settings: dict[str, Any], shared: bool) -> None:
    x = torch.randn(22, channels, 9, 8, generator=G, dtype=torch.float64)
    jobs = [
        shoal.Job(model=lambda: Network(channels, settings), data=(x, Y), val=(x, Y), loss=F.cross_entropy,
                  batch_size=8, epochs=2, seed=seed, hparams={"lr": 0.01}, name=str(seed),
                  data_seed=5 if shared else None)
        for seed in range(3)
    ]  # fmt: skip
    results = shoal.train(jobs, device="cpu")
    assert {part.tier for part in results.plan.parts} <= {"stacked", "serial"}
    for given, packed in zip(jobs, results, strict=True):
        loop, alone = shoal.solo(given, device="cpu"), shoal.train([given], device="cpu")[0]
        for name, value in loop.model.state_dict().items():
            assert torch.allclose(packed.model.state_dict()[name], value, rtol=1e-9, atol=1e-12), name
            assert torch.equal(packed.model.state_dict()[name], alone.model.state_dict()[name]), name
