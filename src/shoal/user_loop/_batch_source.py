"""The batches of a user's own loop, as each member and each stack is handed them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.data.source import Source
from shoal.engine.members.member import Member
from shoal.engine.tiers.stacked.given_batches import GivenBatchesStack


class FixedBatchSource(Source):
    """The batch that a member is handed, as the data of its own: one row, which is the whole batch."""

    length = 1

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.batch: Any = None

    def take(self, rows: Tensor, *, seed: int = 0, epoch: int = 0) -> Any:
        return self.batch

    def feed(self, rows: Tensor, batch_size: int, *, seed: int = 0, epoch: int = 0) -> Iterator[Any]:
        return iter((self.batch,))

    def fingerprint(self) -> str:
        return "handed"


class Batches:
    """One step's batch, as each unit and each member sees it."""

    def __init__(self, leaves: list[Tensor], spec: pytree.TreeSpec, per_member: bool, places: dict[int, int]) -> None:
        self.leaves, self.spec, self.per_member, self.places = leaves, spec, per_member, places
        flat = spec.type is tuple and spec.num_nodes == len(leaves) + 1
        folded = len(leaves) if flat else repr(spec)
        self.key: Hashable = (per_member, folded, *((tuple(leaf.shape), leaf.dtype) for leaf in leaves))
        """Batches with equal keys have one trace."""

    def of(self, member: Member) -> Any:
        """One member's batch."""
        leaves = [leaf[self.places[member.index]] for leaf in self.leaves] if self.per_member else self.leaves
        return pytree.tree_unflatten(leaves, self.spec)

    def hand(self, member: Member) -> None:
        """Put a member's batch where it reads its data."""
        assert isinstance(member.data.source, FixedBatchSource)
        member.data.source.batch = self.of(member)

    def rows(self, unit: GivenBatchesStack) -> list[Tensor]:
        """The batch for the rows of a stack."""
        places = [self.places[unit.members[row].index] for row in unit.rows]
        if not self.per_member or places == list(range(len(self.places))):
            return self.leaves
        return [leaf[places] for leaf in self.leaves]

    def shapes(self) -> str:
        return ", ".join(str(list(leaf.shape)) for leaf in self.leaves)
