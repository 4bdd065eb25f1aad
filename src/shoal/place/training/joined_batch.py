"""Layers whose result depends on the whole batch, for a batch whose rows are computed in several places.

Dropout, and noise with as many rows: ordinary training draws it for all rows at once. Every process that computes some
of the rows draws the same for all of them, from the same random state, and takes its own rows. So the result is that of
ordinary training, however the rows are shared.

Batch norm, "joined": its statistics are those of the joined batch in both passes, as in ordinary training. Workers
exchange two numbers for each channel and layer in each pass. "own": each worker uses the statistics of its own rows,
and the running averages of the first worker are used, as in DistributedDataParallel; nothing is exchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

MASKS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d)
NOISE = (torch.rand, torch.randn)
NOISE_LIKE = (torch.rand_like, torch.randn_like)
NOISE_IN_PLACE = (Tensor.bernoulli_, Tensor.uniform_, Tensor.normal_)
"""Stochastic depth draws one number for each row with one of these."""


class JoinedDraws(TorchFunctionMode):
    """Draws dropout and noise for all rows of the joined batch inside this context, and uses those of this process.

    Other random functions draw as usual; their results then depend on how the rows are shared.
    """

    def __init__(self, total: int) -> None:
        """`total` is the number of rows of the joined batch."""
        super().__init__()
        self.total = total
        self._rows = torch.arange(total)
        self._draws: list[Tensor] = []
        self._place = 0

    def rows(self, rows: Tensor) -> JoinedDraws:
        """Prepare for the next forward pass, over these rows of the joined batch. Earlier draws are reused."""
        self._rows, self._place = rows, 0
        return self

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in MASKS:
            return self._dropout(func, *args, **kwargs)
        if func in NOISE:
            return self._noise(func, *args, **kwargs)
        if func in NOISE_LIKE and self._has_rows(args[0].shape):
            return self._drawn(lambda: func(_ones(args[0], self.total), *args[1:], **kwargs))
        if func in NOISE_IN_PLACE and self._has_rows(args[0].shape) and not any(map(_is_tensor, args[1:])):
            return args[0].copy_(self._drawn(lambda: func(_ones(args[0], self.total), *args[1:], **kwargs)))
        if func is F.scaled_dot_product_attention and kwargs.get("dropout_p"):
            return self._attention(*args, **kwargs)
        return func(*args, **kwargs)

    def _has_rows(self, size: Sequence[int]) -> bool:
        return bool(size) and size[0] == len(self._rows)

    def _noise(self, func: Any, *size: Any, **kwargs: Any) -> Tensor:
        shape = tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else size
        if not self._has_rows(shape):
            return func(*size, **kwargs)  # type: ignore[no-any-return]
        return self._drawn(lambda: func((self.total, *shape[1:]), **kwargs))

    def _dropout(
        self, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if not training or p == 0.0 or len(input) != len(self._rows):
            return func(input, p, training, inplace)  # type: ignore[no-any-return]
        mask = self._drawn(lambda: func(_ones(input, self.total), p, True))  # scaled by 1 / (1 - p)
        return input.mul_(mask) if inplace else input * mask

    def _drawn(self, draw: Callable[[], Tensor]) -> Tensor:
        """Return this process's rows of what is drawn for all of them."""
        if self._place == len(self._draws):
            self._draws.append(draw())
        all_rows = self._draws[self._place]
        self._place += 1
        return all_rows[self._rows.to(all_rows.device)]

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        """Compute attention with plain operators, as torch does with dropout."""
        if len(query) != len(self._rows) or enable_gqa:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        factor = math.sqrt(scale if scale is not None else 1 / math.sqrt(query.shape[-1]))
        scores = (query * factor) @ (key * factor).mT
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        return self._dropout(F.dropout, scores.softmax(-1), dropout_p) @ value


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _ones(like: Tensor, total: int) -> Tensor:
    """Return ones for all rows with the memory layout of `like`, since draws follow the memory."""
    shape = (total, *like.shape[1:])
    order = sorted(range(like.dim()), key=lambda dim: -like.stride()[dim])
    ones = torch.ones([shape[dim] for dim in order], dtype=like.dtype, device=like.device)
    return ones.permute([order.index(dim) for dim in range(like.dim())])


