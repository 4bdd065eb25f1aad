"""Cross entropy in one call has the bits of the operators that it stands for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shoal.engine.rules import _losses

MEAN, SUM = 1, 2


def by_operators(x: Tensor, y: Tensor, ignore: int, reduction: int) -> Tensor:
    counted = y != ignore
    index = torch.where(counted, y, 0).unsqueeze(2)
    share = counted.to(x.dtype)
    rows = -_losses._log_softmax(x).gather(2, index).squeeze(2) * share
    return rows.sum(1) / share.sum(1) if reduction == MEAN else rows.sum(1)


@pytest.mark.parametrize("reduction", [MEAN, SUM])
@pytest.mark.parametrize("classes", [2, 10, 16, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("together", [False, True])
def test_bits(reduction: int, classes: int, dtype: torch.dtype, together: bool) -> None:
    start = torch.Generator().manual_seed(classes)
    x = torch.randn(3, 13, classes, dtype=dtype, generator=start).requires_grad_()
    y = torch.randint(classes, (13,) if together else (3, 13), generator=start)
    y = y.expand(3, 13)
    scale = torch.randn(3, dtype=dtype, generator=start)
    for ignore in (-100, 1):
        losses = by_operators(x, y, ignore, reduction), _losses._CrossEntropy.apply(x, y, ignore, reduction)
        grads = [torch.autograd.grad((loss * scale).sum(), x)[0] for loss in losses]
        assert torch.equal(*losses)
        assert torch.equal(*grads)
        assert grads[0].stride() == grads[1].stride(), "the products before it would have other bits"
