"""An epoch in numbers, and a network's weights at its end."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from shoal.engine.members.member import Member


def exact_sum(values: list[float]) -> float:
    """The same in any order; of logs that are not finite it is what adding them gives."""
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):
        return sum(values)


def history_row(member: Member, rate: float, val: dict[str, float]) -> dict[str, float]:
    """An epoch in numbers: losses and logs are means over its batches, weighted by their rows.

    Sums are exact, so that they do not depend on how many members are summed at once.
    """
    if member.batched:
        return _row(member, rate, val, partial(_weighted_mean, member.rows))
    size = member.job.batch_size
    before = size * (member.place - 1)
    last = member.num_rows - before if member.place == member.num_batches else size
    even = last == size and size & (size - 1) == 0  # then products are exact, and so is that of their sum

    def mean(values: list[float]) -> float:
        if even:
            return exact_sum(values) * size / (before + last)
        return exact_sum([*(value * size for value in values[:-1]), values[-1] * last]) / (before + last)

    return _row(member, rate, val, mean)


def _weighted_mean(rows: list[int], values: list[float]) -> float:
    return exact_sum([value * n for value, n in zip(values, rows, strict=True)]) / sum(rows)


def _row(member: Member, rate: float, val: dict[str, float], mean: Callable[[list[float]], float]) -> dict[str, float]:
    row: dict[str, float] = {"epoch": member.epoch, "step": member.step, "loss": mean(member.losses)}
    row |= {name: mean(values) for name, values in sorted(member.logs.items())}
    return row | val | {"lr": rate, "seconds": member.seconds}


def weights(model: torch.nn.Module) -> dict[str, object]:
    """A copy of a model's state on the CPU."""
    return {
        k: v.detach().to("cpu", copy=True) if isinstance(v, Tensor) else copy.deepcopy(v)
        for k, v in model.state_dict().items()
    }
