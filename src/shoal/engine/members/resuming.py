"""Members of a run that is resumed, or that began in another process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shoal.engine.members.member import Member
from shoal.jobs.early_stopping import Monitor


def as_trained(tiers: Mapping[int, str], members: Sequence[Member]) -> dict[int, str]:
    """The forms that members on a GPU have trained in: what was written down of those that have, or else the tier that
    is in their checkpoints. Folders of earlier versions have tiers written down that were planned and not taken."""
    known = {member.index: (member.tier, tiers.get(member.index, "")) for member in members if member.batches}
    return {index: form if form.partition(" ")[0] == tier else tier for index, (tier, form) in known.items() if tier}


def beginning(member: Member) -> None:
    """To where it was when it was built, for a member that has trained in another process only."""
    member.step = member.epoch = member.batches = member.place = member.first_step = 0
    member.history, member.losses, member.logs = [], [], {}
    member.seconds, member.monitor = 0.0, Monitor.of(member.job)
