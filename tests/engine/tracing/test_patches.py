"""What a step may do with torch while it is recorded: a draw that is compared with zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.engine.equality import assert_as_alone, numbers, reasons, whole
from torch import Tensor, nn

import shoal

X, Y = numbers(1, 20, 6), whole(2, 3, 20)


class LayerDrop(nn.Module):
    """Leaves layers out at random, as OPT, BART and Wav2Vec2 do, with `skips` to say when."""

    def __init__(self, rate: float, skips: Callable[[float], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6, dtype=torch.float64) for _ in range(3))
        self.head, self.rate, self.skips = nn.Linear(6, 3, dtype=torch.float64), rate, skips

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not (self.training and self.skips(self.rate)):
                x = F.dropout(torch.tanh(layer(x)), 0.2, self.training)
        out: Tensor = self.head(x)
        return out


def written(rate: float) -> Any:
    draw = torch.rand([])
    draw.sub_(0.5)
    return draw < rate


def answer_written(rate: float) -> Any:
    answer = torch.rand(1) < rate
    return answer.logical_not_()


def jobs(rate: float, skips: Callable[[float], Any]) -> list[shoal.Job]:
    common: dict[str, Any] = {"data": (X, Y), "val": (X, Y), "loss": F.cross_entropy, "batch_size": 8, "epochs": 3}
    return [shoal.Job(model=lambda: LayerDrop(rate, skips), seed=seed, **common) for seed in range(3)]


@pytest.mark.parametrize(
    "skips",
    [lambda rate: torch.rand([]) < rate, lambda rate: rate > torch.rand(1), lambda rate: not torch.rand([]) >= rate],
)
def test_a_draw_is_never_below_zero(skips: Callable[[float], Any]) -> None:
    assert_as_alone(jobs(0.0, skips))
    assert_as_alone(jobs(0.5, skips), tier="serial")
    assert "control flow or a shape depends on the data (test_patches.py" in reasons(jobs(0.5, skips))


@pytest.mark.parametrize("skips", [written, answer_written, lambda rate: torch.randn([]) < rate])
def test_other_comparisons_with_zero_depend_on_the_data(skips: Callable[[float], Any]) -> None:
    assert_as_alone(jobs(0.0, skips), tier="serial")
