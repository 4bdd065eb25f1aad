"""Give members new recipes and units after Python values that their steps read have changed.

Between epochs anything may change what a step reads: callbacks, per-epoch schedules, commands to a live run. If it
changes during an epoch, a recorded step would not see it, so such a member trains by itself, unstacked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from shoal.engine.python_state.places import path_text
from shoal.engine.python_state.watch import ChangeLog
from shoal.errors import warn

if TYPE_CHECKING:
    from shoal.engine.members.member import Member
    from shoal.engine.runtime.planning_context import PlanningContext
    from shoal.engine.runtime.unit_runner import UnitRunner


class Renewals:
    """Makes sure that units compute what their members' steps would compute now."""

    def __init__(self, planning: PlanningContext) -> None:
        self.planning = planning
        self.due = True
        """Whether users' code has run since the last check."""
        self._unstacked: dict[int, str] = {}
        """Members that can no longer be stacked, and why."""
        self._log = ChangeLog()

    def look_within(self, runners: Sequence[UnitRunner]) -> None:
        """Check after batches, and before any epoch is closed, whether what steps read has changed in the meantime."""
        ending = any(m.place == m.num_batches or not m.batches_left for runner in runners for m in runner.members)
        changes = self.planning.watch.changes() if ending and not self.due else {}
        for runner in runners:
            for member in runner.members:
                if member.index in changes and member.index not in self._unstacked:
                    where = path_text(changes[member.index])
                    self._unstacked[member.index] = f"what its step reads changes during an epoch ({where})"
                    warn(
                        f"{member.name}: {where} changed during an epoch, which a stacked step does not see; from here "
                        "on it runs unstacked. Change it between epochs, or inside the step"
                    )
        self.due = self.due or ending

    def take_out(self, runners: list[UnitRunner], waiting: Iterable[Member]) -> list[Member]:
        """Remove members whose steps have changed from their units. They have new recipes."""
        changed = self._renew(runners, waiting)
        members: list[Member] = []
        for runner in runners if changed else ():
            slots = [slot for slot, member in enumerate(runner.members) if member.index in changed]
            members += runner.eject(slots) if slots else []
        if members:
            runners[:] = [runner for runner in runners if runner.members]
            self.planning.executor.forget()
        return members

    def _renew(self, runners: Sequence[UnitRunner], waiting: Iterable[Member]) -> set[int]:
        """Make new recipes if they are due, and return the members whose steps have changed."""
        if not self.due or not all(runner.unit.at_step_boundary for runner in runners):
            return set()
        self.due = False
        alive = {member.index: member for runner in runners for member in runner.members}
        alive |= {member.index: member for member in waiting}
        self.planning.watch.keep(alive.keys())
        changes = self.planning.watch.changes()
        if not changes:
            return set()
        for runner in runners:
            slots = [slot for slot, member in enumerate(runner.members) if member.index in changes]
            if slots:
                runner.unit.write_back(slots)
                runner.unit.forget_evaluations()
        changed = self.planning.renew([alive[index] for index in changes], self._unstacked)
        for index in changed:
            reason = self._log.note(index, alive[index].batches, changes[index])
            if reason is not None:
                self._unstacked.setdefault(index, reason)  # takes effect at the next change
        return changed
