"""Max pooling on a GPU: torch's values and gradients, of equal elements and of NaN too."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from shoal.engine.kernels.pooling import MaxPool, suits

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("shape", "size"),
    [((4, 8, 6, 6), (2, 2)), ((3, 5, 7, 9), (3, 2)), ((2, 32, 28, 28), (2, 2)), ((2, 3, 4, 4), (4, 4))],
)
def test_equals_max_pool2d(shape: tuple[int, ...], size: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randint(-2, 3, shape, device="cuda").to(dtype)
    x[0, 0, 0, 0] = x[0, 0, 1, 1] = x[1, 1, 0, 1] = float("nan")
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    assert suits(x, size)
    ours, theirs = MaxPool.apply(x, size), F.max_pool2d(x, size)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    assert ours.is_contiguous(memory_format=torch.channels_last)
    given = torch.randn_like(theirs)
    a, b = (torch.autograd.grad(out, x, given)[0] for out in (ours, theirs))
    torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_the_gradient_can_be_differentiated_again() -> None:
    x = torch.randn(2, 4, 6, 6, device="cuda").contiguous(memory_format=torch.channels_last).requires_grad_()
    second = []
    for out in (MaxPool.apply(x, (2, 2)), F.max_pool2d(x, 2)):
        (first,) = torch.autograd.grad(out.pow(3).sum(), x, create_graph=True)
        second.append(torch.autograd.grad(first.square().sum(), x)[0])
    torch.testing.assert_close(*second)


def test_other_layouts_are_left_to_torch() -> None:
    x = torch.randn(2, 4, 6, 6, device="cuda")
    assert not suits(x, (2, 2))
    assert not suits(x.contiguous(memory_format=torch.channels_last), (7, 2))
