"""A part of a unit that is one stack: all of its members, some of them, or one alone without a member axis."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from shoal.data.source import TensorSource
from shoal.pack.captured.compile import Executable, executable, warm_up
from shoal.pack.captured.step import Inputs, Step, stack_tensors
from shoal.pack.members import Member
from shoal.pack.recipe import Kitchen, Recipe
from shoal.pack.stacked.program import Program
from shoal.pack.stacked.stack import Stack, StackedOptimizer
from shoal.pack.stacked.unit import StackedUnit
from shoal.randomness import signed

Cache = dict[Hashable, Executable]
"""Compiled steps by what they compute and its shape; members alike share one."""


class Chunk:
    """Members in one stack, with static inputs: every address stays the same from the first step to the last."""

    def __init__(
        self,
        stack: Stack,
        kitchen: Kitchen,
        cache: Cache,
        *,
        solo: bool,
        shared: bool,
        compiled: bool,
        counts: Sequence[int],
    ) -> None:
        self.stack, self.kitchen, self.cache = stack, kitchen, cache
        self.solo, self.shared, self.compiled = solo, shared, compiled
        self.alive = list(range(len(stack.members)))
        """Rows of the members still in training."""
        member = stack.members[0]
        size, n, device = len(stack.rows), member.num_rows, stack.device
        source = member.data.source
        assert isinstance(source, TensorSource) and isinstance(stack.optimizer, StackedOptimizer)
        batches = member.num_batches
        table = None
        if any(m.job.schedule is not None and m.job.schedule_every == "step" for m in stack.members):
            table = torch.zeros(batches + 1, *stack.optimizer.columns.packed.shape, dtype=torch.float64, device=device)
        self.inputs = Inputs(
            data=source.leaves,
            orders=torch.zeros(n, dtype=torch.int64, device=device)
            if shared
            else torch.zeros(size, n, dtype=torch.int64, device=device),
            place=torch.zeros((), dtype=torch.int64, device=device),
            count=torch.tensor([counts[row] for row in stack.rows], dtype=torch.int64, device=device),
            seeds=torch.tensor(
                [signed(stack.members[row].job.seed) for row in stack.rows], dtype=torch.int64, device=device
            ),
            losses=torch.zeros(batches, size, dtype=torch.float64, device=device),
            table=table,
        )
        self.view = StackedUnit.around(stack, kitchen)
        """For what is not a training step: validation, schedules, writing back."""
        self._steps: dict[int, Step] = {}
        self._full: Executable | None = None

    @classmethod
    def build(
        cls, recipes: Sequence[Recipe], kitchen: Kitchen, cache: Cache, *, solo: bool, shared: bool, compiled: bool
    ) -> Chunk:
        """A fresh chunk; its members' models move to the host, since the stack has their weights now."""
        stack = Stack(recipes, size=len(recipes), channels_last=solo)
        for recipe in recipes:
            recipe.member.model.to("cpu")
        counts = [recipe.member.batches for recipe in recipes]
        return cls(stack, kitchen, cache, solo=solo, shared=shared, compiled=compiled, counts=counts)

    @property
    def members(self) -> list[Member]:
        return [self.stack.members[row] for row in self.alive]

    def begin_epoch(self, orders_MN: Tensor) -> None:
        """Orders of the living members; rows nobody looks at go on with the first one's."""
        assert self.inputs.orders is not None
        if self.shared:
            self.inputs.orders.copy_(orders_MN[0])
        else:
            place = {row: i for i, row in enumerate(self.alive)}
            self.inputs.orders.copy_(orders_MN[[place.get(row, 0) for row in range(len(self.stack.rows))]])
        self.inputs.place.zero_()
        self.view.rates_of.settle()
        if self.inputs.table is not None:
            self.view.rates_of.begin(self.stack.members[0].num_batches)
            table = self.view.rates_of.table
            assert table is not None, "schedules that cannot be foreseen are not captured"
            self.inputs.table.copy_(table.permute(3, 0, 1, 2))

    def step(self, rows: int) -> Step:
        """The step on batches of so many rows."""
        if rows not in self._steps:
            recipes = self.stack.recipes
            traces = [recipes[row].steps[rows] for row in self.stack.rows]
            flags = [not self.shared] * traces[0].batch_spec.num_leaves
            program = Program(traces, device=self.stack.device, stacked_batch=flags, solo=self.solo)
            self._steps[rows] = Step(self.stack, program, rows=rows, batch_size=self.stack.members[0].job.batch_size)
        return self._steps[rows]

    def tensors(self) -> list[Tensor]:
        return [*stack_tensors(self.stack), *self.inputs.tensors()]

    def prepare(self, rows: int) -> float:
        """Make the full batch's step ready to be captured; seconds spent compiling now."""
        step = self.step(rows)
        traces = tuple(id(self.stack.recipes[row].steps[rows]) for row in self.stack.rows)
        optimizer = self.stack.optimizer
        assert isinstance(optimizer, StackedOptimizer)
        rules = tuple(repr(rule) for rule, _ in optimizer.groups)
        extras = (self.stack.max_norm is None, self.inputs.table is None)
        key = (traces, rules, extras, self.solo, self.shared, self.compiled, rows)
        new = key not in self.cache
        if new:
            self.cache[key] = executable(step, self.inputs, compiled=self.compiled)
            warm_up(self.cache[key], step, self.inputs)
        self._full = self.cache[key]
        return self._full.seconds if new else 0.0

    def enqueue(self) -> None:
        """One step on a full batch, onto the current stream."""
        assert self._full is not None
        self._full.run(self.tensors())

    def short(self, rows: int) -> None:
        """One step on a batch of another size, operator by operator."""
        self.step(rows).run(self.stack, self.inputs)

    def advanced(self, steps: int) -> None:
        """Note on the host that so many steps were taken on the device."""
        for member in self.members:
            member.batches += steps
        rates = self.view.rates_of
        if self.inputs.table is not None:
            rates.skip(steps)

    def keep(self, rows: list[int]) -> Chunk:
        """The chunk with only these rows alive. It shrinks, and is made ready anew, once half of it is dead."""
        if len(rows) > len(self.stack.rows) // 2 or len(self.stack.rows) == 1:
            self.alive = rows
            return self
        counts = self.inputs.count.tolist()
        self.view.rates_of.settle()
        stack = self.stack.keep(rows, len(rows))
        kept = Chunk(
            stack,
            self.kitchen,
            self.cache,
            solo=self.solo,
            shared=self.shared,
            compiled=self.compiled,
            counts=[counts[row] for row in rows],
        )
        assert kept.inputs.orders is not None and self.inputs.orders is not None
        kept.inputs.orders.copy_(self.inputs.orders if self.shared else self.inputs.orders[rows])
        kept.inputs.place.copy_(self.inputs.place)
        kept.inputs.losses.copy_(self.inputs.losses[:, rows])
        if kept.inputs.table is not None and self.inputs.table is not None:
            kept.inputs.table.copy_(self.inputs.table[..., rows])
        return kept
