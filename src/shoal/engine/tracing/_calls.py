"""The calls of torch that a step makes: a second run of its Python code is answered from those of the first.

The step then computes nothing the second time, so that asking whether it would do the same again costs little.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_PLAIN = (int, float, complex, str, bytes, np.generic)
_CONSTANT = (
    Tensor, bool, type(None), type(Ellipsis), torch.dtype, torch.device, torch.layout, torch.memory_format, type,
    torch.Generator,
)  # fmt: skip
"""Compared by identity."""


class OtherCall(Exception):
    """The step calls something else than it did the first time."""


class Calls(TorchFunctionMode):
    """Inside, calls are noted with what they give; after `repeat`, they are given the same again, without being run."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any]] = []
        self._place: int | None = None

    def repeat(self) -> None:
        """From now on the same calls are expected."""
        self._place = 0

    @property
    def repeated(self) -> bool:
        """Whether all calls were made again, and no other."""
        return self._place == len(self._calls)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._place is None:
            given = _copied((args, kwargs))
            out = func(*args, **(kwargs or {}))
            self._calls.append((func, given, out))
            return out
        if self._place < len(self._calls):
            known, given, out = self._calls[self._place]
            if known == func and same_arguments(given, (args, kwargs)):
                self._place += 1
                return func(*args) if func is torch._C._set_grad_enabled else out
        self._place = len(self._calls) + 1  # it may catch the exception
        raise OtherCall


def _copied(value: Any) -> Any:
    """Arguments as they are now: a list of them may become longer."""
    if type(value) in (list, tuple):
        return type(value)(_copied(item) for item in value)
    return {key: _copied(item) for key, item in value.items()} if type(value) is dict else value


def same_arguments(a: Any, b: Any) -> bool:
    """Whether two arguments are the same: tensors are the same object; what is not known is not the same."""
    if type(a) is not type(b):
        return False
    if isinstance(a, _CONSTANT):
        return a is b or (not isinstance(a, Tensor | torch.Generator) and bool(a == b))
    if isinstance(a, _PLAIN):
        return repr(a) == repr(b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same_arguments, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_arguments(value, b[key]) for key, value in a.items())
    if isinstance(a, slice):
        return same_arguments((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    return False
