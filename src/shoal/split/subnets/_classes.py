"""Classes for the modules of a narrow network: subclasses of the user's own, made once for each class.

Narrow networks of one shape share these classes, so that they are one computation and can run as one pack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from shoal.errors import SplitError
from shoal.split.subnets._sizes import Entry, Factor, Sizes, own_code, times


def rescale(module: nn.Module, factor: Factor) -> None:
    """Make a layer multiply its input by a factor. Calling this again for the same layer changes nothing."""
    if not hasattr(module, "shoal_scale"):
        module.__class__ = subclass(type(module), _scaled)
    module.shoal_scale = factor  # type: ignore[assignment]


def resize(module: nn.Module, name: str, runs: Sequence[Sequence[Entry]]) -> None:
    """Make a module's calls use other sizes."""
    if any(list(run) != list(runs[0]) for run in runs):
        raise SplitError(f"{name or 'the network'} runs more than once in a forward pass, with other sizes each time")
    module.shoal_sizes = tuple(runs[0])  # type: ignore[assignment]
    module.shoal_name = name  # type: ignore[assignment]
    module.__class__ = subclass(type(module), _resized)


def attend(module: nn.MultiheadAttention, heads: int) -> None:
    """Make torch's attention work with fewer heads of the same width."""
    if module.bias_k is not None or module.add_zero_attn:
        raise SplitError("attention with add_bias_kv or add_zero_attn keeps all its heads")
    module.num_heads = heads
    module._qkv_same_embed_dim = False  # otherwise layers around it would use the fused path
    module.__class__ = subclass(type(module), _attending)


_MADE: dict[tuple[type[nn.Module], Any], Any] = {}


def subclass(cls: type[nn.Module], make: Callable[[Any], Any]) -> Any:
    """Return a subclass with the forward pass that `make` returns; always the same subclass for the same class."""
    if (cls, make) not in _MADE:
        _MADE[cls, make] = _made(cls, make(cls))
    return _MADE[cls, make]


def _made(cls: type[nn.Module], forward: Any) -> Any:
    body = {"forward": forward, "__doc__": cls.__doc__, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (cls,), body)


def _scaled(cls: Any) -> Any:
    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        dim = -1 - len(self.kernel_size) if isinstance(self, _ConvNd) else -1
        return cls.forward(self, times(x, self.shoal_scale, dim), *args, **kwargs)

    return forward


def _resized(cls: Any) -> Any:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with Sizes(self.shoal_name, self.shoal_sizes):
            return cls.forward(self, *args, **kwargs)

    return forward


def _attending(cls: Any) -> Any:
    def forward(
        self: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        with own_code():
            batched = query.dim() == 3
            rows = [_rows_first(x, batched, self.batch_first) for x in (query, key, value)]
            if key_padding_mask is not None and not batched:
                key_padding_mask = key_padding_mask.unsqueeze(0)
            mask = _mask(
                rows[0], key_padding_mask, attn_mask, self.num_heads
            )  # is_causal only says what is in attn_mask
            mixed, weights = _mix(self, _heads(self, rows), mask, need_weights)
            if (factor := getattr(self, "shoal_scale", None)) is not None:
                mixed = times(mixed, factor)
            out = F.linear(mixed, self.out_proj.weight, self.out_proj.bias)
            if weights is not None and average_attn_weights:
                weights = weights.mean(1)
            if not batched:
                return out.squeeze(0), weights if weights is None else weights.squeeze(0)
            return out if self.batch_first else out.transpose(0, 1), weights

    return forward


def _rows_first(x: Tensor, batched: bool, batch_first: bool) -> Tensor:
    if not batched:
        return x.unsqueeze(0)
    return x if batch_first else x.transpose(0, 1)


def _heads(self: Any, rows: Sequence[Tensor]) -> list[Tensor]:
    """Return query, key and value as [batch, heads, tokens, width of a head]."""
    packed = self.in_proj_weight is not None
    names = ["in_proj_weight"] * 3 if packed else ["q_proj_weight", "k_proj_weight", "v_proj_weight"]
    weights = self.in_proj_weight.chunk(3) if packed else [getattr(self, name) for name in names]
    biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
    reads = getattr(self, "shoal_reads", {})
    rows = [times(x, reads[name]) if name in reads else x for x, name in zip(rows, names, strict=True)]
    return [
        torch.unflatten(F.linear(x, weight, bias), -1, (self.num_heads, -1)).transpose(1, 2)
        for x, weight, bias in zip(rows, weights, biases, strict=True)
    ]


def _mask(query: Tensor, padding: Tensor | None, mask: Tensor | None, heads: int) -> Tensor | None:
    """Combine both masks into one that is added to the scores."""
    total = None
    for given, shaped in ((padding, lambda m: m[:, None, None, :]), (mask, _by_head(heads))):
        if given is not None:
            if given.dtype == torch.bool:
                given = torch.zeros_like(given, dtype=query.dtype).masked_fill_(given, float("-inf"))
            total = shaped(given) if total is None else total + shaped(given)
    return total


def _by_head(heads: int) -> Any:
    return lambda mask: mask.unflatten(0, (-1, heads)) if mask.dim() == 3 else mask


def _mix(self: Any, heads: Sequence[Tensor], mask: Tensor | None, need_weights: bool) -> tuple[Tensor, Tensor | None]:
    """Return the values mixed by attention, [batch, tokens, all heads], and the weights if they are asked for."""
    q, k, v = heads
    dropout = self.dropout if self.training else 0.0
    weights = None
    if need_weights:
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        weights = torch.softmax(scores if mask is None else scores + mask, -1)
        weights = F.dropout(weights, dropout) if dropout else weights
        mixed = weights @ v
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout)
    return mixed.transpose(1, 2).flatten(2), weights
