"""How to fix common causes of an error that a dry step raised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.engine.members.step import TARGETS
from shoal.errors import describe


def other_dtype(model: nn.Module, batch: Any, error: Exception) -> str | None:
    """Return how to fix inputs whose dtype differs from that of the weights, such as NumPy's float64 or bytes."""
    inputs = [batch[name] for name in batch if name not in TARGETS] if isinstance(batch, Mapping) else batch[:-1]
    given = {str(x.dtype) for x in pytree.tree_leaves(inputs) if isinstance(x, Tensor)}
    expected = {str(weight.dtype) for weight in model.parameters() if weight.is_floating_point()}
    text = str(error)
    if not any(words in text for words in ("dtype", "and bias type", "and weight type")):
        return None
    if len(given) != 1 or len(expected) != 1 or given == expected:
        return None
    was, now = (min(dtypes).removeprefix("torch.") for dtypes in (given, expected))
    how = f"x.to({min(expected)}), an array with x.astype('{now}')"
    return f"forward raised {describe(error)}: data is {was} and the model {now}; convert it with {how}"


def loss_raised(outputs: Any, targets: Any, error: Exception) -> str:
    """Return the message for a loss that raises, with how to fix common causes."""
    line = f"loss raised {describe(error)} (outputs {_shape(outputs)}, targets {_shape(targets)})"
    if not isinstance(outputs, Tensor):
        part = "outputs.logits" if hasattr(outputs, "logits") else "a tensor of them"
        return f"{line}; the model returns a {type(outputs).__name__}: pass a loss(outputs, targets) that takes {part}"
    if "Long" in str(error) and isinstance(targets, Tensor) and targets.dtype != torch.int64:
        return f"{line}; targets are {str(targets.dtype).removeprefix('torch.')}: convert class numbers with y.long()"
    if "Long" in str(error) and isinstance(targets, Tensor) and targets.dtype == torch.int64:
        return f"{line}; targets are int64: convert them with y.float()"
    if "multi-target" in str(error) and isinstance(targets, Tensor) and targets.ndim == 2 and targets.shape[1] == 1:
        return f"{line}; pass class numbers without the second dimension: y[:, 0]"
    return f"{line}; check that they fit each other"


def for_lists(batch: Any, error: Exception) -> str:
    """Return what to do about Python lists in a batch; empty if the error is not about them."""
    entries = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple) else ()
    if "list" not in str(error) or not any(isinstance(entry, list) for entry in entries):
        return ""
    return (
        ". A batch has lists, since the rows of data hold Python lists: make them tensors (a Dataset of the datasets "
        "library by .with_format('torch')), or pass collate="
    )


def for_lengths(error: Exception) -> str:
    """Return what to do about rows of different lengths; empty if the error is not about them."""
    if not any(words in str(error) for words in ("of equal size", "stack expects each tensor")):
        return ""
    return (
        "rows of different lengths or shapes cannot be one batch: pad them, or pass a collate= that does, such as "
        "transformers' DataCollatorWithPadding"
    )


def _shape(value: Any) -> str:
    return str(list(value.shape)) if isinstance(value, Tensor) else type(value).__name__
