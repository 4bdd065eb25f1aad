"""When members are saved: all that run now and then, those that leave or pause at once."""

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
    """Saves a run's members in its folder; without one it does nothing."""

    def __init__(self, folder: RunFolder | None, every: float, members: Iterable[Member]) -> None:
        """`every`: seconds. `members`: those that the folder knows."""
        self._folder, self._every = folder, every
        self._known = {member.index for member in members}
        self._last = time.monotonic()
        self._left: list[Member] = []

    def add(self, members: Sequence[Member], recipes: Mapping[int, Recipe]) -> None:
        """These came while the run was under way."""
        if self._folder is not None and self._folder.grows:
            watch_state(members, recipes)
            self._folder.add(members)
            self._known |= {member.index for member in members}

    def know(self, member: Member) -> None:
        """It came while the run was under way, and the folder has it."""
        self._known.add(member.index)

    def note(self, member: Member) -> None:
        """It has left its unit, written back, and is saved at the next opportunity."""
        self._left.append(member)

    def forget(self, member: Member) -> None:
        """Do not save what had this member's place before it."""
        self._left = [other for other in self._left if other.index != member.index]

    def save(self, runners: Iterable[UnitRunner], tell: Callable[[int, float], None], *, now: bool = False) -> None:
        """Save those that have left, and when it is time all that run; `tell`: how many, and in what time."""
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
            tell(len(members), time.monotonic() - start)
