"""A trial: one configuration of a search, and its outcome."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

State = Literal["waiting", "running", "paused", "complete", "pruned", "failed"]


@dataclass(slots=True)
class Trial:
    """One configuration of a study, as plain data that can be written to JSON and read again."""

    number: int
    """Its number in the study, from 0."""
    params: dict[str, Any]
    """The values that were drawn for it, by the names of the search space; `settings` has its current ones."""
    state: State = "waiting"
    """`paused`: it has reached its rung and waits for the others. `pruned`: it was stopped at a rung."""
    values: dict[int, float] = field(default_factory=dict)
    """The metric after each epoch that measured it."""
    bracket: int = 0
    rung: int = 0
    """How many rungs it has passed."""
    error: str | None = None
    """Why it failed, in one line."""
    attrs: dict[str, Any] = field(default_factory=dict)
    """Other data: a scheduler's notes, the settings that population-based training gave it."""
    kept_epoch: int | None = None
    """The epoch whose weights it keeps, if its job has keep="best"; None: the last one."""

    @property
    def name(self) -> str:
        """The name of its job."""
        return f"trial {self.number}"

    @property
    def epochs(self) -> int:
        """The last epoch for which it has a value."""
        return max(self.values, default=0)

    @property
    def settings(self) -> dict[str, Any]:
        """Its current parameters: those drawn for it, or those that population-based training gave it."""
        current: dict[str, Any] = self.attrs.get("params", self.params)
        return current

    @property
    def value(self) -> float:
        """The metric of the weights that it keeps: at its last epoch, or at its best one if its job has keep="best";
        NaN if it has none."""
        return self.value_at(self.epochs if self.kept_epoch is None else self.kept_epoch)

    @property
    def ended(self) -> bool:
        """Whether it has stopped training for good."""
        return self.state in ("complete", "pruned", "failed")

    def value_at(self, epoch: int) -> float:
        """Return the metric at an epoch; NaN if it has none."""
        return self.values.get(epoch, math.nan)
