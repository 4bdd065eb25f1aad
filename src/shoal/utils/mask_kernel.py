"""Masks of dropout on a GPU in one kernel: the bits of `randomness.counter_bits`, compared and scaled in registers.

Written with tensor operators, a mask takes a dozen passes over 8-byte integers. Here each element is written once, in
the mask's own dtype. For a compiler the kernel is one opaque operator, so that it does not compute the hash again
wherever the mask is read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _mix(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> 16)) * tl.full([], 0x7FEB352D, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full([], 0x846CA68B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit  # type: ignore[untyped-decorator]
def _write_mask(seeds, steps, sites, limits, scales, out, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    member = tl.program_id(1)
    golden = tl.full([], 0x9E3779B9, tl.uint32)
    seed = tl.load(seeds + member)
    low, high = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    step = (tl.load(steps + member) & 0xFFFFFFFF).to(tl.uint32)
    site = (tl.load(sites + member) & 0xFFFFFFFF).to(tl.uint32)
    key = _mix(low ^ _mix(high))
    key = _mix(key ^ _mix(step + golden))
    key = _mix(key ^ _mix((site + 1) * tl.full([], 0x85EBCA6B, tl.uint32)))
    again = _mix(key + golden)
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bits = _mix(_mix(element.to(tl.uint32) ^ key) ^ again)
    scale = tl.load(scales + member)
    value = tl.where(bits.to(tl.int64) < tl.load(limits + member), scale, 0.0)
    place = member.to(tl.int64) * count + element
    tl.store(out + place, value.to(out.dtype.element_ty), mask=element < count)


@torch.library.custom_op("shoal::counter_mask", mutates_args=())
def counter_mask(seeds: Tensor, steps: Tensor, sites: Tensor, limits: Tensor, scales: Tensor, count: int) -> Tensor:
    """[M, count]: each member's scale where its bits are below its limit, else zero, in the dtype of `scales`.

    All but `count` are [M] on one GPU; all but `scales` are int64.
    """
    out = torch.empty(len(seeds), count, dtype=scales.dtype, device=seeds.device)
    if out.numel():
        with torch.cuda.device(seeds.device):
            grid = (triton.cdiv(count, BLOCK), len(seeds))
            _write_mask[grid](seeds, steps, sites, limits, scales, out, count, BLOCK=BLOCK)
    return out


@counter_mask.register_fake
def _(seeds: Tensor, steps: Tensor, sites: Tensor, limits: Tensor, scales: Tensor, count: int) -> Tensor:
    return torch.empty(len(seeds), count, dtype=scales.dtype, device=seeds.device)
