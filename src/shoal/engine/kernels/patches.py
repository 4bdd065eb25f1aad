"""Patches of images as rows of a matrix, so that a convolution of many members is one batched product.

A row holds what one position of the filter reads, channels fastest, followed by a one that is multiplied with the bias.
Zeros pad it to a multiple of 8 columns, which tensor cores need. `patches` and `add_patches` are each other's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.engine.kernels.elements import DTYPES, LARGEST, WORD, constants_of, width_of
from shoal.utils.cuda_kernels import aligned, available, compile_ahead, constants, load

THREADS, MOST_BLOCKS, MOST_IMAGES = 256, 1024, 65535
_ALIGNMENT = 8
"""The number of columns is a multiple of this."""
_SOURCE = """
struct alignas(sizeof(ELEMENT) * NARROW) narrow_word { ELEMENT v[NARROW]; };
template <bool whole_words>
__device__ inline void take(const ELEMENT* x, word* out, int with_one, int B, int of_member, int of_row, int of_channel,
                            int of_h, int of_w, int images) {
  const unsigned words = COLUMNS / WIDTH, count = OH * OW * words;
  const ELEMENT last = TO((WIDE)with_one);
  for (int image = blockIdx.y; image < images; image += gridDim.y) {
    const ELEMENT* from = x + (long long)(image / B) * of_member + (long long)(image % B) * of_row;
    word* to = out + (long long)image * count;
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
      const unsigned first = i % words * WIDTH, place = i / words;
      const int up = (int)(place / OW) * STEP_H - PAD_H, left = (int)(place % OW) * STEP_W - PAD_W;
      word value = word();
      for (int j = 0; j < (whole_words ? 1 : WIDTH); j++) {
        const unsigned k = first + j, tap = k / C;
        const int h = up + (int)(tap / KW) * GAP_H, w = left + (int)(tap % KW) * GAP_W;
        const ELEMENT* at = from + (long long)h * of_h + (long long)w * of_w + (long long)(k % C) * of_channel;
        if (tap >= KH * KW) value.v[j] = k == KH * KW * C ? last : (ELEMENT)0;
        else if (h < 0 || h >= H || w < 0 || w >= W) continue;
        else if (whole_words) value = *(const word*)at;
        else value.v[j] = *at;
      }
      to[i] = value;
    }
  }
}
extern "C" __global__ void patches_of_words(const ELEMENT* x, word* out, int with_one, int B, int of_member, int of_row,
                                            int of_channel, int of_h, int of_w, int images) {
  take<true>(x, out, with_one, B, of_member, of_row, of_channel, of_h, of_w, images);
}
extern "C" __global__ void patches_of_elements(const ELEMENT* x, word* out, int with_one, int B, int of_member,
                                               int of_row, int of_channel, int of_h, int of_w, int images) {
  take<false>(x, out, with_one, B, of_member, of_row, of_channel, of_h, of_w, images);
}
extern "C" __global__ void add_patches(const narrow_word* rows, narrow_word* out, int images) {
  const unsigned words = C / NARROW, columns = COLUMNS / NARROW, count = H * W * words;
  for (int image = blockIdx.y; image < images; image += gridDim.y) {
    const narrow_word* from = rows + (long long)image * OH * OW * columns;
    narrow_word* to = out + (long long)image * count;
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
      const int c = i % words, w = i / words % W, h = i / words / W;
      WIDE sum[NARROW];
      for (int j = 0; j < NARROW; j++) sum[j] = 0;
      for (int a = 0; a < KH; a++) {
        const int up = h + PAD_H - a * GAP_H;
        if (up < 0 || up % STEP_H || up / STEP_H >= OH) continue;
        for (int b = 0; b < KW; b++) {
          const int left = w + PAD_W - b * GAP_W;
          if (left < 0 || left % STEP_W || left / STEP_W >= OW) continue;
          const long long row = (long long)(up / STEP_H) * OW + left / STEP_W;
          const narrow_word value = from[row * columns + (a * KW + b) * words + c];
          for (int j = 0; j < NARROW; j++) sum[j] += FROM(value.v[j]);
        }
      }
      narrow_word value;
      for (int j = 0; j < NARROW; j++) value.v[j] = TO(sum[j]);
      to[i] = value;
    }
  }
}
"""


@dataclass(frozen=True, slots=True)
class Window:
    """How a filter moves over an image; each pair is (height, width)."""

    size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    @classmethod
    def of(cls, numbers: list[int]) -> Window:
        return cls(*((numbers[i], numbers[i + 1]) for i in range(0, 8, 2)))

    @property
    def numbers(self) -> list[int]:
        """All numbers as a list, which custom operators can take."""
        return [*self.size, *self.stride, *self.padding, *self.dilation]

    def places(self, image: tuple[int, int]) -> tuple[int, int]:
        """Return the number of filter positions, down and across."""
        down, across = (
            (side + 2 * pad - gap * (size - 1) - 1) // step + 1
            for side, size, step, pad, gap in zip(
                image, self.size, self.stride, self.padding, self.dilation, strict=True
            )
        )
        return down, across

    def columns(self, channels: int) -> int:
        """Return the number of columns: the filter's weights, a one for the bias, and padding."""
        used = channels * prod(self.size) + 1
        return used + -used % _ALIGNMENT


