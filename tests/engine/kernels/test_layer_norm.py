"""Layer norm of all members at once, against torch's own in float64: kernels compiled for the host, and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.engine.equality import numbers
from tests.engine.kernels import host_blocks
from tests.engine.rules.stacking import assert_stacks
from torch import Tensor

from shoal.engine.kernels import layer_norm, row_sums

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
SHAPES = [(2, 70, 128), (3, 5, 5), (1, 1, 1), (2, 9, 1024), (2, 40, 100), (2, 33, 1023), (3, 130, 8), (2, 17, 260)]
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
on_host = pytest.mark.skipif(host_blocks.COMPILER is None, reason="needs a C++ compiler")


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_norm, "load", host_blocks.load)
    monkeypatch.setattr(row_sums, "load", host_blocks.load)


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))


def results(function: Any, inputs: list[Tensor | None], given: Tensor) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in inputs if t is not None]
    rest = iter(leaves)
    out = function(*(None if t is None else next(rest) for t in inputs))
    return [out.detach(), *torch.autograd.grad(out, leaves, given.to(out.dtype))]


def compare(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    affine: torch.dtype | None,
    own: bool,
    device: str,
    shift: bool = True,
) -> None:
    """Compare with float64: no result may be further from it than rounding allows."""
    torch.manual_seed(0)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    x = (torch.randn(shape, dtype=torch.float64, device=device) * 2 + 3).to(dtype)
    scale, bias = (torch.randn(shape[0], shape[2], dtype=torch.float64, device=device) for _ in range(2))
    inputs = [x, None if affine is None else scale.to(affine), None if affine is None or not shift else bias.to(affine)]
    given = torch.randn(shape, dtype=torch.float64, device=device).to(dtype if own else wide)
    ours = results(lambda *t: layer_norm.LayerNorm.apply(*t, 1e-5, own), inputs, given)
    exact = [None if t is None else t.double() for t in inputs]
    theirs = results(lambda *t: layer_norm.by_operators(*t, 1e-5), exact, given.double())
    assert ours[0].dtype == (dtype if own else wide)
    wanted = [ours[0], *(t for t in inputs if t is not None)]
    for a, b, like in zip(ours, theirs, wanted, strict=True):
        assert a.dtype == like.dtype and a.shape == b.shape
        if shape[2] > 1:  # the gradient of a row of one element is what rounding leaves of nothing
            assert distance(a, b) < 2 * max(TOLERANCE[like.dtype], TOLERANCE[wide])


@on_host
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_layer_norm(host: None, shape: tuple[int, ...]) -> None:
    compare(shape, torch.float32, affine=torch.float32, own=False, device="cpu")


@on_host
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(2, 70, 128), (2, 33, 33), (2, 9, 1024)])
def test_equals_layer_norm_in_other_dtypes(host: None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    compare(shape, dtype, affine=dtype, own=True, device="cpu")


@on_host
@pytest.mark.parametrize("affine", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("own", [False, True])
def test_scale_and_shift_of_another_dtype_or_none(host: None, affine: torch.dtype | None, own: bool) -> None:
    compare((2, 30, 48), torch.bfloat16, affine=affine, own=own, device="cpu")


@on_host
def test_a_scale_alone(host: None) -> None:
    compare((2, 30, 48), torch.float32, affine=torch.float32, own=False, device="cpu", shift=False)


@on_host
def test_members_that_share_a_scale_which_is_not_trained(host: None) -> None:
    torch.manual_seed(0)
    x, given = torch.randn(3, 20, 12, requires_grad=True), torch.randn(3, 20, 12)
    weight, bias = torch.randn(12).expand(3, 12), torch.randn(24)[::2].expand(3, 12)
    ours = layer_norm.LayerNorm.apply(x, weight, bias, 1e-5, False)
    theirs = layer_norm.by_operators(x, weight, bias, 1e-5)
    assert distance(ours.detach(), theirs.detach()) < 1e-6
    (a,), (b,) = (torch.autograd.grad(out, x, given) for out in (ours, theirs))
    assert distance(a, b) < 1e-6


@on_host
def test_rows_of_equal_elements_and_rows_with_a_nan(host: None) -> None:
    x = torch.full((1, 3, 16), 7.0)
    x[0, 1, 3] = float("nan")
    out = layer_norm.LayerNorm.apply(x, None, None, 1e-5, False)
    assert out[0, 0].eq(0).all() and out[0, 1].isnan().all() and out[0, 2].eq(0).all()


@on_host
def test_the_gradient_can_be_differentiated_again(host: None) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 5, 6), (2, 6), (2, 6))]
    kernels, operators = layer_norm.LayerNorm.apply(*inputs, 1e-5, False), layer_norm.by_operators(*inputs, 1e-5)
    second = []
    for out in (kernels, operators):
        (first,) = torch.autograd.grad(out.pow(3).sum(), inputs[0], create_graph=True)
        second.append(torch.autograd.grad(first.square().sum(), inputs[:2]))
    assert all(distance(p, q) < 1e-10 for p, q in zip(*second, strict=True))


X, SCALE, SHIFT = numbers(1, 4, 3, 5), numbers(2, 5), numbers(3, 5)
RULES: dict[str, tuple[Callable[..., Any], list[Tensor], str]] = {
    "scale and shift": (lambda x, w, b: F.layer_norm(x, (5,), w, b), [X, SCALE, SHIFT], "ppp"),
    "neither": (lambda x: F.layer_norm(x, (5,), eps=1e-3), [X], "p"),
    "a shift alone": (lambda x, b: F.layer_norm(x, (5,), None, b), [X, SHIFT], "pp"),
    "two dimensions": (lambda x, w: F.layer_norm(x, (3, 5), w), [X, numbers(4, 3, 5)], "pp"),
    "no rows": (lambda x, w: F.layer_norm(x, (4, 3, 5), w), [X, numbers(5, 4, 3, 5)], "pp"),
    "a transposed input": (lambda x, w: F.layer_norm(x.transpose(1, 2), (3,), w), [X, numbers(6, 3)], "pp"),
    "a constant scale": (lambda x: F.layer_norm(x, (5,), torch.arange(5.0, dtype=torch.float64)), [X], "p"),
}


@on_host
@pytest.mark.parametrize("name", RULES)
def test_the_rule_with_kernels(host: None, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    used: list[int] = []
    monkeypatch.setattr(layer_norm, "suits", lambda x, size, *_: not used.append(size))
    function, tensors, kinds = RULES[name]
    assert_stacks(function, tensors, kinds)
    assert used


@pytest.mark.parametrize("dtype", [pytest.param(dtype, marks=gpu) for dtype in TOLERANCE])
@pytest.mark.parametrize("shape", [*SHAPES, (16, 4096, 128), (3, 1000, 768), (300, 3, 64)])
def test_equals_layer_norm_on_a_gpu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    compare(shape, dtype, affine=dtype, own=True, device="cuda")
    compare(shape, dtype, affine=torch.float32, own=False, device="cuda")
    compare(shape, dtype, affine=None, own=False, device="cuda")


@pytest.mark.parametrize("dtype", [pytest.param(dtype, marks=gpu) for dtype in TOLERANCE])
def test_the_same_sums_each_time(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, scale, shift = (torch.randn(*shape, device="cuda").to(dtype) for shape in ((16, 999, 128), (16, 128), (16, 128)))
    twice = [
        results(lambda *t: layer_norm.LayerNorm.apply(*t, 1e-5, False), [x, scale, shift], x.float()) for _ in range(2)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*twice, strict=True))
