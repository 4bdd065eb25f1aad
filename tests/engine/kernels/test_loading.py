"""Operators that are run ahead, so that their kernels are loaded."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.engine.kernels import loading

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("operators", loading._LAYERS.values())
def test_they_run(operators: loading.Operators, dtype: torch.dtype) -> None:
    with torch.no_grad():
        assert len(list(operators(CPU, dtype))) >= 2


def test_they_follow_from_the_layers() -> None:
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Sequential(nn.LayerNorm(2)))
    assert loading._kinds_of(network) == [loading._convolutions, loading._layer_norms]
    assert loading._kinds_of(nn.Linear(2, 2)) == []
