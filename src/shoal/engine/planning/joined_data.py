"""Join the data sets of members on a GPU, since a captured step reads one."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.data.joining import joined_views
from shoal.engine.members.member import Member
from shoal.engine.planning.memory import free_bytes


def join_data(members: Sequence[Member]) -> None:
    """Join data sets of the same form, if half of the free memory of their device is enough."""
    if not members:
        return
    most = free_bytes(members[0].device) // 2
    views = joined_views([member.data for member in members], [member.val for member in members], most)
    for member, data, val in zip(members, views, views[len(members) :], strict=False):
        assert data is not None
        member.data, member.val = data, val
