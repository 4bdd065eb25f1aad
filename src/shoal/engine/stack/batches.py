"""Batches for a stack. They are read once if all members read the same rows, and member by member otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.data.loader import LoaderSource
from shoal.data.source import TensorSource
from shoal.engine.members.batch_stream import Stream, has_another_batch
from shoal.engine.members.member import Member


class Feed:
    """Reads the next batches of members, each at its own position in its epoch, padded to the stack's rows."""

    def __init__(self, members: list[Member], rows: list[int], batches: int, streams: dict[int, Stream]) -> None:
        """Prepare to read `batches` batches of each member.

        Args:
            rows: For every row of the stack, the slot of its member.
            streams: The open iterators of streamed data, by the member's index.
        """
        first = members[0]
        self.members, self.rows, self.streams = members, rows, streams
        self.size = first.batch_size
        sources = [member.data.source for member in members]
        self._sources = [source for source in sources if isinstance(source, TensorSource)]
        self.in_memory = len(self._sources) == len(sources)
        self.one_source = all(member.data.source is first.data.source for member in members)
        same_order = all(member.order is first.order and member.place == first.place for member in members)
        seeds = {(member.job.order_seed, member.epoch) for member in members} if not self.in_memory else {(0, 0)}
        self.batched = first.batched
        self.shared = (self.one_source and same_order and len(seeds) == 1) or self.batched
        """Whether all members get the same batch. It is then read once and has no member axis."""
        self._rows: Tensor | None = None
        self._feeds: list[Iterator[Any]] = []
        if self.in_memory:
            self._rows = self._coming_rows(batches).to(first.device)
        else:
            self._feeds = [streams.setdefault(m.index, Stream()).at(m) for m in self._readers]

    def has_next(self) -> bool:
        """Return whether there is another batch. An epoch of a DataLoader may end within a turn."""
        return not self.batched or has_another_batch(self._feeds[0], self.members)

    def kind(self, batch: Any) -> int:
        """Return the number of the batch's kind, for members that read whole batches from a DataLoader."""
        source = self.members[0].data.source
        assert isinstance(source, LoaderSource)
        return source.kind(batch)

    def next_batch(self) -> Any:
        """Return the next batch as the DataLoader returns it."""
        return next(self._feeds[0])

    @property
    def _readers(self) -> list[Member]:
        return self.members[:1] if self.shared else self.members

    def _coming_rows(self, batches: int) -> Tensor:
        """Return the row numbers of the coming batches: [n] if shared, else [M, n]."""
        each = []
        for member in self._readers:
            assert member.order is not None, "the member has no rows; call assign_rows first"
            start = member.place * self.size
            each.append(member.order[start : start + batches * self.size])
        return each[0] if self.shared else torch.stack([each[slot] for slot in self.rows])

    def batch(self, index: int) -> list[Tensor]:
        """Return the tensors of the index-th batch: [B, ...] if shared, else [M, B, ...]."""
        if self._rows is None:
            return self._read_streams()
        rows = self._rows[..., index * self.size : (index + 1) * self.size]
        if self.shared or self.one_source:
            return self._sources[0].take_leaves(rows)
        parts = [self._sources[slot].take_leaves(rows[i]) for i, slot in enumerate(self.rows)]
        return [torch.stack(column) for column in zip(*parts, strict=True)]

    def _read_streams(self) -> list[Tensor]:
        parts = [pytree.tree_leaves(next(feed)) for feed in self._feeds]
        if self.shared:
            return parts[0]
        return [torch.stack([column[slot] for slot in self.rows]) for column in zip(*parts, strict=True)]

    def finish(self) -> None:
        """Note that all batches were used and members are at their new positions, so that open streams can continue."""
        if not self.in_memory:
            for member in self._readers:
                self.streams[member.index].note_position(member)
