"""How a kernel reads, converts and writes the elements of a tensor."""

from __future__ import annotations

from typing import Any

import torch

HALF_PRECISION = """
typedef unsigned short half_bits;
__device__ inline float from_bf16(half_bits x) { return __uint_as_float((unsigned)x << 16); }
__device__ inline half_bits to_bf16(float x) {
  unsigned u = __float_as_uint(x);
  return x != x ? 0x7fff : (half_bits)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
__device__ inline float from_f16(half_bits x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x)); return y; }
__device__ inline half_bits to_f16(float x) { half_bits y; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x)); return y; }
"""
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
LARGEST = 2**31
"""Kernels index with 32 bits."""
MOST_MEMBERS = 65535
"""The most blocks along the second and the third axis of a grid."""
_BYTES = 16
"""The most bytes that a thread reads or writes at once."""


def width_of(dtype: torch.dtype, channels: int) -> int:
    """Return the number of channels that are read at once."""
    return next(width for width in (8, 4, 2, 1) if width * dtype.itemsize <= _BYTES and channels % width == 0)


def constants_of(dtype: torch.dtype, width: int) -> dict[str, Any]:
    """Return the macros of a kernel's source: the types in which elements are stored and computed, and the conversions
    between them."""
    half = {torch.bfloat16: "bf16", torch.float16: "f16"}.get(dtype)
    if half is not None:
        return {"ELEMENT": "half_bits", "WIDE": "float", "FROM": f"from_{half}", "TO": f"to_{half}", "WIDTH": width}
    name = "double" if dtype == torch.float64 else "float"
    return {"ELEMENT": name, "WIDE": name, "FROM": "", "TO": "", "WIDTH": width}


WORD = HALF_PRECISION + "struct alignas(sizeof(ELEMENT) * WIDTH) word { ELEMENT v[WIDTH]; };\n"
"""The start of a source whose threads read and write words of WIDTH elements."""
