"""Decides when members are saved: running ones at intervals, those that leave or pause at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from shoal.storage.lost_state import watch_state

if TYPE_CHECKING:
    from shoal.engine.members.member import Member
    from shoal.engine.recipes.recipe import Recipe
    from shoal.engine.runtime.unit_runner import UnitRunner
    from shoal.storage.run_folder import RunFolder


class Checkpointing:
    """Saves a run's members in its folder; without a folder it does nothing."""

    def __init__(self, folder: RunFolder | None, every: float, members: Iterable[Member]) -> None:
        """Save running members every `every` seconds. `members` are those that the folder knows."""
        self._folder, self._every = folder, every
        self._known = {member.index for member in members}
        self._last = time.monotonic()
        self._left: list[Member] = []

    def add(self, members: Sequence[Member], recipes: Mapping[int, Recipe]) -> None:
        """Add members that joined while the run was in progress to the folder."""
        if self._folder is not None and self._folder.grows:
            watch_state(members, recipes)
            self._folder.add(members)
            self._known |= {member.index for member in members}

    def know(self, member: Member) -> None:
        """Note that the folder has this member, which joined while the run was in progress."""
        self._known.add(member.index)

    def note(self, member: Member) -> None:
        """Save this member, which has left its unit and was written back, at the next opportunity."""
        self._left.append(member)

    def forget(self, member: Member) -> None:
        """Do not save an earlier member that had this member's index."""
        self._left = [other for other in self._left if other.index != member.index]

    def save(self, runners: Iterable[UnitRunner], report: Callable[..., None], *, now: bool = False) -> None:
        """Save members that have left, and all running ones if it is time, and report it then."""
        if self._folder is None:
            return
        start = time.monotonic()
        due = now or (start - self._last >= self._every and not self._folder.busy)
        members, self._left = self._left, []
        members = [m for m in members if m.status == "running" or not self._folder.passing]
        if due:
            self._last = start
            for runner in runners:
                if runner.unit.at_step_boundary:
                    runner.unit.write_back()
                    members += runner.members
        members = [member for member in members if member.index in self._known]
        if members:
            self._folder.save_many(members)
        if due:
            report("checkpoint", members=len(members), seconds=time.monotonic() - start)
