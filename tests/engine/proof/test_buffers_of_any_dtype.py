"""What a step gives is compared with what its graph gives, whatever the dtypes of a network's buffers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.engine.equality import assert_as_alone, numbers
from torch import Tensor, nn

import shoal

X, Y = numbers(1, 20, 6), numbers(2, 20, 2)


class Masked(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2, dtype=torch.float64)
        self.register_buffer("mask", (torch.arange(6) % 2).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        mask = self.get_buffer("mask")
        out: Tensor = self.layer(x * (mask.real if mask.is_complex() else mask))
        return out


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.complex128])
def test_a_buffer_of_any_dtype_can_be_checked(dtype: torch.dtype) -> None:
    assert_as_alone(
        [
            shoal.Job(model=lambda: Masked(dtype), data=(X, Y), val=(X, Y), loss=F.mse_loss, epochs=2, seed=seed)
            for seed in range(2)
        ]
    )
