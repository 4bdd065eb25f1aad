"""What a step notes for every member, in one kernel: which losses are finite, who takes the step, losses and counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal.engine.kernels.elements import DTYPES, HALF_PRECISION, constants_of
from shoal.utils import cuda_kernels

if TYPE_CHECKING:
    from shoal.engine.tiers.captured._step import Inputs

THREADS = 512
_KERNEL = """
extern "C" __global__ void end_step(const ELEMENT* losses, const bool* moving, bool* active, bool* stepping,
                                    double* all_losses, long long* place, long long* count, long long* tick, int rows,
                                    int shared_place) {
  const long long at = *tick;
  int any_moves = 0;
  __syncthreads();
  for (int row = threadIdx.x; row < rows; row += blockDim.x) {
    const WIDE loss = FROM(losses[row]);
    const bool finite = loss - loss == 0, moves = moving[row];
    const bool trains = active[row] && (finite || !moves);
    active[row] = trains;
    stepping[row] = trains && moves;
    if (!moves) continue;
    any_moves = 1;
    all_losses[at * rows + row] = trains || !finite ? (double)loss : (double)__int_as_float(0x7fffffff);
    count[row] += 1;
    if (!shared_place) place[row] += 1;
  }
  any_moves = __syncthreads_or(any_moves);
  if (threadIdx.x) return;
  if (shared_place && any_moves) *place += 1;
  *tick = at + 1;
}
"""


def suits(inputs: Inputs, losses: Tensor) -> bool:
    """Return whether there is a kernel for losses of this dtype."""
    return losses.dtype in DTYPES and inputs.losses.dtype == torch.float64 and cuda_kernels.has_memory(losses)


def end_step(inputs: Inputs, active: Tensor, losses: Tensor) -> Tensor:
    """Note the losses of this batch, count it, and return which rows take the optimizer's step, [M] bool.

    A row whose loss is not finite is inactive from now on. Rows that do not move keep everything.
    """
    stepping = torch.empty_like(active)
    state = [inputs.losses, inputs.place, inputs.count, inputs.tick]
    with cuda_kernels.current_device(losses.device):
        (kernel,) = cuda_kernels.load(_source(losses.dtype), ["end_step"])
        arguments = [losses.contiguous(), inputs.moving, active, stepping, *state]
        given = [*arguments, len(active), int(inputs.place.dim() == 0)]
        kernel(grid=(1, 1, 1), block=(THREADS, 1, 1), args=given)
    return stepping


def _source(dtype: torch.dtype) -> str:
    return cuda_kernels.constants(constants_of(dtype, 1)) + HALF_PRECISION + _KERNEL
