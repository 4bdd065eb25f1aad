"""Batched products with gradients laid out like the operands, and on a CPU with bits that do not depend on a member's
position.

A BLAS may sum in another order if a matrix does not start on a boundary of its vectors, and where a member's matrices
start depends on its position. So every matrix here starts on such a boundary: operands and results whose size is not a
multiple of it are padded with zeros, which depends only on the job's own shapes.

As in torch, the gradient of a complex product uses the conjugate of the other operand.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.engine.kernels import row_sums
from shoal.engine.optim.compile_fence import is_traced

_BOUNDARY = 16
"""In elements: 64 bytes of float32, which is the longest vector and the alignment of every allocation."""
SIDE = 4
"""If both sides of a matrix are multiples of this, its size is a multiple of the boundary."""


def product(a_MNK: Tensor, b_MKO: Tensor, bias_MO: Tensor | None = None) -> Tensor:
    """Compute `bmm`, with a bias added to every row."""
    n, k, o = a_MNK.shape[1], a_MNK.shape[2], b_MKO.shape[2]
    on_cpu = a_MNK.device.type == "cpu"
    if not on_cpu or ((n * o) % _BOUNDARY == 0 and _steady(a_MNK) and _steady(b_MKO)):
        return _biased(a_MNK, b_MKO, bias_MO)
    rows, inner, columns = -n % SIDE, -k % SIDE, -o % SIDE
    a_MNK, b_MKO = _padded(a_MNK, rows, inner), _padded(b_MKO, inner, columns)
    if bias_MO is not None and columns:
        bias_MO = F.pad(bias_MO, (0, columns))
    out = _biased(a_MNK, b_MKO, bias_MO)
    return out[:, :n, :o].contiguous() if rows or columns else out


def _biased(a_MNK: Tensor, b_MKO: Tensor, bias_MO: Tensor | None) -> Tensor:
    """Compute a product with a bias. On a GPU the addition is separate, since it fuses with the next operators;
    `baddbmm` would expand the bias in memory first."""
    if bias_MO is None:
        return torch.bmm(a_MNK, b_MKO)
    if a_MNK.device.type != "cpu":
        return torch.bmm(a_MNK, b_MKO) + bias_MO.unsqueeze(1)
    return torch.baddbmm(bias_MO.unsqueeze(1), a_MNK, b_MKO)


def _padded(x: Tensor, rows: int, columns: int) -> Tensor:
    """Append so many rows and columns of zeros. A matrix that all members share is padded once."""
    if x.stride(0) == 0 and x.shape[0] > 1:
        return _padded(x[:1], rows, columns).expand(x.shape[0], -1, -1)
    return F.pad(x, (0, columns, 0, rows)) if rows or columns else x.contiguous()


def _steady(x: Tensor) -> bool:
    """Return whether all members' matrices start on a boundary without padding."""
    member, row, column = x.stride()
    member = member or x.shape[1] * x.shape[2]  # a shared matrix counts as if each member had a copy
    return member % _BOUNDARY == 0 and ((column == 1 and row >= x.shape[2]) or (row == 1 and column >= x.shape[1]))


class Linear(torch.autograd.Function):
    """`x @ weight.mT + bias`, with the weight's gradient laid out like the weight.

    The backward of torch's own product gives a transposed gradient, and every pass of the optimizer over it is several
    times slower.
    """

    @staticmethod
    def forward(ctx: Any, x_MBI: Tensor, weight_MOI: Tensor, bias_MO: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_MBI, weight_MOI)
        return product(x_MBI, weight_MOI.mT, bias_MO)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (grad_MBO,) = grads
        x_MBI, weight_MOI = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            product(grad_MBO, weight_MOI.conj()) if of_x else None,
            product(grad_MBO.mT, x_MBI.conj()) if of_weight else None,
            sum_of_rows(grad_MBO) if of_bias else None,
        )


def sum_of_rows(x_MBO: Tensor) -> Tensor:
    """Compute the gradient of a bias [M, O] from that of every row."""
    if x_MBO.device.type == "cpu":
        return x_MBO.contiguous().sum(1)
    if is_traced() or torch.is_grad_enabled() or not row_sums.suits(x_MBO):
        return x_MBO.sum(1)
    sums: Tensor = row_sums.row_sums(x_MBO)
    return sums


class RowBias(torch.autograd.Function):
    """A bias added to every row of each matrix."""

    @staticmethod
    def forward(ctx: Any, x_MBO: Tensor, bias_MO: Tensor) -> Tensor:
        return x_MBO + bias_MO.unsqueeze(1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor | None]:
        (grad_MBO,) = grads
        return grad_MBO, sum_of_rows(grad_MBO) if ctx.needs_input_grad[1] else None


class Product(torch.autograd.Function):
    """`a @ b`, with the bits of `product` in both passes."""

    @staticmethod
    def forward(ctx: Any, a_MNK: Tensor, b_MKO: Tensor) -> Tensor:
        ctx.save_for_backward(a_MNK, b_MKO)
        return product(a_MNK, b_MKO)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (grad_MNO,) = grads
        a_MNK, b_MKO = ctx.saved_tensors
        of_a, of_b = ctx.needs_input_grad
        return product(grad_MNO, b_MKO.mH) if of_a else None, product(a_MNK.mH, grad_MNO) if of_b else None
