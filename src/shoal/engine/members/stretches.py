"""A member's numbers in the form in which they are saved, and the parts of an epoch in which a clone's batch size
changed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree


class Stretch(NamedTuple):
    """A part of an epoch that a clone trained before its batch size changed."""

    rows: int
    size: int
    """The batch size; the last batch may be smaller."""
    losses: list[float]
    logs: dict[str, list[float]]

    def state(self) -> dict[str, Any]:
        """Return it as tensors and plain values."""
        return {**self._asdict(), "losses": packed(self.losses), "logs": packed_logs(self.logs)}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Stretch:
        """Create it from what `state()` returned."""
        return cls(state["rows"], state["size"], state["losses"].tolist(), unpacked_logs(state["logs"]))

    def weighted(self, values: Sequence[float]) -> list[float]:
        """Multiply a value for each batch by the batch's rows."""
        last = self.rows - self.size * (len(values) - 1)
        return [*(value * self.size for value in values[:-1]), *(value * last for value in values[-1:])]


def joined(stretches: Sequence[Stretch]) -> tuple[list[float], dict[str, list[float]]]:
    """Join losses and logs of the parts of an epoch. A batch that did not log a name has NaN there."""
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
    """Move tensors to the CPU, and copy those that are views of larger ones, since torch saves the whole storage."""

    def detached(x: Any) -> Any:
        if not isinstance(x, Tensor) or is_lazy(x):
            return x
        x = x.detach()
        if x.layout != torch.strided:
            return x.cpu()
        part = x.untyped_storage().nbytes() > x.nbytes + 1024
        return x.cpu().clone() if part or x.device.type != "cpu" else x

    return pytree.tree_map(detached, value)
