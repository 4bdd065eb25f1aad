"""Attention with dropout on a GPU, in one kernel forward and one or two backward, for half precision.

Torch's own fused kernels draw their masks from the device's generator, so a member's mask would depend on the pack.
These draw each element where it is used, from its member's seed, step and call. They read queries, keys and values
where they lie, and neither products nor masks are ever in memory.
"""

from __future__ import annotations

import math
import os
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from shoal.utils.randomness import DrawSource, draw_mask

DTYPES = (torch.bfloat16, torch.float16)
LARGEST_WIDTH = 128
"""The largest width of a head."""
WARPS = 4
"""The warps of a block."""
LARGEST_MASK = 2**31
"""The kernels count the elements of a member's dropout mask in 32 bits."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a kernel is compiled for."""

    dtype: torch.dtype
    width: int
    num_queries: int
    num_keys: int
    causal: bool
    has_mask: bool

    @property
    def blocks(self) -> dict[str, int]:
        """The size of a tile of the forward pass, and of the queries' gradients where there are many keys."""
        return self._blocks(64, 64)

    @property
    def key_blocks(self) -> dict[str, int]:
        """The size of a tile of the gradients of keys and values; few keys are one block, so that one kernel has all
        gradients. Smaller tiles leave registers for more blocks at the same time."""
        few = self.width <= 64 and 64 < self.num_keys <= 128
        return self._blocks(16, 128) if few else self._blocks(32, 64)

    def _blocks(self, most_queries: int, most_keys: int) -> dict[str, int]:
        return {
            "BLOCK_D": max(16, _power_of_two(self.width)),
            "BLOCK_Q": min(most_queries, max(16, _power_of_two(self.num_queries))),
            "BLOCK_K": min(most_keys, max(16, _power_of_two(self.num_keys))),
        }

    @property
    def constants(self) -> dict[str, Any]:
        return {"D": self.width, "CAUSAL": self.causal, "HAS_MASK": self.has_mask}

    @property
    def key(self) -> tuple[Any, ...]:
        """What the compiled code depends on."""
        return (self.dtype, *self.constants.values(), *self.blocks.values(), *self.key_blocks.values(), self.short)

    @property
    def short(self) -> bool:
        """Whether one block has all keys."""
        return self.num_keys <= self.key_blocks["BLOCK_K"]


def suits(device: torch.device, shape: Shape, elements: int) -> bool:
    """Return whether there are kernels for attention of this shape, with so many elements in a member's mask."""
    return (
        device.type == "cuda"
        and shape.dtype in DTYPES
        and 0 < shape.width <= LARGEST_WIDTH
        and shape.width % 8 == 0
        and 0 < elements < LARGEST_MASK
        and _installed()
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


@cache
def _installed() -> bool:
    return find_spec("triton") is not None


# --- compiling ------------------------------------------------------------------------------------------------------

_compiled: dict[tuple[Any, ...], Future[bool]] = {}
"""For each key of a shape, whether its kernels could be compiled."""
_LOCK = threading.Lock()


def prepare(shape: Shape, device: torch.device) -> None:
    """Start to compile the kernels of this shape in a thread; Triton keeps what it compiles on disk."""
    with _LOCK:
        if (shape.key, device) in _compiled:
            return
        future = _compiled[shape.key, device] = Future()
    threading.Thread(target=_compile, args=(shape, device, future), daemon=True).start()


def ready(shape: Shape, device: torch.device) -> bool:
    """Wait until the kernels of this shape are compiled, and return whether that succeeded."""
    prepare(shape, device)
    return _compiled[shape.key, device].result()


def _forget_threads() -> None:
    """Forget what other threads were compiling, in a forked process, which has none of them."""
    global _LOCK
    _LOCK = threading.Lock()
    _compiled.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)


def _compile(shape: Shape, device: torch.device, future: Future[bool]) -> None:
    try:
        with torch.cuda.device(device):
            _run_once(shape, device)
        future.set_result(True)
    except Exception:  # no C compiler, an unknown device: the operators are used
        future.set_result(False)


