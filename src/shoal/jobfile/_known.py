"""The names that job files know: losses, metrics, optimizers, schedules. Models are in `shoal.models`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer, lr_scheduler


def token_cross_entropy(logits_BTV: Tensor, target_BT: Tensor) -> Tensor:
    """Return the mean cross entropy over every token of every sequence."""
    return F.cross_entropy(logits_BTV.flatten(0, -2), target_BT.flatten())


LOSSES: dict[str, Callable[..., Tensor]] = {
    function.__name__: function
    for function in (
        F.cross_entropy, token_cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss,
        F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.poisson_nll_loss, F.soft_margin_loss,
        F.multi_margin_loss, F.kl_div,
    )
}  # fmt: skip


def accuracy(outputs: Tensor, targets: Tensor) -> float:
    """Return the fraction of rows (or tokens) whose largest output is their class."""
    return (outputs.argmax(-1) == targets).double().mean().item()


def binary_accuracy(outputs: Tensor, targets: Tensor) -> float:
    """Return the fraction of rows on the right side; outputs are logits, targets 0 or 1."""
    return ((outputs > 0) == (targets > 0.5)).double().mean().item()


def mse(outputs: Tensor, targets: Tensor) -> float:
    """Return the mean squared error."""
    return (outputs.double() - targets.double()).square().mean().item()


def rmse(outputs: Tensor, targets: Tensor) -> float:
    """Return the root of the mean squared error."""
    return math.sqrt(mse(outputs, targets))


def mae(outputs: Tensor, targets: Tensor) -> float:
    """Return the mean absolute error."""
    return (outputs.double() - targets.double()).abs().mean().item()


METRICS: dict[str, Callable[[Tensor, Tensor], float]] = {
    function.__name__: function for function in (accuracy, binary_accuracy, mse, rmse, mae)
}

OPTIMIZERS: dict[str, type[Optimizer]] = {
    name: value
    for name, value in vars(torch.optim).items()
    if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer
}

SCHEDULERS: dict[str, Callable[..., Any]] = {
    name: value
    for name, value in vars(lr_scheduler).items()
    if isinstance(value, type)
    and issubclass(value, lr_scheduler.LRScheduler)
    and value is not lr_scheduler.LRScheduler
    and not name.startswith("_")
    and name not in ("LambdaLR", "MultiplicativeLR", "SequentialLR", "ChainedScheduler")  # their arguments are code
}


@dataclass(frozen=True, kw_only=True)
class Over:
    """A factor of the learning rate over the entire job: rising during `warmup`, then falling to `floor`."""

    warmup: int = 0
    """The number of steps (or epochs, with schedule_every = "epoch") in which the factor rises from near 0."""
    floor: float = 0.0
    """The factor at the end."""
    total: int = 1
    """The number of steps or epochs of the job, which is set once its data is known."""

    def __post_init__(self) -> None:
        for name in ("warmup", "floor"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value!r}; use a number, 0 or more")

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        left = max(1, self.total - self.warmup)
        return self.floor + (1 - self.floor) * self.shape(min(1.0, (step - self.warmup) / left))

    def shape(self, done: float) -> float:
        """Return the factor between 1 and 0 as `done` goes from 0 to 1."""
        return 1.0


class Constant(Over):
    """A factor that stays at 1 after the warm-up."""


class Linear(Over):
    """A factor that falls in a straight line."""

    def shape(self, done: float) -> float:
        return 1 - done


class Cosine(Over):
    """A factor that falls as half a cosine."""

    def shape(self, done: float) -> float:
        return 0.5 * (1 + math.cos(math.pi * done))


OVERS: dict[str, type[Over]] = {"cosine": Cosine, "linear": Linear, "constant": Constant}
