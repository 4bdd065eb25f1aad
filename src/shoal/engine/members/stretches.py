"""A member's numbers as they are saved, and the beginning of an epoch that a clone continues in other batches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree


class Stretch(NamedTuple):
    """The beginning of an epoch that a clone had before its batches became others."""

    rows: int
    size: int
    """Of its batches; the last one may be smaller."""
    losses: list[float]
    logs: dict[str, list[float]]

    def state(self) -> dict[str, Any]:
        """As tensors and plain values."""
        return {**self._asdict(), "losses": packed(self.losses), "logs": packed_logs(self.logs)}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Stretch:
        """From what `state()` gave."""
        return cls(state["rows"], state["size"], state["losses"].tolist(), unpacked_logs(state["logs"]))

    def weighted(self, values: Sequence[float]) -> list[float]:
        """A value for each batch, times the batch's rows."""
        last = self.rows - self.size * (len(values) - 1)
        return [*(value * self.size for value in values[:-1]), *(value * last for value in values[-1:])]


def joined(stretches: Sequence[Stretch]) -> tuple[list[float], dict[str, list[float]]]:
    """Losses and logs of an epoch; a batch that did not log a name has NaN there."""
    if len(stretches) == 1:
        return stretches[0].losses, stretches[0].logs
    losses = [loss for stretch in stretches for loss in stretch.losses]
    logs: dict[str, list[float]] = {name: [] for stretch in stretches for name in stretch.logs}
    for stretch in stretches:
        for name, values in logs.items():
            values += stretch.logs.get(name) or [math.nan] * len(stretch.losses)
    return losses, logs


def packed(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def packed_logs(logs: Mapping[str, Sequence[float]]) -> dict[str, Tensor]:
    return {name: packed(values) for name, values in logs.items()}


def unpacked_logs(logs: Mapping[str, Tensor]) -> dict[str, list[float]]:
    return {name: values.tolist() for name, values in logs.items()}


def stored(value: Any) -> Any:
    """Tensors on the CPU, and apart from larger ones they are a part of: what is stored is stored whole."""

    def detached(x: Any) -> Any:
        if not isinstance(x, Tensor) or is_lazy(x):
            return x
        x = x.detach()
        if x.layout != torch.strided:
            return x.cpu()
        part = x.untyped_storage().nbytes() > x.nbytes + 1024
        return x.cpu().clone() if part or x.device.type != "cpu" else x

    return pytree.tree_map(detached, value)
