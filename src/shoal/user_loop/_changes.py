"""Detect changes between two steps of a user's own loop, by comparing what the members' steps read."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.engine.members.member import Member
from shoal.engine.proof.group import Group, group
from shoal.engine.python_state.watch import ChangeLog, Watch
from shoal.engine.recipes.recipe import TraceCache
from shoal.engine.tiers.stacked.given_batches import GivenBatchesStack
from shoal.user_loop._batches import LoopUnit


class LoopChanges:
    """Watches what the steps of a pack's members read besides their weights and batches."""

    def __init__(self, trace_cache: TraceCache) -> None:
        self._trace_cache = trace_cache
        self._watch = Watch()
        self._log = ChangeLog()
        self._unstacked: dict[int, str] = {}
        """Members that are not stacked because something they read changes too often, with the reason."""

    def group(self, members: Sequence[Member]) -> list[Group]:
        """Group members by their current computation, and start watching what their steps read."""
        steady = [member for member in members if member.index not in self._unstacked]
        for member in steady:
            job = member.job
            self._watch.add(member.index, {"step": job.step, "loss": job.loss}, member.model, private=True)
        groups = group(steady, self._trace_cache)
        self._watch.drop(member.index for each in groups if not each.stackable for member in each.members)
        changing = [member for member in members if member.index in self._unstacked]
        return groups + [Group([member], reason=self._unstacked[member.index]) for member in changing]

    def drop(self, *ids: int) -> None:
        """Stop watching members that have left."""
        self._watch.drop(ids)

    def stale(self, units: Sequence[LoopUnit]) -> list[GivenBatchesStack]:
        """Return the stacks whose members' steps would now differ from what was traced."""
        changes = self._watch.changes()
        if not changes:
            return []
        stale = [u for u in units if isinstance(u, GivenBatchesStack) and any(m.index in changes for m in u.members)]
        for member in [member for unit in stale for member in unit.members if member.index in changes]:
            self._trace_cache.forget(member.model)
            reason = self._log.note(member.index, member.step, changes[member.index])
            if reason is not None:
                self._unstacked[member.index] = reason
        self.drop(*(member.index for unit in stale for member in unit.members))
        return stale
