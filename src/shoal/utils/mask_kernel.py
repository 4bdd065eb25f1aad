"""Dropout masks on a GPU in one kernel: the bits of `randomness.counter_bits`, compared and scaled in registers.

With tensor operators, a mask takes a dozen passes over 8-byte integers. Here each element is written once, in the
mask's own dtype. For a compiler the kernel is one opaque operator, so that it does not compute the hash again wherever
the mask is read.

The time of the kernel is that of the hash, `mix(mix(i ^ key) ^ again)`, so three steps of it are done more cheaply,
with the same results:

- A thread has STEP elements i = base + j, with base a multiple of STEP, so that i ^ key is base ^ key ^ j, and the
  first x ^ (x >> 16) is one exclusive or with j.
- The first mix ends with y ^= y >> 16, and the second begins with it, after an exclusive or with `again`. The two
  shifts undo each other, and what is left is an exclusive or with `again ^ (again >> 16)`.
- The last y ^ (y >> 16) is only compared with a limit. Its upper half is that of y. Where this half equals the limit's,
  the lower half is that of y ^ (limit >> 16), and elsewhere the lower half does not matter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.utils import cuda_kernels

THREADS, BLOCKS_OF_A_PROCESSOR, STEP = 256, 8, 8
_SIZES = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "unsigned long long"}
_TEMPLATE = """
struct alignas(STEP * sizeof(ELEMENT) < 16 ? STEP * sizeof(ELEMENT) : 16) step { ELEMENT v[STEP]; };
__device__ inline unsigned mix(unsigned x) {
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}
extern "C" __global__ void write_mask(const long long* seeds, const long long* steps, const long long* sites,
                                      const long long* limits, const ELEMENT* scales, ELEMENT* out, int count) {
  __shared__ unsigned shared_key;
  const int member = blockIdx.y;
  if (threadIdx.x == 0) {
    const unsigned long long seed = seeds[member];
    unsigned key = mix((unsigned)seed ^ mix((unsigned)(seed >> 32)));
    key = mix(key ^ mix((unsigned)steps[member] + 0x9E3779B9u));
    shared_key = mix(key ^ mix(((unsigned)sites[member] + 1u) * 0x85EBCA6Bu));
  }
  __syncthreads();
  const unsigned key = shared_key, again = mix(key + 0x9E3779B9u), between = again ^ (again >> 16);
  const long long limit = limits[member];
  const unsigned last = limit > 0xFFFFFFFFll ? 0xFFFFFFFFu : (unsigned)limit - 1u, upper = last >> 16;
  const ELEMENT scale = limit > 0 ? scales[member] : (ELEMENT)0;
  ELEMENT* row = out + (long long)member * count;
  const bool whole_steps = (unsigned long long)row % alignof(step) == 0;
  const unsigned stride = gridDim.x * blockDim.x * STEP;
  for (unsigned base = (blockIdx.x * blockDim.x + threadIdx.x) * STEP; base < (unsigned)count; base += stride) {
    const unsigned start = base ^ key, first = start ^ (start >> 16);
    step value;
#pragma unroll
    for (unsigned j = 0; j < STEP; j++) {
      unsigned x = (first ^ j) * 0x7FEB352Du;
      x = (x ^ (x >> 15)) * 0x846CA68Bu;
      x = (x ^ between) * 0x7FEB352Du;
      x = (x ^ (x >> 15)) * 0x846CA68Bu;
      value.v[j] = (x ^ upper) <= last ? scale : (ELEMENT)0;
    }
    if (whole_steps && base + STEP <= (unsigned)count) *(step*)(row + base) = value;
    else
#pragma unroll
      for (unsigned j = 0; j < STEP; j++)
        if (base + j < (unsigned)count) row[base + j] = value.v[j];
  }
}
"""


_SOURCES = {size: cuda_kernels.constants({"ELEMENT": name, "STEP": STEP}) + _TEMPLATE for size, name in _SIZES.items()}
"""The sources by the bytes of an element; zero has no bits set in any dtype."""


def write_mask(seeds: Tensor, steps: Tensor, sites: Tensor, limits: Tensor, scales: Tensor, count: int) -> Tensor:
    """Return a mask [M, count]: each member's scale where its bits are below its limit, else zero, in the dtype of
    `scales`.

    All arguments but `count` are [M] on one GPU; all but `scales` are int64.
    """
    members = len(seeds)
    out = torch.empty(members, count, dtype=scales.dtype, device=seeds.device)
    if out.numel():
        columns = [column.contiguous() for column in (seeds, steps, sites, limits, scales)]
        with cuda_kernels.current_device(seeds.device):
            (kernel,) = cuda_kernels.load(_SOURCES[scales.dtype.itemsize], ["write_mask"])
            most = -(-cuda_kernels.processors(seeds.device) * BLOCKS_OF_A_PROCESSOR // members)
            grid = min(-(-count // (THREADS * STEP)), most), members, 1
            kernel(grid=grid, block=(THREADS, 1, 1), args=[*columns, out, count])
    return out


counter_mask = torch.library.custom_op("shoal::counter_mask", write_mask, mutates_args=())
"""`write_mask` as an operator, which a compiler does not look into; calling it takes ten times as long."""


@counter_mask.register_fake
def _(seeds: Tensor, steps: Tensor, sites: Tensor, limits: Tensor, scales: Tensor, count: int) -> Tensor:
    return torch.empty(len(seeds), count, dtype=scales.dtype, device=seeds.device)
