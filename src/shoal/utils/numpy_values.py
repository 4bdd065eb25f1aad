"""NumPy's and torch's numbers as Python's own, and NumPy's arrays as tensors."""

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
    """The int that a whole number of any library is; everything else as it is, for a check to refuse.

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
    """The Python number that a number of any library is; everything else as it is.

    >>> plain_number(np.float32(0.5)), plain_number(np.array(2)), plain_number(np.bool_(True)), plain_number("x")
    (0.5, 2, True, 'x')
    """
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray | Tensor) and value.ndim == 0):
        return value.item()
    return value


def plain_numbers(value: Any) -> Any:
    """NumPy's numbers inside tuples, lists and dicts as Python's own. Tensors stay: an optimizer may be given one."""
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(map(plain_numbers, value))
    if isinstance(value, list):
        return list(map(plain_numbers, value))
    if isinstance(value, Mapping):
        return {name: plain_numbers(item) for name, item in value.items()}
    return value if isinstance(value, Tensor) else plain_number(value)


def tensor_of(array: np.ndarray[Any, Any]) -> Tensor:
    """An array as a tensor: in place where torch can have it so, else a copy.

    Raises:
        JobError: when it holds what torch has no numbers for.
    """
    if isinstance(array, np.ma.MaskedArray):
        raise JobError("holds a masked array, whose mask would be lost; fill it first: array.filled(...)")
    if array.dtype.kind not in "biufc":
        raise JobError(f"holds an array of {array.dtype}; pass numbers")
    backwards = any(stride < 0 for stride in array.strides)
    odd = backwards or not array.flags.writeable or not array.flags.aligned or not array.dtype.isnative
    native = array.dtype.newbyteorder("=")
    try:
        return torch.from_numpy(array if not odd else np.array(array, dtype=native, order="C"))
    except ValueError:  # strides that are no whole elements, as of one field of a record
        return torch.from_numpy(np.array(array, dtype=native, order="C"))
    except TypeError:
        raise JobError(f"holds an array of {array.dtype}, which torch does not have; convert it first") from None


def finite(value: Any) -> Any:
    """What JSON can hold: NaN and infinities as strings, numbers of one element as numbers, the rest in words."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, Mapping):
        return {str(name): finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if getattr(value, "ndim", None) == 0:  # a number of numpy's or torch's
        return finite(value.item())
    return str(value)
