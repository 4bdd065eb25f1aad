"""Sums over rows of all members at once, against torch's: the kernels compiled for the host, and on a GPU."""

from __future__ import annotations

import pytest
import torch
from tests.engine.kernels import host_blocks
from torch import Tensor

from shoal.engine.kernels import row_sums
from shoal.engine.rules._product import Linear

SHAPES = [(2, 300, 24), (3, 7, 5), (1, 1, 1), (2, 1000, 128), (2, 65, 520), (5, 129, 33)]
EPSILON = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def assert_sums(sums: Tensor, x: Tensor) -> None:
    """The error is that of rounding once, and of adding in the wide dtype."""
    exact = x.double().sum(1)
    allowed = EPSILON[x.dtype] * exact.abs() + min(EPSILON[x.dtype], 1e-6) * x.double().abs().sum(1)
    assert sums.dtype == x.dtype and sums.shape == exact.shape
    assert bool(((sums.double() - exact).abs() <= allowed).all())


@pytest.mark.skipif(host_blocks.COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("dtype", EPSILON)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_exact_sum(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    monkeypatch.setattr(row_sums, "load", host_blocks.load)
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64).to(dtype)
    assert_sums(row_sums.row_sums(x), x)


gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("dtype", [pytest.param(dtype, marks=gpu) for dtype in EPSILON])
@pytest.mark.parametrize("shape", [*SHAPES, (16, 4096, 384), (2, 100_000, 7), (300, 64, 128)])
def test_equals_the_exact_sum_on_a_gpu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64, device="cuda").to(dtype)
    sums = row_sums.row_sums(x)
    assert_sums(sums, x)
    assert torch.equal(sums, row_sums.row_sums(x))


@pytest.mark.parametrize("dtype", [pytest.param(dtype, marks=gpu) for dtype in (torch.float32, torch.bfloat16)])
def test_the_gradient_of_a_bias(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight, bias, given = (
        torch.randn(*shape, dtype=dtype, device="cuda", requires_grad=True)
        for shape in ((4, 2048, 64), (4, 256, 64), (4, 256), (4, 2048, 256))
    )
    assert row_sums.suits(given)
    (grad,) = torch.autograd.grad(Linear.apply(x, weight, bias), bias, given)
    assert_sums(grad, given.detach())