def _run_once(shape: Shape, device: torch.device) -> None:
    """Run the kernels of a shape on one row, so that they are compiled and loaded."""
    x = torch.zeros(1, 1, 1, 1, shape.width, dtype=shape.dtype, device=device)
    mask = torch.zeros(1, 1, 1, 1, 1, dtype=shape.dtype, device=device) if shape.has_mask else None
    whole = torch.zeros(1, dtype=torch.int64, device=device)
    source = (whole, whole, whole, whole + 2**32, torch.ones(1, dtype=shape.dtype, device=device))
    out, stats = _launch_forward(shape, x, x, x, mask, source, 1.0)
    _launch_backward(shape, x, x, x, mask, source, 1.0, out, stats, out)


# --- launching ------------------------------------------------------------------------------------------------------


def _launch_forward(
    shape: Shape, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, source: tuple[Tensor, ...], scale: float
) -> tuple[Tensor, Tensor]:
    from shoal.engine.kernels import _attention_source as kernels

    out, stats = _empty_results(q)
    blocks = shape.blocks
    grid = (q.shape[0] * q.shape[1] * q.shape[2], -(-q.shape[3] // blocks["BLOCK_Q"]))
    kernels.forward[grid](
        q, k, v, q if mask is None else mask, out, stats, *source, *_numbers(q, k, v, mask, scale),
        **shape.constants, **blocks, ALIGNED=_aligned(q, k, v), num_warps=WARPS,
    )  # fmt: skip
    return out.transpose(2, 3), stats


def _launch_backward(
    shape: Shape, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, source: tuple[Tensor, ...], scale: float,
    out: Tensor, stats: Tensor, grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from shoal.engine.kernels import _attention_source as kernels

    out, grad = (x.transpose(2, 3).contiguous() for x in (out, grad))
    dq, dk, dv = (_empty_like_rows(x) for x in (q, k, v))
    blocks, heads = shape.key_blocks, q.shape[0] * q.shape[1] * q.shape[2]
    inputs = (q, k, v, q if mask is None else mask, out, stats, grad)
    numbers = _numbers(q, k, v, mask, scale)
    how = {**shape.constants, "ALIGNED": _aligned(q, k, v), "num_warps": WARPS}
    kernels.backward[heads, -(-k.shape[3] // blocks["BLOCK_K"])](
        *inputs, dq, dk, dv, *source, *numbers, ALL_KEYS=shape.short, **blocks, **how
    )
    if not shape.short:
        blocks = shape.blocks
        grid = heads, -(-q.shape[3] // blocks["BLOCK_Q"])
        kernels.backward_of_queries[grid](*inputs, dq, *source, *numbers, **blocks, **how)
    return dq.transpose(2, 3), dk.transpose(2, 3), dv.transpose(2, 3)


def _empty_results(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output [M, B, Q, H, D] and the statistics of the scores, both empty."""
    return _empty_like_rows(q), q.new_empty(2, *q.shape[:4], dtype=torch.float32)


def _empty_like_rows(x: Tensor) -> Tensor:
    """Return an empty [M, B, T, H, D] for [M, B, H, T, D]: heads of a row are side by side, as networks join them."""
    return x.new_empty(*x.shape[:2], x.shape[3], x.shape[2], x.shape[4])


def _numbers(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> list[Any]:
    """Return sizes, scale and strides, in the order of the kernels' arguments."""
    of_mask = [0] * 5 if mask is None else mask.stride()
    strides = [*q.stride()[:4], *k.stride()[:4], *v.stride()[:4], *of_mask]
    return [q.shape[1], q.shape[2], q.shape[3], k.shape[3], float(scale), *strides]


def _aligned(*tensors: Tensor) -> bool:
    """Return whether every row of every head begins at a multiple of 16 bytes."""
    return all(x.data_ptr() % 16 == 0 and all(s % 8 == 0 for s in x.stride()[:4]) for x in tensors)


# --- operators ------------------------------------------------------------------------------------------------------


def _shape_of(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool) -> Shape:
    return Shape(q.dtype, q.shape[4], q.shape[3], k.shape[3], causal, mask is not None)


@torch.library.custom_op("shoal::attention_with_dropout", mutates_args=())
def attention_with_dropout(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seeds: Tensor, steps: Tensor, sites: Tensor, limits: Tensor,
    scales: Tensor, causal: bool, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return attention [M, B, H, Q, D], and statistics for the backward pass.

    The last dimension of `q`, `k` and `v` [M, B, H, T, D] must be contiguous. `mask` is added to the products; it has
    the shape [M, B, H, Q, K], expanded. The others are those of a `DrawSource`.
    """
    with torch.cuda.device(q.device):
        source = (seeds, steps, sites, limits, scales)
        return _launch_forward(_shape_of(q, k, mask, causal), q, k, v, mask, source, scale)


@attention_with_dropout.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seeds: Tensor, steps: Tensor, sites: Tensor, limits: Tensor,
    scales: Tensor, causal: bool, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out, stats = _empty_results(q)
    return out.transpose(2, 3), stats


@torch.library.custom_op("shoal::attention_with_dropout_backward", mutates_args=())
def attention_with_dropout_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor, stats: Tensor, seeds: Tensor,
    steps: Tensor, sites: Tensor, limits: Tensor, scales: Tensor, causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of `q`, `k` and `v`."""
    with torch.cuda.device(q.device):
        source = (seeds, steps, sites, limits, scales)
        return _launch_backward(_shape_of(q, k, mask, causal), q, k, v, mask, source, scale, out, stats, grad)


@attention_with_dropout_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor, stats: Tensor, seeds: Tensor,
    steps: Tensor, sites: Tensor, limits: Tensor, scales: Tensor, causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = (_empty_like_rows(x).transpose(2, 3) for x in (q, k, v))
    return dq, dk, dv


class DroppedAttention(torch.autograd.Function):
    """Attention with dropout, from where its mask comes from."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, source: DrawSource, causal: bool, scale: float
    ) -> Tensor:
        drawn = (source.seeds, source.steps, source.sites, source.limits, source.scales)
        out: Tensor
        out, stats = attention_with_dropout(q, k, v, mask, *drawn, causal, scale)
        ctx.save_for_backward(q, k, v, mask, out, stats, *drawn)
        ctx.causal, ctx.scale = causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        q, k, v, mask, _, _, *drawn = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient itself is differentiated, for which there are no kernels
            inputs = [x for x, needed in zip((q, k, v), ctx.needs_input_grad, strict=False) if needed]
            out = by_operators(q, k, v, mask, DrawSource(*drawn), ctx.causal, ctx.scale)
            gradients = iter(torch.autograd.grad(out, inputs, grads[0], create_graph=True))
            of_inputs = tuple(next(gradients) if needed else None for needed in ctx.needs_input_grad[:3])
        else:
            of_inputs = attention_with_dropout_backward(grads[0], *ctx.saved_tensors, ctx.causal, ctx.scale)
        return (*of_inputs, None, None, None, None)


def by_operators(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, source: DrawSource, causal: bool, scale: float
) -> Tensor:
    """Compute the same attention with tensor operators, which autograd can differentiate any number of times."""
    weights = q @ k.mT * scale
    weights = weights if mask is None else weights + mask
    if causal:
        below = torch.ones(weights.shape[-2:], dtype=torch.bool, device=q.device).tril()
        weights = weights.masked_fill(below.logical_not(), -math.inf)
    dropout = draw_mask(source, math.prod(weights.shape[1:])).view(weights.shape)
    out: Tensor = (torch.ops.aten._safe_softmax(weights, -1) * dropout) @ v
    return out


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
