"""Dropout of a joined batch, whose rows are computed in several places.

Ordinary training draws one mask for all rows. Here every process that computes some of the rows draws the same mask for
all of them, from the same random state, and takes its own rows: the result is that of ordinary training, however the
rows are shared.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

MASKS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d)


class JoinedDraws(TorchFunctionMode):
    """Inside, dropout draws for all rows of the joined batch and uses those of this process.

    Other random functions draw as they do anywhere; their results then depend on how the rows are shared.
    """

    def __init__(self, total: int) -> None:
        """`total`: rows of the joined batch."""
        super().__init__()
        self.total = total
        self._rows = torch.arange(total)
        self._masks: list[Tensor] = []
        self._place = 0

    def rows(self, rows: Tensor) -> JoinedDraws:
        """For the next forward pass over these rows of the joined batch; masks that were drawn are used again."""
        self._rows, self._place = rows, 0
        return self

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in MASKS:
            return self._dropout(func, *args, **kwargs)
        if func is F.scaled_dot_product_attention and kwargs.get("dropout_p"):
            return self._attention(*args, **kwargs)
        return func(*args, **kwargs)

    def _dropout(
        self, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if not training or p == 0.0 or len(input) != len(self._rows):
            return func(input, p, training, inplace)  # type: ignore[no-any-return]
        mask = self._mask(func, input, p)
        return input.mul_(mask) if inplace else input * mask

    def _mask(self, func: Any, like: Tensor, p: float) -> Tensor:
        """The mask's rows, divided by the share that stays, as torch multiplies by it."""
        if self._place == len(self._masks):
            self._masks.append(func(_ones(like, self.total), p, True))
        mask = self._masks[self._place]
        self._place += 1
        return mask[self._rows.to(mask.device)]

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        """Attention in the open, as torch computes it where there is dropout."""
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


def _ones(like: Tensor, total: int) -> Tensor:
    """Ones for all rows, laid out in memory as they would be: draws follow the memory."""
    shape = (total, *like.shape[1:])
    order = sorted(range(like.dim()), key=lambda dim: -like.stride()[dim])
    ones = torch.ones([shape[dim] for dim in order], dtype=like.dtype, device=like.device)
    return ones.permute([order.index(dim) for dim in range(like.dim())])
