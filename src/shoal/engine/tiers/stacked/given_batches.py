"""A stack that trains on the batches it is handed, a step at a time; members join and leave between steps."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.engine.members.member import Member, draws, run_step
from shoal.engine.proof.cases import Disproved
from shoal.engine.proof.prove import prove_training
from shoal.engine.recipes.program import Program
from shoal.engine.recipes.recipe import Recipe, TraceCache
from shoal.engine.tiers.serial import SerialUnit
from shoal.engine.tiers.stacked._loading import load_slot
from shoal.engine.tiers.stacked.unit import StackedUnit
from shoal.engine.tracing.trace import autocast

LOOK_AHEAD = 32
"""Steps whose learning rates are worked out at once, where schedules allow it."""


class GivenBatchesStack:
    """Members of one recipe. Batches are leaves in the order of the trace, shared or with the member axis first."""

    def __init__(self, recipes: Sequence[Recipe], trace_cache: TraceCache) -> None:
        self.trace_cache = trace_cache
        self.unit: StackedUnit = StackedUnit(recipes, trace_cache)
        self._settle()

    @classmethod
    def around(cls, unit: StackedUnit, trace_cache: TraceCache) -> GivenBatchesStack:
        """The stack of a unit that exists already."""
        stack = object.__new__(cls)
        stack.trace_cache, stack.unit = trace_cache, unit
        stack._settle()
        return stack

    def _settle(self) -> None:
        self._programs: dict[Hashable, Program] = {}
        self._some: dict[tuple[int, ...], dict[Hashable, Program]] = {}
        self._ahead = 0

    @property
    def members(self) -> list[Member]:
        return self.unit.members

    @property
    def rows(self) -> list[int]:
        """For every row of the stack, whose it is: more rows than members where the stack is padded."""
        return self.unit.stack.rows

    def key(self, batch: Any) -> Hashable:
        """What a newcomer's recipe for this batch must have as its key to join."""
        first = self.unit.stack.recipes[0]
        return Recipe(first.member, {1: self.trace_cache.step_on(first.member, batch)}, first.optimizer).key

    def knows(self, key: Hashable) -> bool:
        """Whether it is ready for batches of this shape."""
        return key in self._programs

    def learn(self, key: Hashable, batches: Sequence[Any], stacked: bool) -> None:
        """Make ready for batches of a shape, given one for each member.

        Raises:
            Untraceable, NotStackable: with the reason why these members are no stack on such a batch.
        """
        traces = [self.trace_cache.step_on(member, batch) for member, batch in zip(self.members, batches, strict=True)]
        count = traces[0].batch_spec.num_leaves
        device = self.unit.stack.device
        program = Program([traces[r] for r in self.rows], device=device, stacked_batch=[stacked] * count)
        recipes = []
        for recipe, batch, trace in zip(self.unit.stack.recipes, batches, traces, strict=True):
            recipe.member.data.source.batch = batch  # type: ignore[attr-defined]  # what a `Hand` hands out
            recipes.append(Recipe(recipe.member, {1: trace}, recipe.optimizer))
        for reason in prove_training(recipes, self.trace_cache).values():
            raise Disproved(reason)
        self._programs[key] = program

    def step(self, key: Hashable, leaves: list[Tensor]) -> tuple[list[tuple[list[int], Tensor]], dict[int, Exception]]:
        """One step of every member: their ids with their losses [M], and what optimizers or schedules of some raised.

        When the step itself raises, nothing has changed, random streams included.
        """
        unit, program = self.unit, self._programs[key]
        if not self._ahead:
            unit.rates_of.settle()
            unit.rates_of.begin(LOOK_AHEAD)
            self._ahead = LOOK_AHEAD
        unit._losses, unit._logs = [], []
        before = [generator.get_state() for generator in unit._generators] if program.draws else []
        try:
            unit.advance(program, leaves)
        except Exception:
            unit._noise = None
            for generator, state in zip(unit._generators, before, strict=False):
                generator.set_state(state)
            raise
        self._ahead -= 1
        for slot, member in enumerate(unit.members):
            member.step += slot not in unit._undone
        ids = [member.index for member in unit.members]
        return [(ids, unit._losses[-1][: len(ids)])], self._failures()

    def _failures(self) -> dict[int, Exception]:
        unit = self.unit
        if not unit._undone and not unit.rates_of.failed:
            return {}
        self._ahead = 0
        return {unit.members[slot].index: error for slot, error in unit.failures().items()}

    def raising(self, batches: Sequence[Any]) -> dict[int, Exception]:
        """Whose own step raises on its batch, and what."""
        found: dict[int, Exception] = {}
        self.unit.write_back()
        for slot, (member, batch) in enumerate(zip(self.members, batches, strict=True)):
            with draws(member, keep=False), torch.no_grad(), autocast(member.job.precision, member.device):
                try:
                    run_step(member.job, member.model, batch)
                except Exception as error:
                    found[slot] = error
        self.unit.write_back(list(found))  # buffers that the failed step may have moved
        return found

    def part(self, slots: Sequence[int]) -> GivenBatchesStack:
        """Some of the members as a stack of their own, for a step; `take` brings back what it did."""
        unit = self.unit.keep(list(slots))
        assert isinstance(unit, StackedUnit)
        found = GivenBatchesStack.around(unit, self.trace_cache)
        found._programs = self._some.setdefault(tuple(slots), {})
        self._ahead = 0
        return found

    def take(self, slots: Sequence[int], part: GivenBatchesStack) -> None:
        """Be, for these members, where a part of this stack is."""
        self.unit._take(list(slots), part.unit)

    def load(self, slot: int, step: int | None) -> None:
        """Take a member's own weights and optimizer state as they are now."""
        load_slot(self.unit, slot, step)
        self._ahead = 0

    def join(self, recipes: Sequence[Recipe]) -> None:
        """Take these members in; the others go on with the bits they have."""
        grown = self.unit.join(recipes)
        self.unit = grown
        self._settle()

    def leave(self, slots: Sequence[int]) -> None:
        """Let these members go, each with its own weights and optimizer state; at least one stays."""
        self.unit.write_back(list(slots))
        kept = self.unit.keep([slot for slot in range(len(self.members)) if slot not in slots])
        assert isinstance(kept, StackedUnit)
        self.unit = kept
        self._settle()

    def dissolve(self) -> list[SerialUnit]:
        """Every member by itself from here on."""
        self.unit.write_back()
        return [self._alone(slot) for slot in range(len(self.members))]

    def _alone(self, slot: int) -> SerialUnit:
        return SerialUnit(self.members[slot])

    def outputs(self, inputs: tuple[Any, ...]) -> Any:
        """Eval-mode outputs of all members for the same inputs, members first."""
        found = self.unit.outputs(inputs)
        return pytree.tree_map(lambda leaf: leaf[: len(self.members)], found) if not isinstance(found, list) else found
