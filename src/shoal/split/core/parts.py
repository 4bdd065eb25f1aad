"""A split as plain data: which worker trains which slices of which tensors, on which rows, for how many steps.

Every way to train one network as several parts (IST, whole blocks, SIL, local heads, local SGD, data parallel) is a
list of rounds, and a round is a list of parts. This file does not depend on the way.

    state -> parts of the round -> tasks -> outcomes -> state

A task is complete: its outcome depends on the task and the job alone, not on where it is trained. So parts can be
trained one after another in this process (the reference), as a pack on one device, or by workers on other machines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

Index = tuple[Tensor | None, ...]
"""For each dimension the rows that are taken, ascending, or None for all rows. Dimensions that are left out are
whole."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Where a part's tensor lies in the whole network's.

    >>> whole = torch.arange(6.0).view(2, 3)
    >>> piece = Slice("weight", (None, torch.tensor([0, 2])))
    >>> piece.take(whole)
    tensor([[0., 2.],
            [3., 5.]])
    >>> piece.put(whole, torch.zeros(2, 2)); whole
    tensor([[0., 1., 0.],
            [0., 4., 0.]])
    """

    name: str
    """The tensor's name in the whole network's state."""
    index: Index = ()

    @property
    def whole(self) -> bool:
        return all(rows is None for rows in self.index)

    @property
    def cut(self) -> list[tuple[int, Tensor]]:
        """The dimensions of which only some rows are taken, with these rows."""
        return [(dim, rows) for dim, rows in enumerate(self.index) if rows is not None]

    def take(self, whole: Tensor) -> Tensor:
        """Copy the piece out of the whole tensor."""
        if self.whole:
            return whole.clone()
        if len(self.cut) == 1:
            ((dim, rows),) = self.cut
            return whole.index_select(dim, rows.to(whole.device))
        return whole[self._at(whole)]

    def put(self, whole: Tensor, value: Tensor) -> None:
        """Write a piece into the whole tensor, in place."""
        if self.whole:
            whole.copy_(value)
        elif len(self.cut) == 1:
            ((dim, rows),) = self.cut
            whole.index_copy_(dim, rows.to(whole.device), value.to(whole))
        else:
            whole[self._at(whole)] = value.to(whole.device)

    def shape(self, whole: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the piece."""
        rows = (*self.index, *(None for _ in range(len(whole) - len(self.index))))
        return tuple(size if taken is None else len(taken) for size, taken in zip(whole, rows, strict=True))

    def _at(self, whole: Tensor) -> tuple[Tensor | slice, ...]:
        """Make index tensors that broadcast against one another, from the first dimension that is cut to the last."""
        first, last = self.cut[0][0], self.cut[-1][0]
        index: list[Tensor | slice] = [slice(None)] * first
        for dim in range(first, last + 1):
            taken = self.index[dim]
            rows = torch.arange(whole.shape[dim], device=whole.device) if taken is None else taken
            index.append(rows.to(whole.device).view([-1 if d == dim else 1 for d in range(first, last + 1)]))
        return tuple(index)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one worker trains in one round."""

    number: int
    """The part's place in the round, from 0. Sums are taken in this order."""
    keep: Mapping[str, Tensor] = field(default_factory=dict)
    """Group of units -> the units that the part keeps, ascending. Groups that are not listed are kept whole."""
    learn: Mapping[str, Tensor] | None = None
    """Group of units -> the units whose weights are trained, if these are fewer than `keep`; None: all that it
    keeps."""
    role: str = ""
    """Which part of the network this is, if the parts differ ("left", "right"); empty if they do not."""
    shard: tuple[int, int] = (0, 1)
    """(i, n): the part reads shard i of n shards of the rows."""
    start: int = 0
    """The part's first batch, counted in the endless sequence of the shard's batches."""
    steps: int = 1
    """How many optimizer steps the part takes."""
    seed: int = 0
    """Seed of the random draws inside the part's network."""


Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A part, with the tensors that it starts from."""

    round: int
    part: Part
    tensors: Tensors
    """The part's parameters and buffers, by their names in the part's network."""
    moments: Tensors = field(default_factory=dict)
    """The part's pieces of optimizer state, by "<parameter>/<name>"."""
    extras: Tensors = field(default_factory=dict)
    """What else the part needs, such as another part's activations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a task."""

    round: int
    number: int
    """The number of the part."""
    tensors: Tensors
    moments: Tensors = field(default_factory=dict)
    extras: Tensors = field(default_factory=dict)
    losses: tuple[float, ...] = ()
    """The loss of each step."""
    rows: int = 0
    """How many rows were read."""
    seconds: float = 0.0
    """Seconds of training alone."""
    peak_bytes: int = 0
    """The most memory that training held, weights included."""
