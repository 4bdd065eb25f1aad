"""Gradient clipping by norm, each member by its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.engine.optim._rule import coefficient_dtype


@torch.no_grad()
def clip_(grads: Sequence[Tensor], max_norm_M: Tensor) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` for every member at once, in place; the total norms [M].

    The norm of a member is over its slices only. max_norm inf means that the member is not clipped: its coefficient
    is exactly one, whatever its norm, so its gradients keep every bit. A norm of NaN spreads to that member's
    gradients alone, as it does in torch.

    >>> grads = [torch.tensor([[3.0, 4.0], [3.0, 4.0]])]
    >>> clip_(grads, torch.tensor([1.0, float("inf")])).tolist(), grads[0][1].tolist()
    ([5.0, 5.0], [3.0, 4.0])
    """
    if not grads:
        return torch.zeros_like(max_norm_M)
    norms: list[Tensor] = [torch.linalg.vector_norm(g.reshape(g.shape[0], -1), 2.0, dim=1) for g in grads]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms, dim=1), 2.0, dim=1)
    limit = max_norm_M.to(total.dtype)
    coefficient = torch.where(max_norm_M.isinf(), 1.0, (limit / (total + 1e-6)).clamp(max=1.0))
    for grad in grads:
        grad.mul_(coefficient.to(coefficient_dtype(grad.dtype)).view(-1, *[1] * (grad.ndim - 1)))
    return total
