"""A member's batches as an iterator that stays open while the member continues where it stopped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from shoal.engine.members.member import Member


class Stream:
    """The rest of one member's epoch, read ahead where the source does that; opened anew where the member is not."""

    def __init__(self) -> None:
        self._order: Tensor | None = None
        self._place = -1
        self._feed: Iterator[Any] = iter(())

    def at(self, member: Member) -> Iterator[Any]:
        """The member's batches from its place on. Until `went` is called, the iterator counts as lost."""
        if self._order is not member.order or self._place != member.place:
            job, order = member.job, member.order
            assert order is not None, "the member has no rows; deal them first"
            rest = order[member.place * job.batch_size :]
            self._feed = member.data.source.feed(rest, job.batch_size, seed=job.order_seed, epoch=member.epoch)
        self._order, self._place = None, -1
        return self._feed

    def went(self, member: Member) -> None:
        """All that was taken has been used: the iterator is where the member is."""
        if member.place == member.num_batches:
            self._feed = iter(())  # the epoch's order need not stay on the device while others have their turn
        else:
            self._order, self._place = member.order, member.place
