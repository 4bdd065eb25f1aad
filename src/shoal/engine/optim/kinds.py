"""What optimizers need from a training loop besides `step()` and `zero_grad()`."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any, Literal

from torch.optim import Optimizer

_signature = cache(inspect.signature)


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether the optimizer evaluates the loss itself, as LBFGS does."""
    parameter = _signature(type(optimizer).step).parameters.get("closure")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def has_modes(optimizer: object) -> bool:
    """Return whether an optimizer, or its class, has `train()` and `eval()`, as those of schedulefree have.

    In train mode the weights are those to train, in eval mode those to use.
    """
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


def set_mode(optimizer: Any, mode: Literal["train", "eval"]) -> None:
    """Put an optimizer that has modes into one of them."""
    getattr(optimizer, mode)()


def learning_rate(optimizer: Optimizer) -> float:
    """Return the learning rate of the first parameter group; NaN if it has none, or None as in Adafactor of
    transformers."""
    rate = optimizer.param_groups[0].get("lr")
    return float("nan") if rate is None else float(rate)
