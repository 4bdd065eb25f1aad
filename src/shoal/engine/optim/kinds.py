"""What an optimizer asks of a training loop besides step() and zero_grad()."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any, Literal

from torch.optim import Optimizer

_signature = cache(inspect.signature)


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether the optimizer evaluates the loss itself, as LBFGS does."""
    parameter = _signature(type(optimizer).step).parameters.get("closure")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def has_modes(optimizer: object) -> bool:
    """Whether an optimizer, or its class, has train() and eval(), as those of schedulefree have: in train mode the
    weights are those to train, in eval mode those to use."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


def set_mode(optimizer: Any, mode: Literal["train", "eval"]) -> None:
    """Put an optimizer that has modes into one of them."""
    getattr(optimizer, mode)()


def learning_rate(optimizer: Optimizer) -> float:
    """That of the first parameter group; NaN where it has none, or None as Adafactor of transformers has by default."""
    rate = optimizer.param_groups[0].get("lr")
    return float("nan") if rate is None else float(rate)
