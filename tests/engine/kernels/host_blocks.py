"""Kernels compiled for the host, where there is no GPU: the same source, with blocks one after another and the threads
of a block as fibers that take turns at each barrier and shuffle.

A shuffle or a barrier that not every thread of the warp or block reaches is an error here, as it is on a GPU.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from shoal.engine.kernels.elements import HALF_PRECISION
from shoal.utils.cuda_kernels import Kernel

COMPILER = shutil.which("g++")
_BEGIN = re.compile(r'extern "C" __global__ void (\w+)\(([^)]*)\)')
_PRELUDE = r"""
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>
#include <ucontext.h>
using std::min; using std::max; using std::sqrt;
#define __global__
#define __device__
#define __shared__ static
#define __restrict__
struct place { unsigned x, y, z; };
static place blockIdx, threadIdx, blockDim, gridDim;
static inline float __uint_as_float(unsigned u) { float f; std::memcpy(&f, &u, 4); return f; }
static inline unsigned __float_as_uint(float f) { unsigned u; std::memcpy(&u, &f, 4); return u; }
static inline float rsqrt(float x) { return 1 / std::sqrt(x); }
static inline double rsqrt(double x) { return 1 / std::sqrt(x); }

struct barrier { int waiting = 0, generation = 0; };
struct fiber { ucontext_t context; bool done = false; int shuffles = 0; };
static std::vector<fiber> fibers;
static std::vector<std::vector<char>> stacks;
static std::vector<barrier> warps;
static barrier block;
static ucontext_t scheduler;
static unsigned current;
static long passed;
static double exchanged[2][1024];
static std::function<void()> body;

static void take_turns() { swapcontext(&fibers[current].context, &scheduler); threadIdx.x = current; }
static void wait_at(barrier& b, int size) {
  if (++b.waiting == size) { b.waiting = 0; b.generation++; passed++; return; }
  const int generation = b.generation;
  while (b.generation == generation) take_turns();
}
static void __syncthreads() { wait_at(block, fibers.size()); }
template <typename T> static T __shfl_xor_sync(unsigned mask, T value, int offset) {
  if (mask != 0xffffffffu) { std::fprintf(stderr, "a shuffle of part of a warp\n"); std::abort(); }
  const unsigned me = current;
  double* held = exchanged[fibers[me].shuffles++ % 2];
  held[me] = value;
  wait_at(warps[me / 32], std::min(32, (int)fibers.size() - (int)(me / 32 * 32)));
  return (T)held[me ^ offset];
}
static void start() {
  body();
  fibers[current].done = true;
  passed++;
  swapcontext(&fibers[current].context, &scheduler);
}
static int run_block(unsigned threads) {
  fibers.assign(threads, fiber());
  stacks.resize(threads, std::vector<char>(1 << 16));
  warps.assign((threads + 31) / 32, barrier());
  block = barrier();
  for (unsigned t = 0; t < threads; t++) {
    getcontext(&fibers[t].context);
    fibers[t].context.uc_stack.ss_sp = stacks[t].data();
    fibers[t].context.uc_stack.ss_size = stacks[t].size();
    makecontext(&fibers[t].context, start, 0);
  }
  for (;;) {
    const long before = passed;
    bool running = false;
    for (current = 0; current < threads; current++)
      if (!fibers[current].done) {
        running = true;
        threadIdx = {current, 0, 0};
        swapcontext(&scheduler, &fibers[current].context);
      }
    if (!running) return 0;
    if (passed == before) return 1;  // all wait for threads that never come
  }
}
static int run_grid(unsigned x, unsigned y, unsigned z, unsigned threads, std::function<void()> kernel) {
  body = kernel;
  gridDim = {x, y, z};
  blockDim = {threads, 1, 1};
  for (unsigned k = 0; k < z; k++)
    for (unsigned j = 0; j < y; j++)
      for (unsigned i = 0; i < x; i++) {
        blockIdx = {i, j, k};
        if (run_block(threads)) return 1;
      }
  return 0;
}
"""
_HALF = """
typedef unsigned short half_bits;
static float from_bf16(half_bits x) { return __uint_as_float((unsigned)x << 16); }
static half_bits to_bf16(float x) {
  unsigned u = __float_as_uint(x);
  return x != x ? 0x7fff : (half_bits)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
static float from_f16(half_bits x) { _Float16 y; std::memcpy(&y, &x, 2); return (float)y; }
static half_bits to_f16(float x) { _Float16 y = (_Float16)x; half_bits z; std::memcpy(&z, &y, 2); return z; }
"""


def load(source: str, names: Sequence[str]) -> list[Kernel]:
    """Compile a source for the host, as `cuda_kernels.load` does for a GPU."""
    library = _compiled(source)
    return [_kernel(library, name) for name in names]


@cache
def _compiled(source: str) -> ctypes.CDLL:
    assert COMPILER is not None
    path = Path(tempfile.mkdtemp()) / "kernels.cpp"
    launchers = [_launcher(name, parameters) for name, parameters in _BEGIN.findall(source)]
    path.write_text(_PRELUDE + source.replace(HALF_PRECISION, _HALF) + "".join(launchers))
    library = path.with_suffix(".so")
    options = ["-std=c++17", "-O1", "-w", "-fno-gnu-unique", "-shared", "-fPIC"]  # or libraries would share memory
    subprocess.run([COMPILER, *options, "-o", library, path], check=True)
    return ctypes.CDLL(str(library))


def _launcher(name: str, parameters: str) -> str:
    """Return the C++ function that runs a kernel's whole grid; it returns 1 if threads wait for ever."""
    arguments = ", ".join(re.split(r"[\s*]+", parameter.strip())[-1] for parameter in parameters.split(","))
    return (
        f'extern "C" int launch_{name}(unsigned x_, unsigned y_, unsigned z_, unsigned threads_, {parameters}) {{\n'
        f"  return run_grid(x_, y_, z_, threads_, [=] {{ {name}({arguments}); }});\n}}\n"
    )


def _kernel(library: ctypes.CDLL, name: str) -> Kernel:
    def run(*, grid: tuple[int, int, int], block: tuple[int, int, int], args: Sequence[Any]) -> None:
        values = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else ctypes.c_int(a) for a in args]
        stuck = getattr(library, f"launch_{name}")(*map(ctypes.c_uint, (*grid, block[0])), *values)
        assert not stuck, f"{name}: threads wait for others that never come"

    return run
