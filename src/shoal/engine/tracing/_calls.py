"""Record the torch calls of a step, and check cheaply whether a second run makes the same calls.

The second run computes nothing: each call returns the result that it had in the first run.
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
"""Types whose values are the same if they are one object or, except for tensors and generators, equal."""


class OtherCall(Exception):
    """Raised if the second run of a step makes another call than the first run."""


class Calls(TorchFunctionMode):
    """Records torch calls with their results. After `repeat`, returns these results instead of running the calls."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any]] = []
        self._place: int | None = None

    def repeat(self) -> None:
        """Start the second run, in which the same calls are expected in the same order."""
        self._place = 0

    @property
    def repeated(self) -> bool:
        """Whether the second run made all of the recorded calls and no other."""
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
        self._place = len(self._calls) + 1  # `repeated` stays False even if the step catches the exception
        raise OtherCall


def _copied(value: Any) -> Any:
    """Copy the containers among the arguments, since the step may change a list later."""
    if type(value) in (list, tuple):
        return type(value)(_copied(item) for item in value)
    return {key: _copied(item) for key, item in value.items()} if type(value) is dict else value


def same_arguments(a: Any, b: Any) -> bool:
    """Return whether two arguments are the same. Tensors must be one object; values of unknown types never match."""
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
