"""Convert numbers of NumPy and torch to Python's, and NumPy arrays to tensors."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.errors import JobError


def plain_int(value: Any) -> Any:
    """Convert a whole number of any library to an int, and return everything else unchanged, for a check to refuse.

    >>> plain_int(np.int64(3)), plain_int(torch.tensor(4)), plain_int(True), plain_int(2.0)
    (3, 4, True, 2.0)
    """
    if isinstance(value, bool | int) or str(getattr(value, "dtype", "")).endswith("bool"):
        return value
    try:
        return operator.index(value)
    except (TypeError, RuntimeError, ValueError):
        return value


def plain_number(value: Any) -> Any:
    """Convert a number of any library to a Python number, and return everything else unchanged.

    >>> plain_number(np.float32(0.5)), plain_number(np.array(2)), plain_number(np.bool_(True)), plain_number("x")
    (0.5, 2, True, 'x')
    """
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray | Tensor) and value.ndim == 0):
        return value.item()
    return value


def plain_numbers(value: Any) -> Any:
    """Convert NumPy's numbers inside tuples, lists and dicts to Python's. Tensors stay, since an optimizer may take
    one."""
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(map(plain_numbers, value))
    if isinstance(value, list):
        return list(map(plain_numbers, value))
    if isinstance(value, Mapping):
        return {name: plain_numbers(item) for name, item in value.items()}
    return value if isinstance(value, Tensor) else plain_number(value)


def tensor_of(array: np.ndarray[Any, Any]) -> Tensor:
    """Return an array as a tensor that shares its memory if torch allows that, else as a copy.

    Raises:
        JobError: If torch has no such numbers.
    """
    if isinstance(array, np.ma.MaskedArray):
        raise JobError("holds a masked array, whose mask would be lost; fill it first: array.filled(...)")
    if array.dtype.kind not in "biufc":
        raise JobError(f"holds an array of {array.dtype}; pass numbers")
    backwards = any(stride < 0 for stride in array.strides)
    needs_copy = backwards or not array.flags.writeable or not array.flags.aligned or not array.dtype.isnative
    native = array.dtype.newbyteorder("=")
    try:
        return torch.from_numpy(array if not needs_copy else np.array(array, dtype=native, order="C"))
    except ValueError:  # strides that are not multiples of the element size, as of a record's field
        return torch.from_numpy(np.array(array, dtype=native, order="C"))
    except TypeError:
        raise JobError(f"holds an array of {array.dtype}, which torch does not have; convert it first") from None


def finite(value: Any) -> Any:
    """Return a value that JSON can represent: NaN and infinities as strings, 0-d arrays as numbers, other objects as
    text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, Mapping):
        return {str(name): finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if getattr(value, "ndim", None) == 0:  # a number of NumPy or torch
        return finite(value.item())
    return str(value)
