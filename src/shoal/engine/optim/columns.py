"""The hyper-parameters of a pack's optimizers: one float64 column per name and param group."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class Columns:
    """For each param group, a dict from names to [M] float64 columns, all views of one tensor `packed` [G, names, M].

    It is one tensor so that a step's values for all groups, names and members need a single copy (see
    `ScheduleRunner.table`), to addresses that never change, as a captured graph requires.

    >>> columns = Columns([[{"lr": 0.1}], [{"lr": 0.2}]])
    >>> columns.set_row(1, [{"lr": 0.5}]); columns.groups[0]["lr"].tolist()
    [0.1, 0.5]
    """

    def __init__(
        self, members: Sequence[Sequence[Mapping[str, float]]], *, device: torch.device | str | None = None
    ) -> None:
        self.names = tuple(members[0][0])
        assert all(len(groups) == len(members[0]) for groups in members), "members have equally many param groups"
        assert all(set(group) == set(self.names) for groups in members for group in groups), "with the same numbers"
        rows = [[[member[g][name] for member in members] for name in self.names] for g in range(len(members[0]))]
        self._view(torch.tensor(rows, dtype=torch.float64, device=device))

    def _view(self, packed: Tensor) -> None:
        self.packed = packed
        self.groups: list[dict[str, Tensor]] = [dict(zip(self.names, group.unbind(0), strict=True)) for group in packed]

    def set_row(self, slot: int, groups: Sequence[Mapping[str, float]]) -> None:
        """Set all of one member's numbers in place, with one copy; names without a column are ignored."""
        rows = [[group[name] for name in self.names] for group in groups]
        self.packed[:, :, slot] = torch.tensor(rows, dtype=torch.float64).to(self.packed.device)

    def row(self, slot: int) -> list[dict[str, float]]:
        """Return one member's numbers for each group. This waits for the device."""
        return self.named(self.packed[:, :, slot])

    def named(self, values: Tensor) -> list[dict[str, float]]:
        """Return one member's numbers [G, names] by name, for each group."""
        return [dict(zip(self.names, group, strict=True)) for group in values.tolist()]

    def on(self, packed: Tensor) -> Columns:
        """Return columns with the same names on other numbers, [G, names, M]."""
        columns = copy.copy(self)
        columns._view(packed)
        return columns
