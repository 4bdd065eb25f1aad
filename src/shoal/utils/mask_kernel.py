"""Dropout masks on a GPU in one kernel: the bits of `randomness.counter_bits`, compared and scaled in registers.

With tensor operators, a mask takes a dozen passes over 8-byte integers. Here each element is written once, in the
mask's own dtype. For a compiler the kernel is one opaque operator, so that it does not compute the hash again wherever
the mask is read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.utils import cuda_kernels

THREADS, MOST_BLOCKS = 256, 4096
_SIZES = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "unsigned long long"}
_TEMPLATE = """
__device__ inline unsigned mix(unsigned x) {
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}
extern "C" __global__ void write_mask(const long long* seeds, const long long* steps, const long long* sites,
                                      const long long* limits, const ELEMENT* scales, ELEMENT* out, int count) {
  const int member = blockIdx.y;
  const unsigned long long seed = seeds[member];
  unsigned key = mix((unsigned)seed ^ mix((unsigned)(seed >> 32)));
  key = mix(key ^ mix((unsigned)steps[member] + 0x9E3779B9u));
  key = mix(key ^ mix(((unsigned)sites[member] + 1u) * 0x85EBCA6Bu));
  const unsigned again = mix(key + 0x9E3779B9u);
  const long long limit = limits[member];
  const ELEMENT scale = scales[member];
  ELEMENT* row = out + (long long)member * count;
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < (unsigned)count; i += gridDim.x * blockDim.x)
    row[i] = (long long)mix(mix(i ^ key) ^ again) < limit ? scale : (ELEMENT)0;
}
"""


_SOURCES = {size: _TEMPLATE.replace("ELEMENT", name) for size, name in _SIZES.items()}
"""The sources by the bytes of an element; zero has no bits set in any dtype."""


def write_mask(seeds: Tensor, steps: Tensor, sites: Tensor, limits: Tensor, scales: Tensor, count: int) -> Tensor:
    """Return a mask [M, count]: each member's scale where its bits are below its limit, else zero, in the dtype of
    `scales`.

    All arguments but `count` are [M] on one GPU; all but `scales` are int64.
    """
    out = torch.empty(len(seeds), count, dtype=scales.dtype, device=seeds.device)
    if out.numel():
        columns = [column.contiguous() for column in (seeds, steps, sites, limits, scales)]
        with torch.cuda.device(seeds.device):
            (kernel,) = cuda_kernels.load(_SOURCES[scales.dtype.itemsize], ["write_mask"])
            grid = min(-(-count // THREADS), MOST_BLOCKS), len(seeds), 1
            kernel(grid=grid, block=(THREADS, 1, 1), args=[*columns, out, count])
    return out


counter_mask = torch.library.custom_op("shoal::counter_mask", write_mask, mutates_args=())
"""`write_mask` as an operator, which a compiler does not look into; calling it takes ten times as long."""


@counter_mask.register_fake
def _(seeds: Tensor, steps: Tensor, sites: Tensor, limits: Tensor, scales: Tensor, count: int) -> Tensor:
    return torch.empty(len(seeds), count, dtype=scales.dtype, device=seeds.device)
