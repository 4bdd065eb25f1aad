"""Masks of the kernel, compiled for the host, against those of the tensor operators: the same bits."""

from __future__ import annotations

import pytest
import torch
from tests.engine.kernels import host_blocks
from torch import Tensor

from shoal.utils import cuda_kernels, mask_kernel
from shoal.utils.randomness import counter_bits

SEEDS = torch.tensor([3, -1, 2**40 + 7, 5, 6])
STEPS = torch.tensor([0, 5, 2**33, 1, 2])
SITES = torch.tensor([0, 7, 2**20, 1, 2])
LIMITS = torch.tensor([int(0.9 * 2**32), 1, 2**32, 0, 2**31])


def expected(seeds: Tensor, limits: Tensor, scales: Tensor, count: int) -> Tensor:
    bits = counter_bits(seeds, STEPS.to(seeds.device), SITES.to(seeds.device), count)
    below = bits < limits.unsqueeze(1)
    return torch.where(below, scales.unsqueeze(1), torch.zeros_like(scales).unsqueeze(1))


def scales_of(dtype: torch.dtype) -> Tensor:
    return torch.tensor([1, 1, 0, 1, 1]).bool() if dtype == torch.bool else torch.tensor([1.1, 2, 3, 4, 5]).to(dtype)


@pytest.mark.skipif(host_blocks.COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool])
@pytest.mark.parametrize("count", [1, 7, 8, 1025, 4096, 70000])
def test_the_bits_are_those_of_the_hash(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, count: int) -> None:
    monkeypatch.setattr(cuda_kernels, "load", host_blocks.load)
    monkeypatch.setattr(mask_kernel, "BLOCKS_OF_A_PROCESSOR", 3)  # so that a thread has more than one step
    scales = scales_of(dtype)
    drawn = mask_kernel.write_mask(SEEDS, STEPS, SITES, LIMITS, scales, count)
    assert drawn.dtype == dtype and torch.equal(drawn, expected(SEEDS, LIMITS, scales, count))


@pytest.mark.skipif(host_blocks.COMPILER is None, reason="needs a C++ compiler")
def test_an_element_is_kept_if_its_bits_are_below_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits next to the bits of some element, also where only the lower halves differ."""
    monkeypatch.setattr(cuda_kernels, "load", host_blocks.load)
    bits = counter_bits(SEEDS, STEPS, SITES, 64)
    scales = torch.ones(5)
    for element in range(0, 64, 9):
        for offset in (-1, 0, 1, 2):
            limits = bits[:, element] + offset
            drawn = mask_kernel.write_mask(SEEDS, STEPS, SITES, limits, scales, 64)
            assert torch.equal(drawn, expected(SEEDS, limits, scales, 64))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.bool])
@pytest.mark.parametrize("count", [1, 7, 1025, 100_001, 3_000_000])
def test_the_bits_are_those_of_the_hash_on_a_gpu(dtype: torch.dtype, count: int) -> None:
    seeds, steps, sites, limits, scales = (t.cuda() for t in (SEEDS, STEPS, SITES, LIMITS, scales_of(dtype)))
    drawn = mask_kernel.write_mask(seeds, steps, sites, limits, scales, count)
    assert torch.equal(drawn, expected(seeds, limits, scales, count))
