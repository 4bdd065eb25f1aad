"""A member's batches as an iterator that stays open while the member continues where it stopped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from shoal.data.loader import LoaderSource, Reader
from shoal.data.source import cloned
from shoal.engine.members.member import Member


class Stream:
    """The rest of one member's epoch as an iterator. It is reopened if the member is at another position."""

    def __init__(self) -> None:
        self._order: Tensor | None = None
        self._place = -1
        self._feed: Iterator[Any] = iter(())
        self._next: Reader | None = None
        """A reader of the next epoch, if that began before the last one had been read; held so that it stays open."""

    def at(self, member: Member) -> Iterator[Any]:
        """Return the member's batches from its position on. The iterator's position is unknown until `note_position` is
        called."""
        self.open(member)
        self._order, self._place = None, -1
        return self._feed

    def open(self, member: Member) -> None:
        """Prepare to read. An epoch of a DataLoader is read once for all members that open it before one of them
        reads."""
        if self._order is not member.order or self._place != member.place:
            job, order, source = member.job, member.order, member.data.source
            assert order is not None, "the member has no rows; call assign_rows first"
            if isinstance(source, LoaderSource):
                goes_on = member.batches_to_stop > member.num_batches - member.place
                self._feed = source.read(job.order_seed, member.epoch, member.place, goes_on=goes_on)
                self._next = None
            else:
                rest = order[member.place * job.batch_size :]
                self._feed = source.feed(rest, job.batch_size, seed=job.order_seed, epoch=member.epoch)
            self._order, self._place = member.order, member.place

    def note_position(self, member: Member) -> None:
        """Note that all batches that were read have been used, so that the iterator is at the member's position."""
        if member.place == member.num_batches:
            self._next = self._feed.next if isinstance(self._feed, Reader) else None
            self._feed = iter(())  # frees the epoch's order on the device while other members run
        else:
            self._order, self._place = member.order, member.place


def has_another_batch(feed: Iterator[Any], members: Sequence[Member]) -> bool:
    """Return whether there is another batch for members that read one feed together.

    The length of a DataLoader's epoch is not known in advance, so it is read up to one batch beyond the current
    accumulation group: a group that the end cuts short is divided by a smaller number.
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
    """Return a key that is equal for members whose positions in their data allow them to be in one unit; None if any
    position does.

    Members that accumulate gradients or read a stream must be at the same batch of an epoch; with a DataLoader also in
    the same epoch.
    """
    if member.batched:
        return member.place, member.epoch
    return (member.place, -1) if member.job.accumulate > 1 or member.data.source.streamed else None


def own_batch(feed: Iterator[Any]) -> Any:
    """Return the next batch, as a copy that one member may write to."""
    return cloned(next(feed)) if isinstance(feed, Reader) else next(feed)
