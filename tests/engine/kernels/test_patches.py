"""Convolutions as products of patches: the values and gradients of torch's own, first and second order."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.engine.kernels.patches import Window, add_patches, patches, suits
from shoal.engine.rules._conv import Convolution

MEMBERS, ROWS = 3, 2
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]
CASES = [  # channels in and out, image, size, stride, padding, dilation
    (1, 32, (28, 28), (3, 3), (1, 1), (1, 1), (1, 1)),
    (3, 5, (9, 11), (3, 2), (2, 1), (1, 0), (1, 2)),
    (8, 16, (8, 8), (3, 3), (2, 2), (1, 1), (1, 1)),
    (4, 4, (5, 5), (1, 1), (1, 1), (0, 0), (1, 1)),
    (32, 6, (1, 7), (1, 3), (1, 1), (0, 1), (1, 1)),
]


def _of_case(case: tuple, device: str, dtype: torch.dtype, *, last: bool) -> tuple[list[Tensor], Window]:
    inside, out, image, *numbers = case
    torch.manual_seed(0)
    options = {"device": device, "dtype": dtype}
    x = torch.randn(MEMBERS, ROWS, inside, *image, **options)
    if last:
        x = x.movedim(2, -1).contiguous().movedim(-1, 2)
    weight, bias = torch.randn(MEMBERS, out, inside, *numbers[0], **options), torch.randn(MEMBERS, out, **options)
    return [tensor.requires_grad_() for tensor in (x, weight, bias)], Window(*numbers)


def _alone(x: Tensor, weight: Tensor, bias: Tensor | None, window: Window) -> Tensor:
    return torch.stack(
        [
            F.conv2d(x[m], weight[m], None if bias is None else bias[m], window.stride, window.padding, window.dilation)
            for m in range(MEMBERS)
        ]
    )


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.detach().double() - b.detach().double()).norm() / b.detach().double().norm().clamp(min=1e-30))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_equals_a_convolution_of_each_member(case: tuple, last: bool, device: str) -> None:
    inputs, window = _of_case(case, device, torch.float64, last=last)
    assert suits(inputs[0], window)
    ours, theirs = Convolution.apply(*inputs, window), _alone(*inputs, window)
    assert _distance(ours, theirs) < 1e-12
    given = torch.randn_like(theirs)
    first = [torch.autograd.grad(out, inputs, given, create_graph=True) for out in (ours, theirs)]
    for a, b in zip(*first, strict=True):
        assert _distance(a, b) < 1e-12
    second = [torch.autograd.grad(sum(g.square().sum() for g in grads), inputs[:2]) for grads in first]
    for a, b in zip(*second, strict=True):
        assert _distance(a, b) < 1e-12


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_patches_on_a_gpu_are_those_of_operators(case: tuple, last: bool, dtype: torch.dtype) -> None:
    (x, *_), window = _of_case(case, "cuda", dtype, last=last)
    for with_one in (True, False):
        rows = patches(x.detach(), window.numbers, with_one)
        torch.testing.assert_close(rows.cpu(), patches(x.detach().cpu(), window.numbers, with_one), rtol=0, atol=0)
    wide = torch.randn_like(rows)
    ours, theirs = (add_patches(t, window.numbers, list(x.shape)) for t in (wide, wide.double().cpu()))
    assert _distance(ours.cpu(), theirs) < {2: 5e-3, 4: 1e-6}[dtype.itemsize]


def test_without_a_bias_and_with_images_that_all_members_share() -> None:
    (x, weight, _), window = _of_case(CASES[1], "cpu", torch.float64, last=False)
    shared = x[:1].expand(MEMBERS, -1, -1, -1, -1)
    ours, theirs = Convolution.apply(shared, weight, None, window), _alone(shared, weight, None, window)
    assert _distance(ours, theirs) < 1e-12
    a, b = (torch.autograd.grad(out.square().sum(), [x, weight]) for out in (ours, theirs))
    assert all(_distance(p, q) < 1e-12 for p, q in zip(a, b, strict=True))


def test_a_window_without_a_place_is_left_to_torch() -> None:
    assert not suits(torch.zeros(2, 2, 3, 2, 2), Window((3, 3), (1, 1), (0, 0), (1, 1)))
