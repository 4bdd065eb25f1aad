"""Batches for a stack: gathered once where all members read the same rows, member by member otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.data.source import TensorSource
from shoal.pack.members import Member


class Feed:
    """One epoch's batches for members in lockstep, padded to the stack's rows."""

    def __init__(self, members: list[Member], rows: list[int], orders_MN: Tensor) -> None:
        self.members, self.rows = members, rows
        self.size = members[0].job.batch_size
        source = members[0].data.source
        same_data = all(member.data.source is source for member in members)
        seeds = {member.job.order_seed for member in members} if source.streamed else {0}
        self.shared = same_data and orders_MN.stride(0) == 0 and len(seeds) == 1
        """Whether every member gets the very same batch, so that it is read once and has no member axis."""
        self.in_memory = all(isinstance(member.data.source, TensorSource) for member in members)
        self.one_source = same_data
        self.orders = orders_MN
        self._streams: list[Iterator[Any]] = []
        if not self.in_memory:
            wanted = members[:1] if self.shared else members
            self._streams = [
                m.data.source.feed(orders_MN[slot], self.size, seed=m.job.order_seed, epoch=m.epoch)
                for slot, m in enumerate(wanted)
            ]
        elif not self.shared:
            self._padded = orders_MN[rows].to(members[0].device)
        else:
            self._padded = orders_MN[0].to(members[0].device)

    def batch(self, index: int) -> list[Tensor]:
        """The leaves of batch `index`: [B, ...] where shared, else [M, B, ...]."""
        if not self.in_memory:
            return self._streamed()
        rows = self._padded[..., index * self.size : (index + 1) * self.size]
        source = self.members[0].data.source
        if self.shared or self.one_source:
            return list(pytree.tree_leaves(source.take(rows)))
        parts = [pytree.tree_leaves(self.members[own].data.source.take(rows[i])) for i, own in enumerate(self.rows)]
        return [torch.stack(column) for column in zip(*parts, strict=True)]

    def _streamed(self) -> list[Tensor]:
        parts = [pytree.tree_leaves(next(stream)) for stream in self._streams]
        if self.shared:
            return parts[0]
        return [torch.stack([column[own] for own in self.rows]) for column in zip(*parts, strict=True)]

    def keep(self, members: list[Member], slots: list[int], rows: list[int]) -> Feed:
        """The rest of the epoch for some of the members."""
        kept = object.__new__(Feed)
        kept.__dict__.update(self.__dict__)
        kept.members, kept.rows = members, rows
        kept.orders = self.orders[slots] if not self.shared else self.orders[:1].expand(len(slots), -1)
        if not self.in_memory:
            kept._streams = self._streams if self.shared else [self._streams[slot] for slot in slots]
        elif not self.shared:
            kept._padded = kept.orders[rows].to(members[0].device)
        return kept