Gather = Callable[[Tensor], Tensor]
"""Collects a tensor [...] of every worker: [workers, ...]."""


class JoinedRows:
    """What batch norm layers of a worker need from the other workers."""

    def __init__(self, gather: Gather) -> None:
        self.gather = gather
        self.counts = True
        """Whether this worker's rows count. A worker without a share computes a row that does not."""


def batch_norms(network: nn.Module) -> list[_BatchNorm]:
    """Return the layers whose output depends on the other rows of a batch."""
    return [module for module in network.modules() if isinstance(module, _BatchNorm)]


def join_batch_norms(network: nn.Module, joined: JoinedRows) -> None:
    """Make the batch norm layers of a network use the joined batch's statistics."""
    for module in batch_norms(network):
        module.forward = partial(_forward, module, joined)  # type: ignore[method-assign]


def _forward(module: _BatchNorm, joined: JoinedRows, x: Tensor) -> Tensor:
    if not module.training and module.running_mean is not None:
        return type(module).forward(module, x)
    dims = [dim for dim in range(x.dim()) if dim != 1]
    rows = x.numel() // x.shape[1] if joined.counts else 0
    with torch.no_grad():
        mean, variance, total = _statistics(x, dims, rows, joined)
        if module.training and module.track_running_stats and module.running_mean is not None:
            _update_running(module, mean, variance, total)
    normed: Tensor = _Normalize.apply(x, mean, variance, total, module.eps, dims, joined)  # type: ignore[no-untyped-call]
    shape = [1, -1] + [1] * (x.dim() - 2)
    if module.weight is not None:
        normed = normed * module.weight.view(shape)
    return normed if module.bias is None else normed + module.bias.view(shape)


def _statistics(x: Tensor, dims: list[int], rows: int, joined: JoinedRows) -> tuple[Tensor, Tensor, float]:
    """Return mean and variance of all rows, from those of each worker, without cancellation."""
    mean = x.mean(dims)
    squares = (x - _per_channel(mean, x)).square().sum(dims)
    gathered = joined.gather(torch.cat([mean.new_tensor([float(rows)]), mean, squares]))
    counts, means, sums = gathered[:, :1], gathered[:, 1 : 1 + len(mean)], gathered[:, 1 + len(mean) :]
    total = counts.sum()
    joint_mean = (counts * means).sum(0) / total
    has_rows = counts > 0
    variance = (torch.where(has_rows, sums, 0.0).sum(0) + (counts * (means - joint_mean).square()).sum(0)) / total
    return joint_mean, variance, float(total)


def _update_running(module: _BatchNorm, mean: Tensor, variance: Tensor, total: float) -> None:
    """Update the running averages."""
    assert module.running_mean is not None and module.running_var is not None
    factor = module.momentum
    if module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        if factor is None:
            factor = 1.0 / float(module.num_batches_tracked)
    assert factor is not None
    module.running_mean.lerp_(mean, factor)
    module.running_var.lerp_(variance * (total / max(total - 1, 1)), factor)


def _per_channel(channels: Tensor, x: Tensor) -> Tensor:
    return channels.view([1, -1] + [1] * (x.dim() - 2))


class _Normalize(torch.autograd.Function):
    """(x - mean) / deviation, where both depend on the rows of all workers."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        mean: Tensor,
        variance: Tensor,
        total: float,
        eps: float,
        dims: list[int],
        joined: JoinedRows,
    ) -> Tensor:
        inverse = (variance + eps).rsqrt()
        normed = (x - _per_channel(mean, x)) * _per_channel(inverse, x)
        ctx.save_for_backward(normed, inverse)
        ctx.rest = (total, dims, joined)
        return normed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        normed, inverse = ctx.saved_tensors
        total, dims, joined = ctx.rest
        sums = torch.cat([gradient.sum(dims), (gradient * normed).sum(dims)])
        if not joined.counts:
            sums = torch.zeros_like(sums)
        sums = joined.gather(sums).sum(0) / total
        if not joined.counts:
            return torch.zeros_like(gradient), None, None, None, None, None, None
        mean, product = sums[: len(inverse)], sums[len(inverse) :]
        dx = (gradient - _per_channel(mean, normed) - normed * _per_channel(product, normed)) * _per_channel(
            inverse, normed
        )
        return dx, None, None, None, None, None, None
