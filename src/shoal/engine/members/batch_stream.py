"""A member's batches as an iterator that stays open while the member continues where it stopped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from shoal.data.loader import LoaderSource, Reader, cloned
from shoal.engine.members.member import Member


class Stream:
    """The rest of one member's epoch, read ahead where the source does that; opened anew where the member is not."""

    def __init__(self) -> None:
        self._order: Tensor | None = None
        self._place = -1
        self._feed: Iterator[Any] = iter(())

    def at(self, member: Member) -> Iterator[Any]:
        """The member's batches from its place on. Until `went` is called, the iterator counts as lost."""
        self.open(member)
        self._order, self._place = None, -1
        return self._feed

    def open(self, member: Member) -> None:
        """Be ready to read: those that open an epoch of a DataLoader before any of them reads have it read once."""
        if self._order is not member.order or self._place != member.place:
            job, order, source = member.job, member.order, member.data.source
            assert order is not None, "the member has no rows; deal them first"
            if isinstance(source, LoaderSource):
                self._feed = source.read(job.order_seed, member.epoch, member.place)
            else:
                rest = order[member.place * job.batch_size :]
                self._feed = source.feed(rest, job.batch_size, seed=job.order_seed, epoch=member.epoch)
            self._order, self._place = member.order, member.place

    def went(self, member: Member) -> None:
        """All that was taken has been used: the iterator is where the member is."""
        if member.place == member.num_batches:
            self._feed = iter(())  # the epoch's order need not stay on the device while others have their turn
        else:
            self._order, self._place = member.order, member.place


def another(feed: Iterator[Any], members: Sequence[Member]) -> bool:
    """Whether there is another batch for members that read one feed together and are at its place.

    An epoch of a DataLoader ends when it ends, so it is read up to one batch beyond the group of this one: a group that
    the end cuts short has a smaller number to divide by.
    """
    if not isinstance(feed, Reader):
        return True
    k = members[0].job.accumulate
    wanted = k - feed.place % k + 1
    there = feed.count(wanted)
    if there < wanted:
        for member in members:
            member.epoch_length = feed.place + there
    return there > 0


def pace(member: Member) -> tuple[int, int] | None:
    """Equal for members that may be in one unit, as far as their places in their data go: None where any may. Those
    that accumulate, or read a stream, are at the same batch of an epoch; those that read a DataLoader, of one epoch."""
    if member.batched:
        return member.place, member.epoch
    return (member.place, -1) if member.job.accumulate > 1 or member.data.source.streamed else None


def own_batch(feed: Iterator[Any]) -> Any:
    """The next batch, for one member that may write to it."""
    return cloned(next(feed)) if isinstance(feed, Reader) else next(feed)