def suits(x: Tensor, window: Window) -> bool:
    """Return whether there are kernels for these images [M, B, C, H, W], and 32 bits suffice to index them."""
    places = window.places((x.shape[3], x.shape[4]))
    largest = max(*x.stride(), prod(x.shape[2:]), prod(places) * window.columns(x.shape[2]), prod(x.shape[:2]))
    return x.dtype in DTYPES and min(places) > 0 and largest < LARGEST and (not x.is_cuda or available())


def prepare(dtype: torch.dtype, shape: Sequence[int], window: Window) -> None:
    """Start to compile the kernels for images [C, H, W]."""
    if dtype in DTYPES:
        compile_ahead(_source(dtype, shape, window))


@torch.library.custom_op("shoal::patches", mutates_args=())
def patches(x: Tensor, window: list[int], with_one: bool) -> Tensor:
    """Return the patches of [M, B, C, H, W] as [M, B * places, columns], see `Window`.

    Args:
        with_one: Whether the column of the bias holds ones, or zeros.
    """
    form = Window.of(window)
    if not x.is_cuda:
        return _patches_of_operators(x, form, with_one)
    members, batch = x.shape[:2]
    out = _rows_like(x, form)
    if out.numel():
        width = _widest(x.dtype)
        name = "patches_of_words" if _in_whole_words(x, width) else "patches_of_elements"
        numbers = [int(with_one), batch, *x.stride(), members * batch]
        _launch(name, form, list(x.shape), [x, out], numbers, out[0].numel() // batch // width)
    return out


@torch.library.custom_op("shoal::add_patches", mutates_args=())
def add_patches(rows: Tensor, window: list[int], shape: list[int]) -> Tensor:
    """Add the patches at the positions that they were taken from: [M, B * places, columns] -> [M, B, C, H, W], channels
    last in memory."""
    form = Window.of(window)
    if not rows.is_cuda:
        return _sum_of_operators(rows, form, shape)
    members, batch, channels, *image = shape
    out = torch.empty(members, batch, *image, channels, dtype=rows.dtype, device=rows.device)
    if out.numel():
        count = out[0, 0].numel() // width_of(rows.dtype, channels)
        _launch("add_patches", form, shape, [aligned(rows.contiguous()), out], [members * batch], count)
    return out.permute(0, 1, 4, 2, 3)


def _rows_like(x: Tensor, window: Window) -> Tensor:
    places = window.places((x.shape[3], x.shape[4]))
    return x.new_empty(x.shape[0], x.shape[1] * prod(places), window.columns(x.shape[2]))


def _launch(name: str, window: Window, shape: list[int], tensors: list[Tensor], numbers: list[int], words: int) -> None:
    """Launch a kernel over all images, with `words` words each."""
    images = shape[0] * shape[1]
    with torch.cuda.device(tensors[0].device):
        (kernel,) = load(_source(tensors[0].dtype, shape[2:], window), [name])
        grid = min(-(-words // THREADS), MOST_BLOCKS), min(images, MOST_IMAGES), 1
        kernel(grid=grid, block=(THREADS, 1, 1), args=[*tensors, *numbers])


def _source(dtype: torch.dtype, shape: Sequence[int], window: Window) -> str:
    """Return the source for images [C, H, W]. Sizes are constants, since dividing by a constant is cheap."""
    channels, height, width = shape
    names = ("C", "H", "W", "OH", "OW", "KH", "KW", "STEP_H", "STEP_W", "PAD_H", "PAD_W", "GAP_H", "GAP_W", "COLUMNS")
    sizes = [channels, height, width, *window.places((height, width)), *window.numbers, window.columns(channels)]
    values = constants_of(dtype, _widest(dtype)) | {"NARROW": width_of(dtype, channels)}
    return constants(values | dict(zip(names, sizes, strict=True))) + WORD + _SOURCE


def _widest(dtype: torch.dtype) -> int:
    return width_of(dtype, _ALIGNMENT)


def _in_whole_words(x: Tensor, width: int) -> bool:
    """Return whether so many channels are contiguous and aligned wherever they are read."""
    other_strides = [stride for axis, stride in enumerate(x.stride()) if axis != 2 and x.shape[axis] > 1]
    multiples = (x.shape[2], *other_strides)
    return x.stride(2) == 1 and x.data_ptr() % 16 == 0 and not any(number % width for number in multiples)


def _patches_of_operators(x: Tensor, window: Window, with_one: bool) -> Tensor:
    """Compute `patches` with torch operators, for a device without kernels."""
    members, batch, channels = x.shape[:3]
    rows = F.unfold(x.flatten(0, 1), window.size, window.dilation, window.padding, window.stride)
    rows = rows.view(len(rows), channels, prod(window.size), -1).permute(0, 3, 2, 1).flatten(2)
    rows = F.pad(F.pad(rows, (0, 1), value=float(with_one)), (0, window.columns(channels) - rows.shape[2] - 1))
    return rows.reshape(members, batch * rows.shape[1], rows.shape[2]).contiguous()


def _sum_of_operators(rows: Tensor, window: Window, shape: list[int]) -> Tensor:
    """Compute `add_patches` with torch operators, for a device without kernels."""
    members, batch, channels, *image = shape
    used = rows.reshape(members * batch, -1, rows.shape[2])[..., : channels * prod(window.size)].contiguous()
    taps = used.view(*used.shape[:2], prod(window.size), channels).permute(0, 3, 2, 1).flatten(1, 2)
    images = F.fold(taps, tuple(image), window.size, window.dilation, window.padding, window.stride)
    return images.permute(0, 2, 3, 1).contiguous().view(members, batch, *image, channels).permute(0, 1, 4, 2, 3)


@patches.register_fake
def _(x: Tensor, window: list[int], with_one: bool) -> Tensor:
    return _rows_like(x, Window.of(window))


@add_patches.register_fake
def _(rows: Tensor, window: list[int], shape: list[int]) -> Tensor:
    members, batch, channels, *image = shape
    return rows.new_empty(members, batch, *image, channels).permute(0, 1, 4, 2, 3)


def _remember_shape(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.shape, ctx.window = list(inputs[0].shape), inputs[1]


def _gradient_of_patches(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return add_patches(grad, ctx.window, ctx.shape), None, None


def _gradient_of_sum(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return patches(grad, ctx.window, False), None, None


patches.register_autograd(_gradient_of_patches, setup_context=_remember_shape)
add_patches.register_autograd(_gradient_of_sum, setup_context=_remember_shape)
