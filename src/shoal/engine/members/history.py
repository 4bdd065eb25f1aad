"""The history row of an epoch, and copies of a network's weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from shoal.engine.members.member import Member
from shoal.engine.members.stretches import Stretch, joined


def exact_sum(values: list[float]) -> float:
    """Return a sum that does not depend on the order. If values are not finite, it is their ordinary sum."""
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):
        return sum(values)


def history_row(member: Member, rate: float, val: dict[str, float]) -> dict[str, float]:
    """Return an epoch's row of the history: losses and logs are means over its batches, weighted by their rows.

    Sums are exact, so that they do not depend on how many members are summed at once.
    """
    losses, logs = joined([*member.earlier, Stretch(0, 0, member.losses, member.logs)])
    mean = partial(_weighted_mean, member.rows) if member.batched else _mean_over_rows(member)
    row: dict[str, float] = {"epoch": member.epoch, "step": member.step, "loss": mean(losses)}
    row |= {name: mean(values) for name, values in sorted(logs.items())}
    return row | val | {"lr": rate, "seconds": member.seconds}


def _weighted_mean(rows: list[int], values: list[float]) -> float:
    return exact_sum([value * n for value, n in zip(values, rows, strict=True)]) / sum(rows)


def _mean_over_rows(member: Member) -> Callable[[list[float]], float]:
    size = member.job.batch_size
    rows = member.num_rows if member.place == member.num_batches else size * member.place
    stretches = [*member.earlier, Stretch(rows, size, member.losses, member.logs)]
    even = len(stretches) == 1 and rows == size * member.place and size & (size - 1) == 0  # then products are exact

    def mean(values: list[float]) -> float:
        if even:
            return exact_sum(values) * size / rows
        weighted, at = list[float](), 0
        for stretch in stretches:
            weighted += stretch.weighted(values[at : at + len(stretch.losses)])
            at += len(stretch.losses)
        return exact_sum(weighted) / sum(stretch.rows for stretch in stretches)

    return mean


def weights(model: torch.nn.Module) -> dict[str, object]:
    """Return a copy of a model's `state_dict()` on the CPU."""
    return {
        k: v.detach().to("cpu", copy=True) if isinstance(v, Tensor) else copy.deepcopy(v)
        for k, v in model.state_dict().items()
    }
