"""A stack that trains on the batches it is given, one step at a time: members join and leave between steps."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from shoal.engine.members.member import draws
from shoal.engine.members.step import run_step
from shoal.engine.proof.cases import Disproved
from shoal.engine.proof.prove import OTHER_WEIGHTS, prove_training
from shoal.engine.recipes.program import Program
from shoal.engine.recipes.recipe import Recipe
from shoal.engine.rules.op_context import NotStackable
from shoal.engine.tiers.serial import SerialUnit
from shoal.engine.tiers.stacked.unit import StackedUnit
from shoal.engine.tracing.trace import autocast

LOOK_AHEAD = 32
"""Steps whose learning rates are computed at once, if schedules allow it."""


class GivenBatchesStack(StackedUnit):
    """Members of one recipe. Batches are tensors in the order of the trace, shared or with the member axis first."""

    def _set_up(self) -> None:
        super()._set_up()
        self._programs: dict[Hashable, Program] = {}
        self._part_programs: dict[tuple[int, ...], dict[Hashable, Program]] = {}
        self._ahead = 0

    def key(self, batch: Any) -> Hashable:
        """Return the key that a new member's recipe for this batch must have to join."""
        first = self.stack.recipes[0]
        return Recipe(first.member, {1: self.trace_cache.step_on(first.member, batch)}, first.optimizer).key

    def stacked_state(self) -> dict[str, Tensor]:
        """Return a copy of the members' weights and buffers by name, [M, ...]."""
        state = zip(self.stack.names, self.stack.state, strict=True)
        return {name: tensor.detach()[: len(self.members)].clone() for name, tensor in state}

    def knows(self, key: Hashable) -> bool:
        """Return whether the stack is prepared for batches of this shape."""
        return key in self._programs

    def learn(self, key: Hashable, batches: Sequence[Any], stacked: bool) -> None:
        """Prepare for batches of a shape, given one for each member.

        Raises:
            Untraceable, NotStackable: With the reason why these members cannot be stacked on such a batch.
        """
        if self._programs and any(trace.caches for recipe in self.stack.recipes for trace in recipe.steps.values()):
            self.write_back()  # the step may read what its first call has left in the model
        traces = [self.trace_cache.step_on(member, batch) for member, batch in zip(self.members, batches, strict=True)]
        count = traces[0].batch_spec.num_leaves
        rows = [traces[slot] for slot in self.stack.rows]
        program = Program(rows, device=self.stack.device, stacked_batch=[stacked] * count)
        recipes = []
        for recipe, batch, trace in zip(self.stack.recipes, batches, traces, strict=True):
            recipe.member.data.source.batch = batch  # type: ignore[attr-defined]  # its source has a fixed batch
            recipes.append(Recipe(recipe.member, {1: trace}, recipe.optimizer))
        for reason in prove_training(recipes, self.trace_cache).values():
            raise Disproved(reason)
        if any(trace.trained != self.stack.trained for trace in traces):
            raise NotStackable(OTHER_WEIGHTS)
        self._programs[key] = program

    def step(self, key: Hashable, leaves: list[Tensor]) -> tuple[Tensor, dict[int, Exception]]:
        """Take one step of every member, and return their losses [M] and the exceptions of optimizers or schedules by
        member index.

        If the step itself raises, nothing has changed, including random streams.
        """
        program, optimizer = self._programs[key], self.stack.optimizer
        if not self._ahead:
            optimizer.look_ahead(LOOK_AHEAD)
            self._ahead = LOOK_AHEAD
        self._losses, self._logs = [], []
        rng_states = [generator.get_state() for generator in self._generators] if program.draws else []
        try:
            self.advance(program, leaves)
        except Exception:
            self._noise = None
            for generator, state in zip(self._generators, rng_states, strict=False):
                generator.set_state(state)
            raise
        self._ahead -= 1
        for slot, member in enumerate(self.members):
            member.step += slot not in self._failed
        failures: dict[int, Exception] = {}
        if self._failed or optimizer.schedule_failed:
            self._ahead = 0
            failures = {self.members[slot].index: error for slot, error in self.failures().items()}
        return self._losses[-1][: len(self.members)], failures

    def raising(self, batches: Sequence[Any]) -> dict[int, Exception]:
        """Return what members' own steps raise on their batches, by slot."""
        errors: dict[int, Exception] = {}
        self.write_back()
        for slot, (member, batch) in enumerate(zip(self.members, batches, strict=True)):
            with draws(member, keep=False), torch.no_grad(), autocast(member.job.precision, member.device):
                try:
                    run_step(member.job, member.model, batch)
                except Exception as error:
                    errors[slot] = error
        self.write_back(list(errors))  # restores buffers that the failed step may have changed
        return errors

    def part(self, slots: Sequence[int]) -> Self:
        """Return some of the members as a separate stack for one step; `take` copies its results back."""
        part = self.keep(list(slots))
        part._programs = self._part_programs.setdefault(tuple(slots), {})
        self._ahead = 0
        return part

    @torch.no_grad()
    def load(self, slot: int, step: int | None) -> None:
        """Load a member's current weights, buffers and optimizer state, without a new trace or stack.

        Args:
            step: Continue its schedule as if so many steps had been taken; None: from its current state.
        """
        stack, scale = self.stack, self.members[slot].scaler_state
        self.adopt_state([slot])
        for row in [row for row, owner in enumerate(stack.rows) if owner == slot]:
            stack.active[row] = True
            if stack.scaler is not None and scale is not None:
                stack.scaler.load_state_dict(row, scale)
        stack.optimizer.load(slot, step)
        self._all_active = bool(stack.active.all())
        self._ahead = 0

    def dissolve(self) -> list[SerialUnit]:
        """Return a unit for each member, which trains by itself from here on."""
        self.write_back()
        return [SerialUnit(member) for member in self.members]
