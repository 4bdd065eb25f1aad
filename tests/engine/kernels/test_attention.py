"""Attention with dropout in one kernel, against the same attention with tensor operators."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from shoal.engine.kernels import attention
from shoal.utils.randomness import Draw, DrawSource, draw_columns

MEMBERS = 3
Sizes = tuple[int, int, int, int, int]
"""Rows, heads, queries, keys, width of a head."""


def source(sizes: Sizes, rate: float, dtype: torch.dtype, device: str) -> DrawSource:
    draw = Draw("dropout", sizes[:4], dtype, None, ((rate,),) * MEMBERS)
    seeds = torch.tensor([3, -(2**62), 2**40 + 1], device=device)
    steps, sites = torch.tensor([0, 7, 2**33], device=device), torch.tensor([0, 5, 1], device=device)
    columns = draw_columns(draw, MEMBERS, torch.device(device))
    return DrawSource(seeds, steps, sites, *columns)


def mask_of(kind: str | None, sizes: Sizes, dtype: torch.dtype, device: str) -> Tensor | None:
    rows, heads, queries, keys, _ = sizes
    wide = (MEMBERS, rows, heads, queries, keys)
    if kind is None:
        return None
    if kind == "each":
        return torch.randn(wide, device=device).to(dtype)
    padding = torch.zeros(rows, 1, 1, keys, device=device)
    padding[0, ..., keys // 2 :] = -math.inf if kind == "padding" else torch.finfo(dtype).min
    padding[-1] = padding[0, 0, 0, -1]  # nothing to attend to
    return padding.to(dtype).expand(wide)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("sizes", "causal", "kind", "rate"),
    [
        ((2, 4, 128, 128, 32), True, None, 0.1),
        ((2, 3, 64, 64, 16), False, "padding", 0.1),
        ((2, 1, 17, 40, 24), False, "lowest", 0.5),
        ((1, 2, 200, 300, 64), False, "each", 0.1),
        ((2, 2, 333, 333, 128), True, None, 0.1),
        ((1, 2, 50, 50, 40), True, "padding", 0.0),
        ((1, 1, 8, 8, 8), False, None, 1.0),
    ],
)
def test_it_equals_the_operators(sizes: Sizes, causal: bool, kind: str | None, rate: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows, heads, queries, keys, width = sizes
    device = "cuda"
    lengths = (queries, keys, keys)
    given = [torch.randn(MEMBERS, rows, n, heads, width, device=device).to(dtype) for n in lengths]
    q, k, v = (x.transpose(2, 3).requires_grad_() for x in given)
    mask, drawn = mask_of(kind, sizes, dtype, device), source(sizes, rate, dtype, device)
    shape = attention.Shape(dtype, width, queries, keys, causal, mask is not None)
    assert attention.suits(torch.device(device), shape, math.prod(sizes[:4])) and attention.ready(shape, q.device)
    out = attention.DroppedAttention.apply(q, k, v, mask, drawn, causal, 1 / math.sqrt(width))
    a, b, c = (x.detach().double().requires_grad_() for x in (q, k, v))
    exact = mask if mask is None else mask.double()
    expected = attention.by_operators(a, b, c, exact, drawn, causal, 1 / math.sqrt(width))
    grad = torch.randn_like(expected).to(dtype)
    out.backward(grad)
    expected.backward(grad.double())
    for ours, theirs in ((out, expected), (q.grad, a.grad), (k.grad, b.grad), (v.grad, c.grad)):
        assert ours is not None and theirs is not None and bool(torch.isfinite(ours).all())
        bound = 2e-2 if dtype == torch.bfloat16 else 4e-3
        assert (ours.double() - theirs).norm() <= bound * theirs.norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_gradient_can_be_differentiated_again() -> None:
    sizes = (2, 2, 20, 20, 16)
    torch.manual_seed(0)
    q, k, v = (torch.randn(MEMBERS, 2, 2, 20, 16, device="cuda").bfloat16().requires_grad_() for _ in range(3))
    drawn = source(sizes, 0.2, torch.bfloat16, "cuda")
    second = []
    for function in (attention.DroppedAttention.apply, attention.by_operators):
        (first,) = torch.autograd.grad(function(q, k, v, None, drawn, False, 0.25).sum(), q, create_graph=True)
        second.append(torch.autograd.grad(first.square().sum(), k)[0].double())
    assert (second[0] - second[1]).norm() <= 3e-2 * second[1].norm()


@pytest.mark.parametrize(
    ("shape", "elements"),
    [
        (attention.Shape(torch.float32, 32, 64, 64, True, False), 100),
        (attention.Shape(torch.bfloat16, 20, 64, 64, True, False), 100),
        (attention.Shape(torch.bfloat16, 256, 64, 64, True, False), 100),
        (attention.Shape(torch.bfloat16, 32, 64, 64, True, False), 2**31),
    ],
    ids=["float32", "odd width", "wide", "too many elements"],
)
def test_other_attention_uses_the_operators(shape: attention.Shape, elements: int) -> None:
    assert not attention.suits(torch.device("cuda"), shape, elements)
    assert not attention.suits(torch.device("cpu"), shape, 100)


@pytest.mark.parametrize(
    ("keys", "width", "short"), [(128, 32, True), (129, 32, False), (65, 128, False), (5, 8, True)]
)
def test_few_keys_are_one_block(keys: int, width: int, short: bool) -> None:
    shape = attention.Shape(torch.bfloat16, width, 100, keys, False, False)
    assert shape.short == short
    assert all(size >= 16 and size & (size - 1) == 0 for size in shape.blocks.values())
