"""Batch norm of all members at once on a GPU, against torch's own for each member."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.engine.kernels import channel_sums
from shoal.engine.rules._norm import BatchNorm

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.detach().double() - b.detach().double()).norm() / b.detach().double().norm())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "shape", [(3, 4, 8, 5, 5), (2, 6, 3, 7, 7), (4, 64, 32), (2, 16, 24, 30, 30), (3, 5, 6), (2, 2, 300)]
)
def test_equals_batch_norm_of_each_member(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    members, channels = shape[0], shape[2]
    x = (torch.randn(shape, dtype=wide, device="cuda") + 20).to(dtype)  # a mean that is many deviations from zero
    x = x.movedim(2, -1).contiguous().movedim(-1, 2).requires_grad_()
    assert channel_sums.suits(x)
    weight, bias = (torch.randn(members, channels, dtype=wide, device="cuda", requires_grad=True) for _ in range(2))
    eps = torch.full((members, 1), 1e-5, dtype=torch.float64, device="cuda")
    ours, mean, var = BatchNorm.apply(x, weight, bias, eps)
    exact = x.double()
    theirs = torch.stack(
        [F.batch_norm(exact[m], None, None, weight[m].double(), bias[m].double(), True) for m in range(members)]
    )
    axes = [1, *range(3, x.dim())]
    assert _distance(ours, theirs) < TOLERANCE[dtype]
    assert _distance(mean, exact.mean(axes)) < 1e-6
    assert _distance(var, exact.var(axes, correction=0)) < 1e-5
    given = torch.randn_like(ours)
    a, b = (torch.autograd.grad(out, [x, weight, bias], given.to(out.dtype)) for out in (ours, theirs))
    plain = torch.stack([F.batch_norm(x[m], None, None, weight[m], bias[m], True) for m in range(members)])
    for p, q, r in zip(a, b, torch.autograd.grad(plain, [x, weight, bias], given.to(plain.dtype)), strict=True):
        assert p.dtype == q.dtype
        # of two values with one mean, the gradient is what rounding leaves: torch's own is as far from the exact one
        assert _distance(p, q) < max(TOLERANCE[dtype], 2 * _distance(r, q))


def test_the_gradient_can_be_differentiated_again() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 6, 3, 4, 4, dtype=torch.float64, device="cuda")
    x = x.movedim(2, -1).contiguous().movedim(-1, 2).requires_grad_()
    weight, bias = (torch.randn(2, 3, dtype=torch.float64, device="cuda", requires_grad=True) for _ in range(2))
    eps = torch.full((2, 1), 1e-5, dtype=torch.float64, device="cuda")
    ours = BatchNorm.apply(x, weight, bias, eps)[0]
    theirs = torch.stack([F.batch_norm(x[m], None, None, weight[m], bias[m], True) for m in range(2)])
    second = []
    for out in (ours, theirs):
        (first,) = torch.autograd.grad(out.pow(3).sum(), x, create_graph=True)
        second.append(torch.autograd.grad(first.square().sum(), [x, weight]))
    assert all(_distance(p, q) < 1e-10 for p, q in zip(*second, strict=True))
