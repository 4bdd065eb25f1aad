"""Sums over all rows for each channel of each member, in one pass and in full precision: for batch norm."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from shoal.engine.kernels.elements import DTYPES, LARGEST, WORD, constants_of, width_of
from shoal.utils.cuda_kernels import aligned, available, compile_ahead, constants, load

THREADS, MOST_CHUNKS = 256, 128
ROWS_OF_A_THREAD = 8
"""The least number of rows that a thread adds up."""
_SHARED = """
template <bool has_y, bool has_center>
__device__ inline void add_up(const word* x, const word* y, const WIDE* center, WIDE* out, int rows, int words,
                              int rows_in_chunk, int lanes) {
  __shared__ WIDE held[2 * WIDTH * THREADS];
  const int lane = threadIdx.x % lanes, line = threadIdx.x / lanes, lines = blockDim.x / lanes;
  const int at = blockIdx.x * lanes + lane, chunk = blockIdx.y, member = blockIdx.z;
  const long long begin = (long long)member * rows * words + at;
  const int first = chunk * rows_in_chunk, last = min(rows, first + rows_in_chunk);
  WIDE sums[2 * WIDTH], middle[WIDTH];
  for (int j = 0; j < WIDTH; j++) {
    sums[j] = sums[WIDTH + j] = 0;
    middle[j] = at < words && has_center ? center[((long long)member * words + at) * WIDTH + j] : 0;
  }
  if (at < words)
    for (int row = first + line; row < last; row += lines) {
      const word a = x[begin + (long long)row * words];
      const word b = has_y ? y[begin + (long long)row * words] : a;
      for (int j = 0; j < WIDTH; j++) {
        const WIDE value = FROM(a.v[j]) - middle[j], other = has_y ? FROM(b.v[j]) : value;
        sums[j] += other;
        sums[WIDTH + j] += other * value;
      }
    }
  for (int j = 0; j < 2 * WIDTH; j++) held[j * THREADS + threadIdx.x] = sums[j];
  __syncthreads();
  if (line == 0 && at < words)
    for (int j = 0; j < 2 * WIDTH; j++) {
      WIDE sum = 0;
      for (int l = 0; l < lines; l++) sum += held[j * THREADS + l * lanes + lane];
      const long long channel = (long long)at * WIDTH + j % WIDTH;
      out[(((long long)chunk * 2 + j / WIDTH) * gridDim.z + member) * words * WIDTH + channel] = sum;
    }
}
"""
_KERNEL = """
extern "C" __global__ void NAME(const word* x, const word* y, const WIDE* center, WIDE* out, int rows, int words,
                                int rows_in_chunk, int lanes) {
  add_up<HAS_Y, HAS_CENTER>(x, y, center, out, rows, words, rows_in_chunk, lanes);
}
"""
_KERNELS = {(False, False): "sums", (False, True): "centered_sums", (True, True): "sums_with_products"}
"""Names of the kernels, by whether they have a `y` and a `center`."""
_ALL_KERNELS = "".join(
    _KERNEL.replace("NAME", name).replace("HAS_Y", str(int(has_y))).replace("HAS_CENTER", str(int(has_center)))
    for (has_y, has_center), name in _KERNELS.items()
)


def suits(x: Tensor) -> bool:
    """Return whether there is a kernel for this tensor [M, B, C, ...]; channels must be last in memory."""
    last = x.is_cuda and x.movedim(2, -1).is_contiguous()
    return last and x.dtype in DTYPES and x.numel() > 0 and prod(x.shape[1:]) < LARGEST and available()


def prepare(dtype: torch.dtype, channels: int) -> None:
    """Start to compile the kernels for so many channels."""
    if dtype in DTYPES:
        compile_ahead(_source(dtype, width_of(dtype, channels)))


def _source(dtype: torch.dtype, width: int) -> str:
    return constants(constants_of(dtype, width) | {"THREADS": THREADS}) + WORD + _SHARED + _ALL_KERNELS


def rows_of(x: Tensor) -> Tensor:
    """View [M, B, C, ...] with channels last in memory as [M, rows, C]."""
    return x.movedim(2, -1).view(x.shape[0], -1, x.shape[2])


@torch.library.custom_op("shoal::channel_sums", mutates_args=())
def channel_sums(x: Tensor, y: Tensor | None, center: Tensor | None) -> Tensor:
    """Return sums [2, M, C] over rows [M, rows, C]: of `y` and of `y * (x - center)`.

    Without `y`, they are the sums of `x - center` and of its square. `center` is [M, C] in the dtype of the sums:
    float32, or float64 for float64.
    """
    members, rows, channels = x.shape
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    width = width_of(x.dtype, channels)
    words = channels // width
    lanes = min(32, 1 << (words - 1).bit_length())
    lines = THREADS // lanes
    enough_chunks = max(1, 2048 // (members * -(-words // lanes)))  # blocks enough for every processor
    chunks = max(1, min(MOST_CHUNKS, enough_chunks, rows // (lines * ROWS_OF_A_THREAD)))
    rows_in_chunk = -(-rows // chunks)
    chunks = -(-rows // rows_in_chunk)
    out = torch.empty(chunks, 2, members, channels, dtype=dtype, device=x.device)
    x = aligned(x)
    other = x if y is None else aligned(y)
    with torch.cuda.device(x.device):
        (kernel,) = load(_source(x.dtype, width), [_KERNELS[y is not None, center is not None]])
        arguments = [x, other, out if center is None else center, out, rows, words, rows_in_chunk, lanes]
        kernel(grid=(-(-words // lanes), chunks, members), block=(THREADS, 1, 1), args=arguments)
    return out.squeeze(0) if chunks == 1 else out.sum(0)


@channel_sums.register_fake
def _(x: Tensor, y: Tensor | None, center: Tensor | None) -> Tensor:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty(2, x.shape[0], x.shape[2], dtype=dtype)
