"""Batched products: gradients laid out as the operands, and on a CPU bits that do not depend on a member's place.

A BLAS may sum in another order when a matrix starts elsewhere than on a boundary of its vectors; a member's matrices
start wherever its place puts them. So every matrix here starts on such a boundary: operands and results whose size is
not a multiple of it are padded with zeros, which depends on the job's own shapes alone.

The gradient of a complex product takes the other operand conjugated, as torch's own does; a real one is left as it is.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.engine.optim.compile_fence import is_traced

_BOUNDARY = 16
"""Elements; 64 bytes of float32, the longest vector and the alignment of every allocation."""
SIDE = 4
"""Both sides a multiple of this make a matrix a multiple of the boundary."""


def product(a_MNK: Tensor, b_MKO: Tensor, bias_MO: Tensor | None = None) -> Tensor:
    """`bmm`, with a bias added to every row."""
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
    """In a compiled step on a GPU the bias is added apart: there it fuses with what comes next, while a product that
    adds would have the bias spread out in memory first."""
    if bias_MO is None:
        return torch.bmm(a_MNK, b_MKO)
    if a_MNK.device.type != "cpu" and is_traced():
        return torch.bmm(a_MNK, b_MKO) + bias_MO.unsqueeze(1)
    return torch.baddbmm(bias_MO.unsqueeze(1), a_MNK, b_MKO)


def _padded(x: Tensor, rows: int, columns: int) -> Tensor:
    """So many rows and columns more; a matrix that all members share is padded once."""
    if x.stride(0) == 0 and x.shape[0] > 1:
        return _padded(x[:1], rows, columns).expand(x.shape[0], -1, -1)
    return F.pad(x, (0, columns, 0, rows)) if rows or columns else x.contiguous()


def _steady(x: Tensor) -> bool:
    """Whether all members' matrices start on a boundary, as they are."""
    member, row, column = x.stride()
    member = member or x.shape[1] * x.shape[2]  # shared by all members: as if each had it, whatever the other members
    return member % _BOUNDARY == 0 and ((column == 1 and row >= x.shape[2]) or (row == 1 and column >= x.shape[1]))


class Linear(torch.autograd.Function):
    """`x @ weight.mT + bias`. The product's own backward gives the weight's gradient transposed, and every pass of the
    optimizer over it is then several times slower; here it lies in memory as the weight does."""

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
            (grad_MBO.contiguous() if grad_MBO.device.type == "cpu" else grad_MBO).sum(1) if of_bias else None,
        )


class Product(torch.autograd.Function):
    """`a @ b`."""

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
