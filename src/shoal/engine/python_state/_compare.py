"""Compare Python values and tensors so strictly that no code could tell equal ones apart."""

from __future__ import annotations

import operator
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def same_value(a: Any, b: Any) -> bool:
    """Return whether two values are the same object, or plain values that no code can tell apart."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, int | float | complex | str | bytes | np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes() if isinstance(a, np.generic) else repr(a) == repr(b)
    if isinstance(a, tuple):
        pairs = zip(tuple.__iter__(a), tuple.__iter__(b), strict=False)  # a subclass may have a `__len__` that raises
        return tuple.__len__(a) == tuple.__len__(b) and all(same_value(x, y) for x, y in pairs)
    if isinstance(a, types.MethodType):
        return a.__func__ is b.__func__ and a.__self__ is b.__self__
    return isinstance(a, torch.device | frozenset | range | slice) and bool(a == b)


def equal_value(a: Any, b: Any) -> bool:
    """Return whether two values are the same, or are lists, tuples, dicts or sets of the same values."""
    if same_value(a, b):
        return True
    if type(a) is not type(b) or type(a) not in (list, tuple, dict, set) or len(a) != len(b):
        return False
    if isinstance(a, set):
        return bool(a == b)
    if isinstance(a, dict):
        return all(equal_value(x, y) and equal_value(a[x], b[y]) for x, y in zip(a, b, strict=True))
    return same_objects(a, b) or all(map(equal_value, a, b))


def same_objects(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Return whether two sequences hold the same objects: much faster than to compare many values."""
    return len(a) == len(b) and all(map(operator.is_, a, b))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same shape, dtype and bits."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))


def version(tensor: Tensor) -> int:
    """Return how often a tensor has been written to; always 0 for inference tensors, which have no version counter."""
    return 0 if tensor.is_inference() else tensor._version


def _bits(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    return tensor if tensor.dtype == torch.bool else tensor.view(torch.uint8)
