"""Max pooling with channels last and windows that do not overlap. The gradient finds the largest element again, so no
8-byte indices are stored."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.engine.kernels.elements import DTYPES, LARGEST, WORD, constants_of, width_of
from shoal.utils.cuda_kernels import aligned, available, compile_ahead, constants, load

THREADS, MOST_BLOCKS = 256, 65536
_SOURCE = """
template <bool backward> __device__ inline void pool(const word* x, const word* grad, word* out, int images) {
  const unsigned words = C / WIDTH;
  const long long count = (long long)images * OH * OW * words;
  const long long threads = (long long)gridDim.x * blockDim.x;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += threads) {
    const long long at = i / words;
    const int c = i % words, w = at % OW * KW, h = at / OW % OH * KH;
    const long long image = at / OW / OH, begin = ((image * H + h) * W + w) * words + c;
    word best = x[begin];
    int place[WIDTH];
    for (int j = 0; j < WIDTH; j++) place[j] = 0;
#pragma unroll
    for (int k = 1; k < KH * KW; k++) {
      const word value = x[begin + ((long long)(k / KW) * W + k % KW) * words];
      for (int j = 0; j < WIDTH; j++) {
        const bool larger = FROM(value.v[j]) > FROM(best.v[j]) || FROM(value.v[j]) != FROM(value.v[j]);
        best.v[j] = larger ? value.v[j] : best.v[j];
        place[j] = larger ? k : place[j];
      }
    }
    if (!backward) {
      out[i] = best;
      continue;
    }
    const word given = grad[i];
#pragma unroll
    for (int k = 0; k < KH * KW; k++) {
      word value;
      for (int j = 0; j < WIDTH; j++) value.v[j] = place[j] == k ? given.v[j] : (ELEMENT)0;
      out[begin + ((long long)(k / KW) * W + k % KW) * words] = value;
    }
  }
}
extern "C" __global__ void max_pool(const word* x, const word* grad, word* out, int images) {
  pool<false>(x, grad, out, images);
}
extern "C" __global__ void max_pool_gradient(const word* x, const word* grad, word* out, int images) {
  pool<true>(x, grad, out, images);
}
"""


def suits(x: Tensor, size: tuple[int, int]) -> bool:
    """Return whether there is a kernel for these images [N, C, H, W]: channels last, and windows small enough for a
    thread."""
    return (
        x.is_cuda and x.dtype in DTYPES and x.numel() > 0 and prod(size) <= 16 and prod(x.shape[1:]) < LARGEST
        and x.shape[2] >= size[0] and x.shape[3] >= size[1] and x.is_contiguous(memory_format=torch.channels_last)
        and available()
    )  # fmt: skip


def prepare(dtype: torch.dtype, shape: Sequence[int], size: tuple[int, int]) -> None:
    """Start to compile the kernels for images [C, H, W]."""
    if dtype in DTYPES:
        compile_ahead(_source(dtype, shape, size))


def _source(dtype: torch.dtype, shape: Sequence[int], size: Sequence[int]) -> str:
    channels, height, width = shape
    sizes = {"C": channels, "H": height, "W": width, "OH": height // size[0], "OW": width // size[1],
             "KH": size[0], "KW": size[1]}  # fmt: skip
    return constants(constants_of(dtype, width_of(dtype, channels)) | sizes) + WORD + _SOURCE


class MaxPool(torch.autograd.Function):
    """`F.max_pool2d` of images [N, C, H, W] with windows that do not overlap."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: tuple[int, int]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.size = size
        out: Tensor = max_pool(x, list(size))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # double backward
            (grad,) = torch.autograd.grad(F.max_pool2d(x, ctx.size), x, grads[0], create_graph=True)
            return grad, None
        return max_pool_gradient(x, grads[0], list(ctx.size)), None


@torch.library.custom_op("shoal::max_pool", mutates_args=())
def max_pool(x: Tensor, size: list[int]) -> Tensor:
    """Return the largest element of each window; a NaN is larger than any number."""
    shape = x.shape[0], x.shape[1], x.shape[2] // size[0], x.shape[3] // size[1]
    out = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    _launch("max_pool", x, out, out, size)
    return out


@torch.library.custom_op("shoal::max_pool_gradient", mutates_args=())
def max_pool_gradient(x: Tensor, grad: Tensor, size: list[int]) -> Tensor:
    """Put each window's gradient at its largest element: the first of equal ones, or the last NaN, as in torch."""
    covers_all = x.shape[2] % size[0] == 0 and x.shape[3] % size[1] == 0
    out = torch.empty_like(x) if covers_all else torch.zeros_like(x)
    _launch("max_pool_gradient", x, grad.contiguous(memory_format=torch.channels_last), out, size)
    return out


@max_pool.register_fake
def _(x: Tensor, size: list[int]) -> Tensor:
    shape = x.shape[0], x.shape[1], x.shape[2] // size[0], x.shape[3] // size[1]
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


@max_pool_gradient.register_fake
def _(x: Tensor, grad: Tensor, size: list[int]) -> Tensor:
    return torch.empty_like(x)


def _launch(name: str, x: Tensor, grad: Tensor, out: Tensor, size: list[int]) -> None:
    images, channels, height, width = x.shape
    count = images * (height // size[0]) * (width // size[1]) * channels // width_of(x.dtype, channels)
    with torch.cuda.device(x.device):
        (kernel,) = load(_source(x.dtype, x.shape[1:], size), [name])
        tensors = [aligned(x), aligned(grad), out]
        kernel(grid=(min(-(-count // THREADS), MOST_BLOCKS), 1, 1), block=(THREADS, 1, 1), args=[*tensors, images])
