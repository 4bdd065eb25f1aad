"""Modes in which a network that runs operator by operator draws, on a GPU, what the engine draws there."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.utils.randomness import Draw, counter_draw, signed


class CounterMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, operators on a GPU draw what the engine draws there: for networks that run operator by operator.

    `begin(count)` says how many batches the member has had; random calls within a batch are then numbered as they come.
    The number is in the GPU's generator: activation checkpointing, which computes a part of the network again in
    the backward pass, puts the generator back to where that part began, and so draws what it drew.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = torch.tensor([signed(seed)], device=device)
        self._count = torch.zeros(1, dtype=torch.int64, device=device)
        self._device = device
        self._number = 0
        self._outside = 0

    def __enter__(self) -> CounterMode:
        self._outside = self._site
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._site = self._outside

    def begin(self, count: int) -> None:
        """A new batch."""
        self._count.fill_(count)
        self._site = 0

    @property
    def _site(self) -> int:
        """The number of the next random call."""
        if self._device.type != "cuda":
            return self._number
        return torch.cuda._get_rng_state_offset(self._device) // _OFFSET

    @_site.setter
    def _site(self, number: int) -> None:
        if self._device.type == "cuda":
            torch.cuda._set_rng_state_offset(number * _OFFSET, self._device)
        self._number = number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func)
        if name == "aten.native_dropout.default" and args[2] is not False and 0.0 < args[1] < 1.0:
            mask = self._value("bernoulli", args[0], (1.0 - args[1],)).bool()
            return args[0] * (mask.to(args[0].dtype) * (1.0 / (1.0 - args[1]))), mask
        kind = _IN_PLACE.get(name)
        if kind is not None and kwargs.get("generator") is None:
            numbers = (
                tuple(args[1:])
                or {"uniform": (0.0, 1.0), "normal": (0.0, 1.0), "exponential": (1.0,), "bernoulli": (0.5,)}[kind]
            )
            if kind in ("uniform", "normal") and len(numbers) == 1:
                numbers = (*numbers, 1.0)
            return args[0].copy_(self._value(kind, args[0], numbers))
        made = _MADE.get(name)
        if made is not None and kwargs.get("generator") is None:
            at = self._site
            like = func(*args, **kwargs)
            self._site = at
            return self._value(made, like, _numbers(name, args))
        return func(*args, **kwargs)

    def _value(self, kind: str, like: Tensor, numbers: tuple[float, ...]) -> Tensor:
        draw = Draw(kind, tuple(like.shape), like.dtype, None, (numbers,))
        site = torch.tensor([self._site], device=self._seed.device)
        self._site += 1
        return counter_draw(draw, self._seed, self._count, site)[0].to(like.device)


_OFFSET = 4
"""A GPU's generator counts in fours."""


def _numbers(name: str, args: Any) -> tuple[float, ...]:
    """The numbers of the distribution that a call draws from."""
    if name == "aten.randperm.default":
        return ()
    if "randint" not in name:
        return (0.0, 1.0)
    bounds = args[1 if "like" in name else 0 :]
    return tuple(bounds[:2]) if "low" in name else (0, bounds[0])


_IN_PLACE = {
    "aten.bernoulli_.float": "bernoulli",
    "aten.uniform_.default": "uniform",
    "aten.normal_.default": "normal",
    "aten.exponential_.default": "exponential",
}
_MADE = {
    "aten.rand.default": "uniform",
    "aten.rand_like.default": "uniform",
    "aten.randn.default": "normal",
    "aten.randn_like.default": "normal",
    "aten.randint.default": "integer",
    "aten.randint.low": "integer",
    "aten.randint_like.default": "integer",
    "aten.randint_like.low_dtype": "integer",
    "aten.randperm.default": "permutation",
}
_RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


class OpenRecurrent(TorchFunctionMode):
    """Inside, recurrent layers with dropout between them leave cuDNN, which draws inside itself, for torch's own."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _RECURRENT or not self._draws(args):
            return func(*args, **(kwargs or {}))
        with torch.backends.cudnn.flags(enabled=False):
            return func(*args, **(kwargs or {}))

    @staticmethod
    def _draws(args: Any) -> bool:
        """The rate is the only number with a point among the arguments; after it comes whether this is training."""
        return any(isinstance(rate, float) and rate > 0 and bool(on) for rate, on in pairwise(args))
