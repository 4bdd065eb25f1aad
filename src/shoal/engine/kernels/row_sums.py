"""Sums over the rows of each member's matrix in one pass, rounded once: for the gradients of biases."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.engine.kernels.elements import DTYPES, LARGEST, MOST_MEMBERS, WORD, constants_of, width_of
from shoal.utils.cuda_kernels import aligned, available, compile_ahead, constants, current_device, load, processors

THREADS, BLOCKS_OF_A_PROCESSOR = 256, 8
ROWS_OF_A_THREAD = 8
"""The least number of rows that a thread adds up."""
LEAST_BYTES = 1 << 21
"""For less, torch's one kernel is faster than two of ours."""
_COLUMNS = 32
"""How many columns a block of `add_chunks` adds up."""
_ROWS = """
extern "C" __global__ void sum_rows(const word* x, WIDE* out, int rows, int words, int rows_in_chunk, int lanes) {
  __shared__ WIDE held[WIDTH * THREADS];
  const int lane = threadIdx.x % lanes, line = threadIdx.x / lanes, lines = THREADS / lanes;
  const int at = blockIdx.x * lanes + lane, chunk = blockIdx.y, member = blockIdx.z;
  const int first = chunk * rows_in_chunk, last = min(rows, first + rows_in_chunk);
  const word* from = x + (long long)member * rows * words + at;
  WIDE sums[WIDTH];
#pragma unroll
  for (int j = 0; j < WIDTH; j++) sums[j] = 0;
  if (at < words)
#pragma unroll 4
    for (int row = first + line; row < last; row += lines) {
      const word value = from[(long long)row * words];
#pragma unroll
      for (int j = 0; j < WIDTH; j++) sums[j] += FROM(value.v[j]);
    }
#pragma unroll
  for (int j = 0; j < WIDTH; j++) held[j * THREADS + threadIdx.x] = sums[j];
  __syncthreads();
  if (line == 0 && at < words)
    for (int j = 0; j < WIDTH; j++) {
      WIDE sum = 0;
      for (int l = 0; l < lines; l++) sum += held[j * THREADS + l * lanes + lane];
      out[(((long long)member * gridDim.y + chunk) * words + at) * WIDTH + j] = sum;
    }
}
"""
_CHUNKS = """
extern "C" __global__ void add_chunks(const WIDE* x, ELEMENT* out, int chunks, int columns) {
  __shared__ WIDE held[THREADS];
  const int lane = threadIdx.x % COLUMNS, line = threadIdx.x / COLUMNS, lines = THREADS / COLUMNS;
  const int column = blockIdx.x * COLUMNS + lane, member = blockIdx.y;
  WIDE sum = 0;
  if (column < columns)
#pragma unroll 4
    for (int chunk = line; chunk < chunks; chunk += lines)
      sum += x[((long long)member * chunks + chunk) * columns + column];
  held[threadIdx.x] = sum;
  __syncthreads();
  if (line == 0 && column < columns) {
    for (int l = 1; l < lines; l++) sum += held[l * COLUMNS + lane];
    out[(long long)member * columns + column] = TO(sum);
  }
}
"""


def suits(x_MRC: Tensor) -> bool:
    """Return whether there is a kernel for these matrices that is faster than torch's."""
    size = x_MRC.numel() * x_MRC.dtype.itemsize
    fits = len(x_MRC) <= MOST_MEMBERS and x_MRC.shape[1:].numel() < LARGEST
    return (
        x_MRC.is_cuda and x_MRC.dtype in DTYPES and size >= LEAST_BYTES and fits and x_MRC.is_contiguous()
        and available()
    )  # fmt: skip


def prepare(dtype: torch.dtype, rows: int, columns: int) -> None:
    """Start to compile the kernels for so many rows of all members, if `suits` would hold."""
    if dtype in DTYPES and rows * columns * dtype.itemsize >= LEAST_BYTES:
        compile_ahead(_source(dtype, width_of(dtype, columns)))
        prepare_chunks(_wide(dtype), dtype)


def prepare_chunks(wide: torch.dtype, dtype: torch.dtype) -> None:
    """Start to compile `add_chunks` from one dtype to another."""
    compile_ahead(_source_of_chunks(wide, dtype))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _source(dtype: torch.dtype, width: int) -> str:
    return constants(constants_of(dtype, width) | {"THREADS": THREADS}) + WORD + _ROWS


def _source_of_chunks(wide: torch.dtype, dtype: torch.dtype) -> str:
    sizes = {"THREADS": THREADS, "COLUMNS": _COLUMNS, "WIDE": "double" if wide == torch.float64 else "float"}
    return constants(constants_of(dtype, 1) | sizes) + WORD + _CHUNKS


@torch.library.custom_op("shoal::row_sums", mutates_args=())
def row_sums(x: Tensor) -> Tensor:
    """Return the sums [M, C] over the rows of [M, R, C], in the same dtype."""
    members, rows, columns = x.shape
    width = width_of(x.dtype, columns)
    words = columns // width
    lanes = min(32, 1 << (words - 1).bit_length())
    strips, lines = -(-words // lanes), THREADS // lanes
    enough_chunks = processors(x.device) * BLOCKS_OF_A_PROCESSOR // (members * strips)
    rows_in_chunk = -(-rows // max(1, min(enough_chunks, rows // (lines * ROWS_OF_A_THREAD))))
    chunks = -(-rows // rows_in_chunk)
    partial_sums = torch.empty(members, chunks, columns, dtype=_wide(x.dtype), device=x.device)
    with current_device(x.device):
        (kernel,) = load(_source(x.dtype, width), ["sum_rows"])
        arguments = [aligned(x), partial_sums, rows, words, rows_in_chunk, lanes]
        kernel(grid=(strips, chunks, members), block=(THREADS, 1, 1), args=arguments)
    return add_chunks(partial_sums, x.dtype)


@row_sums.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[2])


def add_chunks(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sums over the second dimension of [M, chunks, C] in full precision, in this dtype."""
    members, chunks, columns = sums.shape
    out = torch.empty(members, columns, dtype=dtype, device=sums.device)
    with current_device(sums.device):
        (kernel,) = load(_source_of_chunks(sums.dtype, dtype), ["add_chunks"])
        grid = -(-columns // _COLUMNS), members, 1
        kernel(grid=grid, block=(THREADS, 1, 1), args=[sums, out, chunks, columns])
    return out
