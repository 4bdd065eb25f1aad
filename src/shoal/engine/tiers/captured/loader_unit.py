"""A stack on a GPU whose members read a DataLoader: each batch is copied to one place, where a captured step reads it.

The first batches of a shape run operator by operator. Then their step is captured as a CUDA graph, and each further
batch of this shape is a copy and a replay of the graph. The graph holds the same operators, unfused, since a resumed
run captures later and must compute the same. All members read the same batches.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

import torch
from torch import Tensor

from shoal.engine.recipes.program import Program
from shoal.engine.stack.stack import Stack
from shoal.engine.tiers.captured._step import Inputs, Step, stack_tensors
from shoal.engine.tiers.captured.compiling import executable, warm_up
from shoal.engine.tiers.captured.graphs import RECORDER, Graph, clear
from shoal.engine.tiers.stacked.unit import StackedUnit
from shoal.engine.tiers.unit import context_lost, out_of_memory
from shoal.utils.randomness import signed
from shoal.utils.set_up_times import timed

FEW = 3
"""Batches of a shape that run operator by operator before their step is captured."""
MOST_SHAPES = 4
"""The most steps that are captured."""
WORTH = 16
"""Batches that must be left: capturing takes as long as a few of them."""


class LoaderUnit(StackedUnit):
    """A stacked unit that captures the steps of frequent batches."""

    def _set_up(self) -> None:
        super()._set_up()
        self._seen: Counter[int] = Counter()
        self._captured: dict[int, CapturedBatch | None] = {}
        """By the number of a batch's kind; None if its step cannot be captured."""
        self._may_capture = True
        """False once memory was full."""
        self._replayed = False
        """Whether steps were replayed since the host knew which rows still train."""

    def advance(
        self, program: Program, batch: list[Tensor], group: int = 1, first: bool = True, last: bool = True
    ) -> None:
        captured = self._captured_for(program, batch)
        if captured is None:
            self._know_rows()
            try:
                super().advance(program, batch, group, first, last)
            except Exception as error:
                if not out_of_memory(error) or not self._captured:
                    raise
            else:
                return
            self._captured, self._may_capture = {}, False
            clear()
            super().advance(program, batch, group, first, last)  # a batch that raised has changed nothing
            return
        counts = [self.members[slot].batches for slot in self.stack.rows]
        losses, logs = captured.run(batch, counts)
        self._replayed = True
        for member in self.members:
            member.batches += 1
        self._losses.append(losses)
        self._logs.append(logs)
        self.stack.optimizer.step_schedules()

    def _end_turn(self) -> None:
        self._know_rows()
        super()._end_turn()

    def _know_rows(self) -> None:
        """Read from the device whether all rows still train."""
        if self._replayed:
            self._all_active, self._replayed = bool(self.stack.active.all()), False

    def _captured_for(self, program: Program, batch: list[Tensor]) -> CapturedBatch | None:
        """Return the captured step of such batches; None if this one runs operator by operator."""
        kind = self.loaded.kind
        if kind in self._captured:
            return self._captured[kind]
        self._seen[kind] += 1
        few = self._seen[kind] <= FEW or max(member.batches_left for member in self.members) < WORTH
        if few or not self._may_capture or len(self._captured) >= MOST_SHAPES:
            return None
        if program.trace.checked or program.written:  # a failed check is undone by the host
            self._captured[kind] = None
            return None
        beside = next((step.graph for step in self._captured.values() if step is not None), None)
        try:
            with timed("capture"):
                self._captured[kind] = CapturedBatch(self.stack, program, batch, beside)
        except (RuntimeError, NotImplementedError) as error:
            if context_lost(error):
                raise
            self._captured[kind] = None
        if self._captured[kind] is None:
            clear()  # most likely memory is full; without a graph less is needed
        return self._captured[kind]


class CapturedBatch:
    """The captured step of a stack on batches of one shape."""

    def __init__(self, stack: Stack, program: Program, batch: list[Tensor], beside: Graph | None) -> None:
        """Capture the step. `beside`: a graph that never runs at the same time, whose memory it may share."""
        size, device, names = len(stack.rows), stack.device, program.trace.log_names
        self._names = names
        self._leaves = [leaf.clone() for leaf in batch]
        self._counts = [member.batches for member in (stack.members[slot] for slot in stack.rows)]
        """The members' batch counts on the device."""
        seeds = [signed(stack.members[slot].job.seed) for slot in stack.rows]
        self._inputs = Inputs(
            data=self._leaves,
            orders=None,
            place=torch.zeros((), dtype=torch.int64, device=device),
            tick=torch.zeros((), dtype=torch.int64, device=device),
            moving=torch.ones(size, dtype=torch.bool, device=device),
            count=torch.tensor(self._counts, dtype=torch.int64, device=device),
            seeds=torch.tensor(seeds, dtype=torch.int64, device=device),
            losses=torch.zeros(1, size, dtype=torch.float64, device=device),
            logs=torch.zeros(1, len(names), size, dtype=torch.float64, device=device) if names else None,
            tables=[None for _ in stack.optimizer.ruled()],
        )
        step = Step(stack, program, rows=0, batch_size=0)  # the batch is given, so no rows are gathered
        self._ready = executable(step, self._inputs, compiled=False)
        """Kept, since the graph reads memory of the step: the limits of its dropout masks, for example."""
        warm_up(self._ready, step, self._inputs, fuse=False)
        tensors = [*stack_tensors(stack), *self._inputs.tensors()]
        self.graph = RECORDER.capture([partial(self._ready.run, tensors)], 0, beside)

    def run(self, batch: list[Tensor], counts: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
        """Run the step on a batch, and return every row's loss and logs.

        Args:
            counts: The number of batches that each row's member has had, which numbers its random draws.
        """
        inputs = self._inputs
        for leaf, value in zip(self._leaves, batch, strict=True):
            leaf.copy_(value, non_blocking=True)
        if counts != self._counts:
            inputs.count.copy_(torch.tensor(counts))
        self._counts = [count + 1 for count in counts]
        inputs.tick.zero_()
        self.graph.replay()
        logs = {} if inputs.logs is None else dict(zip(self._names, inputs.logs[0].clone(), strict=True))
        return inputs.losses[0].clone(), logs
