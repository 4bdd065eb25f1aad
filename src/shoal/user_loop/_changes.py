"""In a user's own loop anything may change between two steps: before each, what the members' steps read is compared."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.engine.members.member import Member
from shoal.engine.proof.group import Group, group
from shoal.engine.python_state.places import say
from shoal.engine.python_state.watch import Watch
from shoal.engine.recipes.recipe import TraceCache
from shoal.engine.tiers.serial import SerialUnit
from shoal.engine.tiers.stacked.given_batches import GivenBatchesStack

MOST_CHANGES, FEW_STEPS = 8, 8
"""After so many changes, with fewer steps from one to the next, recording each time costs more than it gains."""


class LoopChanges:
    """What the steps of a pack's members read besides their weights and batches."""

    def __init__(self, trace_cache: TraceCache) -> None:
        self._trace_cache = trace_cache
        self._watch = Watch()
        self._changes: dict[int, list[int]] = {}
        """The steps that a member had taken when what its step reads changed."""
        self._often: dict[int, str] = {}
        """Members for whom it changes too often, and what it is."""

    def group(self, members: Sequence[Member]) -> list[Group]:
        """Members by what they compute now; from here on it is watched what their steps read."""
        steady = [member for member in members if member.index not in self._often]
        for member in steady:
            job = member.job
            self._watch.add(member.index, {"step": job.step, "loss": job.loss}, member.model, private=True)
        groups = group(steady, self._trace_cache)
        self._watch.drop(member.index for own in groups if not own.stackable for member in own.members)
        changing = [member for member in members if member.index in self._often]
        return groups + [Group([member], reason=self._often[member.index]) for member in changing]

    def drop(self, *ids: int) -> None:
        """Members that have left."""
        self._watch.drop(ids)

    def stale(self, units: Sequence[GivenBatchesStack | SerialUnit]) -> list[GivenBatchesStack]:
        """Stacks whose members' steps would do something else now than they were recorded to do."""
        changes = self._watch.changes()
        if not changes:
            return []
        found = [u for u in units if isinstance(u, GivenBatchesStack) and any(m.index in changes for m in u.members)]
        for member in [member for unit in found for member in unit.members if member.index in changes]:
            self._trace_cache.forget(member.model)
            noted = self._changes.setdefault(member.index, [])
            noted.append(member.step)
            if len(noted) >= MOST_CHANGES and noted[-1] - noted[-MOST_CHANGES] < FEW_STEPS * MOST_CHANGES:
                self._often[member.index] = f"what its step reads changes too often ({say(changes[member.index])})"
        self.drop(*(member.index for unit in found for member in unit.members))
        return found
