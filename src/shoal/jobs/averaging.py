"""Averages of weights over training steps, EMA and SWA, with the arithmetic of torch.optim.swa_utils."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

from shoal.errors import JobError
from shoal.utils.numpy_values import plain_int, plain_number


@dataclass(frozen=True, slots=True)
class EMA:
    """An exponential moving average of the weights, computed as by torch.optim.swa_utils.get_ema_multi_avg_fn.

    Examples:
        >>> EMA(0.99).weight(1)
        0.010000000000000009
    """

    decay: float = 0.999
    """The fraction of the average that each update keeps: average = decay * average + (1 - decay) * weights."""
    _: KW_ONLY
    every: int | str = 1
    """The number of optimizer steps from one update to the next, or "epoch" for an update after each complete epoch."""
    start: int = 0
    """The number of optimizer steps before averaging begins. The first update after them copies the weights."""
    use_buffers: bool = False
    """Average floating-point buffers too, such as batch norm's statistics; if False, the network's own are used."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "decay", plain_number(self.decay))
        object.__setattr__(self, "start", plain_int(self.start))
        object.__setattr__(self, "every", plain_int(self.every))
        if isinstance(self.decay, bool) or not isinstance(self.decay, (int, float)) or not 0 <= self.decay <= 1:
            raise JobError(f"EMA: decay is {self.decay!r}; use a number from 0 to 1")
        _check(self, "start")

    def weight(self, count: int) -> float:
        """Return the factor of the weights in the next update, after `count` updates."""
        return 1 - self.decay

    def first(self, steps_per_epoch: int) -> int:
        """Return the number of optimizer steps before averaging begins."""
        return self.start


@dataclass(frozen=True, slots=True)
class SWA:
    """The mean of the weights (stochastic weight averaging), computed as by torch.optim.swa_utils.AveragedModel.

    Examples:
        >>> [SWA().weight(count) for count in (1, 3)]
        [0.5, 0.25]
    """

    start_epoch: int = 0
    """The number of epochs before averaging begins."""
    _: KW_ONLY
    every: int | str = "epoch"
    """The number of optimizer steps from one update to the next, or "epoch" for an update after each complete epoch."""
    use_buffers: bool = False
    """Average floating-point buffers too, such as batch norm's statistics; if False, the network's own are used."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "start_epoch", plain_int(self.start_epoch))
        object.__setattr__(self, "every", plain_int(self.every))
        _check(self, "start_epoch")

    def weight(self, count: int) -> float:
        """Return the factor of the weights in the next update, after `count` updates."""
        return 1 / (count + 1)

    def first(self, steps_per_epoch: int) -> int:
        """Return the number of optimizer steps before averaging begins."""
        return self.start_epoch * steps_per_epoch


def _check(average: Any, start: str) -> None:
    label, start_value, every = type(average).__name__, getattr(average, start), average.every
    if not _is_int(start_value) or start_value < 0:
        raise JobError(f"{label}: {start} is {start_value!r}; use a whole number, 0 or more")
    if every != "epoch" and (not _is_int(every) or every < 1):
        raise JobError(f"{label}: every is {every!r}; use 'epoch', or a whole number of optimizer steps, 1 or more")
    if not isinstance(average.use_buffers, bool):
        raise JobError(f"{label}: use_buffers is {average.use_buffers!r}; use True or False")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_due(average: EMA | SWA, step: int, steps_per_epoch: int) -> bool:
    """Return whether the average is updated after this optimizer step (the first is 1)."""
    first = first_update(average, steps_per_epoch)
    return step >= first and (step - first) % _interval(average, steps_per_epoch) == 0


def first_update(average: EMA | SWA, steps_per_epoch: int) -> int:
    """Return the optimizer step after which the average is updated first."""
    start, every = average.first(steps_per_epoch), _interval(average, steps_per_epoch)
    return start - (start % every if average.every == "epoch" else 0) + every


def counts_epochs(average: EMA | SWA) -> bool:
    """Return whether the average begins, or is updated, by the number of epochs."""
    return average.every == "epoch" or (isinstance(average, SWA) and average.start_epoch > 0)


def _interval(average: EMA | SWA, steps_per_epoch: int) -> int:
    """Return the number of optimizer steps from one update to the next."""
    return average.every if isinstance(average.every, int) else steps_per_epoch
