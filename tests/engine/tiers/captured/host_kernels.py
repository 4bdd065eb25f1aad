"""Kernels compiled for the host, where there is no GPU: the same source, block by block, with one thread."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from shoal.utils.cuda_kernels import Kernel

COMPILER = shutil.which("g++")
PRELUDE = """
#include <cmath>
#include <cstring>
using std::exp; using std::tanh; using std::sqrt; using std::log; using std::erf; using std::fabs; using std::pow;
#define __global__
#define __device__
#define asm(...)
#define __restrict__
#define __shared__
#define __dmul_rn(a, b) ((a) * (b))
#define __syncthreads()
#define __syncthreads_or(x) (x)
struct place { unsigned x, y; };
static const place threadIdx{0, 0}, blockDim{1, 1};
static place blockIdx{0, 0}, gridDim{1, 1};
extern "C" void set_block(unsigned x, unsigned y, unsigned grid_x, unsigned grid_y) {
  blockIdx = {x, y};
  gridDim = {grid_x, grid_y};
}
static inline float __uint_as_float(unsigned u) { float f; std::memcpy(&f, &u, 4); return f; }
static inline unsigned __float_as_uint(float f) { unsigned u; std::memcpy(&u, &f, 4); return u; }
static inline float __int_as_float(int u) { return __uint_as_float(u); }
template <typename T> static inline T rsqrt(T x) { return T(1) / std::sqrt(x); }
"""


@functools.cache
def _compiled(source: str) -> ctypes.CDLL:
    assert COMPILER is not None
    folder = Path(tempfile.mkdtemp())
    path = folder / f"{hashlib.sha256(source.encode()).hexdigest()[:16]}.cpp"
    path.write_text(PRELUDE + source)
    library = path.with_suffix(".so")
    subprocess.run([COMPILER, "-O1", "-w", "-shared", "-fPIC", "-o", library, path], check=True)
    return ctypes.CDLL(str(library))


def load(source: str, names: Sequence[str]) -> list[Kernel]:
    loaded = _compiled(source)

    def kernel(name: str) -> Kernel:
        def run(*, grid: Any, block: Any, args: Sequence[Any]) -> None:
            values = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else ctypes.c_int(a) for a in args]
            for x, y in itertools.product(range(grid[0]), range(grid[1])):
                loaded.set_block(x, y, *grid[:2])
                getattr(loaded, name)(*values)

        return run

    return [kernel(name) for name in names]
