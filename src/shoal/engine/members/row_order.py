"""The order of every member's rows in each epoch. Members with equal orders hold the same tensor, so that sharing can
be checked with `is`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from shoal.engine.members.member import Member


def assign_rows(members: Sequence[Member]) -> None:
    """Give members without rows those of the epoch that they are in or about to begin."""
    wanting = [member for member in members if member.order is None]
    known = [member for member in wanting if member.ahead is not None]
    for member in known:
        assert member.ahead is not None
        (member.order, member.order_state), member.ahead = member.ahead, None
    drawn = [member for member in wanting if member.order is None]
    for member, (order, state) in zip(drawn, _draw(drawn), strict=True):
        member.order, member.order_state = order, state


def look_ahead(members: Sequence[Member]) -> None:
    """Draw the next epoch's rows in advance, while the device is busy and the host is not."""
    wanting = [member for member in members if member.ahead is None and not member.earlier]
    for member, drawn in zip(wanting, _draw(wanting), strict=True):
        member.ahead = drawn


def _draw(members: Sequence[Member]) -> list[tuple[Tensor, Tensor]]:
    """Return each member's rows for its next epoch, already cut for drop_last, and its generator's state before
    them."""
    orders: list[tuple[Tensor, Tensor]] = []
    drawn: dict[Hashable, tuple[Tensor, Tensor]] = {}
    """Orders, and the generator's states after them, by its state before and the number of rows."""
    cut: dict[Hashable, list[tuple[Member, Tensor]]] = {}
    """Members and their rows, by their order and what is quickly compared of their data."""
    for member in members:
        before = member.orders.get_state()
        if member.batched:  # its data defines the order
            orders.append((torch.empty(0, dtype=torch.int64), before))
            continue
        start, count = before.numpy().tobytes() if member.job.shuffle else b"", len(member.data)
        if (start, count) not in drawn:
            order = torch.randperm(count, generator=member.orders) if member.job.shuffle else torch.arange(count)
            drawn[start, count] = order, member.orders.get_state()
        order, after = drawn[start, count]
        if member.job.shuffle:
            member.orders.set_state(after)
        alike = cut.setdefault((start, member.data.key, _stretch(member)), [])
        rows = next((rows for known, rows in alike if known.data.same(member.data)), None)
        if rows is None:
            first, last = _stretch(member)
            rows = member.data.rows(order[first:last])
            alike.append((member, rows))
        orders.append((rows, before))
    return orders


def _stretch(member: Member) -> tuple[int, int]:
    """Return the part of an epoch's order that a member trains on: all, or what was left when its batch size
    changed."""
    return member.skipped, member.skipped + member.num_rows
