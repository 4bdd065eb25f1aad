"""Pooling on a CPU, channels side by side: what torch's own operator gives, bit for bit, both ways."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.engine.equality import assert_as_alone, numbers
from tests.engine.rules.layers import INPUTS
from tests.engine.rules.test_layers import jobs
from torch import nn

from shoal.engine.rules._conv import MaxPool2d

aten = torch.ops.aten


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "settings",
    [([2, 2], [2, 2], [0, 0], [1, 1], False), ([3, 2], [2, 1], [1, 1], [1, 2], True), ([2], [], [0], [1], False)],
)
def test_largest_and_where_it_was(settings: Any, dtype: torch.dtype) -> None:
    x = numbers(1, 6, 9, 7, 8).relu()  # many ties, of which the first counts
    x[0, 0, 0, 0] = float("nan")
    x[1, 2, 3, 4] = float("inf")
    x = x.to(dtype).requires_grad_()
    ours, torchs = MaxPool2d.apply(x, *settings), aten.max_pool2d(x, *settings)  # type: ignore[no-untyped-call]
    assert torch.equal(ours.nan_to_num(7), torchs.nan_to_num(7)) and ours.is_contiguous()
    weight = numbers(2, *torchs.shape, dtype=dtype)
    (mine,), (other,) = (torch.autograd.grad(out, x, weight) for out in (ours, torchs))
    assert torch.equal(mine, other)


def test_many_channels_train_as_they_do_alone() -> None:
    def body() -> nn.Module:
        return nn.Sequential(nn.Conv2d(2, 9, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2, 1))

    assert_as_alone(jobs(body, INPUTS["image"]))
