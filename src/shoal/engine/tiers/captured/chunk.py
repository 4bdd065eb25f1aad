"""A part of a unit that is one stack: all of its members, some of them, or one alone without a member axis.

A member that leaves frees its row, and another one may take it while every address stays
the same, so that what was compiled and captured remains valid.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.fx import GraphModule

from shoal.data.source import TensorSource
from shoal.engine.members.member import Member
from shoal.engine.optim.hparams import merge_flags
from shoal.engine.recipes.program import Program
from shoal.engine.recipes.recipe import Recipe, TraceCache
from shoal.engine.stack.optimizers import kind
from shoal.engine.stack.stack import Stack
from shoal.engine.stack.stacked_optimizer import StackedOptimizer
from shoal.engine.tiers.captured._step import Inputs, Step, stack_tensors
from shoal.engine.tiers.captured.compiling import Executable, executable, step_graph, warm_up
from shoal.engine.tiers.captured.fusion.fused import Fused
from shoal.engine.tiers.stacked.unit import StackedUnit
from shoal.utils.randomness import signed

Cache = dict[Hashable, Executable | Fused | None]
"""Compiled steps, or their fused kernels, by computation and shape, shared by similar members. None marks a step
that runs operator by operator."""


class Chunk:
    """Members in one stack, with static inputs: every address stays the same from the first step to the last."""

    def __init__(
        self, stack: Stack, trace_cache: TraceCache, cache: Cache, *, solo: bool, shared: bool, compiled: bool
    ) -> None:
        self.stack, self.trace_cache, self.cache = stack, trace_cache, cache
        self.solo, self.shared, self.compiled = solo, shared, compiled
        self.by_row: list[Member | None] = list(stack.members)
        """The member of each row, or None if the row is free and does not change."""
        member = stack.members[0]
        size, n, device = len(stack.rows), member.shape_rows, stack.device
        source = member.data.source
        assert isinstance(source, TensorSource)
        batches = max(1, member.num_batches)
        self.log_names = next(iter(stack.recipes[0].steps.values())).log_names
        logs = torch.zeros(batches, len(self.log_names), size, dtype=torch.float64, device=device)
        self.inputs = Inputs(
            data=source.leaves,
            orders=torch.zeros(n if shared else (size, n), dtype=torch.int64, device=device),
            place=torch.zeros(() if shared else size, dtype=torch.int64, device=device),
            tick=torch.zeros((), dtype=torch.int64, device=device),
            moving=torch.ones(size, dtype=torch.bool, device=device),
            count=torch.tensor([m.batches for m in stack.members], dtype=torch.int64, device=device),
            seeds=torch.tensor([signed(m.job.seed) for m in stack.members], dtype=torch.int64, device=device),
            losses=torch.zeros(batches, size, dtype=torch.float64, device=device),
            logs=logs if self.log_names else None,
            tables=[_table(part, batches) for part in stack.optimizer.ruled()],
        )
        self._orders: list[Tensor | None] = [None] * size
        """The orders that are on the device, row by row."""
        self._places = [0] * size
        self._moving = [True] * size
        self._staged = torch.empty(0, dtype=torch.int64)
        self._laid: list[Tensor] = []
        """The orders that `_staged` contains."""
        self._sent: torch.cuda.Event | None = None
        """When `_staged` was copied to the device."""
        self.view = StackedUnit.around(stack, trace_cache)
        """The unit for everything but training steps: validation, schedules, writing back."""
        self._steps: dict[int, Step] = {}
        self._ready: dict[int, Executable] = {}

    @classmethod
    def build(
        cls,
        recipes: Sequence[Recipe],
        trace_cache: TraceCache,
        cache: Cache,
        *,
        solo: bool,
        shared: bool,
        compiled: bool,
    ) -> Chunk:
        """Build a chunk; its members' models move to the host, since the stack has their weights now."""
        stack = Stack(recipes, size=len(recipes), channels_last=solo)
        stack.rehearse()
        for recipe in recipes:
            _to_host(recipe.member)
        return cls(stack, trace_cache, cache, solo=solo, shared=shared, compiled=compiled)

    @property
    def alive(self) -> list[int]:
        """The rows of members that are still in training."""
        return [row for row, member in enumerate(self.by_row) if member is not None]

    @property
    def members(self) -> list[Member]:
        return [member for member in self.by_row if member is not None]

    # --- rows -------------------------------------------------------------------------------------------------------

    def free_row(self, recipe: Recipe, taken: Container[int] = ()) -> int | None:
        """Return a free row that fits this member: same computation, same numbers in it, no missing terms.

        Args:
            taken: Rows that are reserved for others.
        """
        first = self.stack.recipes[0]
        free = {row for row, member in enumerate(self.by_row) if member is None and row not in taken}
        if (
            not free
            or self.shared
            or recipe.key != first.key
            or recipe.member.data.source is not first.member.data.source
            or (recipe.member.job.clip_norm is not None and self.stack.clip_limits is None)
            or recipe.member.job.clip_value is not None
            or recipe.member.job.average is not None
        ):
            return None
        for part, table in zip(self.stack.optimizer.ruled(), self.inputs.tables, strict=True):
            if not _fits(part, table, recipe):
                continue
            for row in range(part.span.start, part.span.stop):
                theirs = self.stack.recipes[row].steps
                if row in free and all(theirs[rows] is graph for rows, graph in recipe.steps.items()):
                    return row
        return None

    def assign(self, recipes_by_row: Mapping[int, Recipe]) -> None:
        """Put members, at any point of their training, into free rows, all of them at once."""
        new_members = Stack(list(recipes_by_row.values()), size=len(recipes_by_row), temporary=True)
        row_of = {recipe.member.index: row for row, recipe in recipes_by_row.items()}
        rows = [row_of[member.index] for member in new_members.members]  # the stack has its own order
        self.stack.put(rows, new_members)
        for row, member in zip(rows, new_members.members, strict=True):
            _to_host(member)
            self._orders[row], self.by_row[row] = None, member
        counted = [[m.batches for m in new_members.members], [signed(m.job.seed) for m in new_members.members]]
        index, counts, seeds = torch.tensor([rows, *counted], device=self.stack.device).unbind(0)
        self.inputs.count.index_copy_(0, index, counts)
        self.inputs.seeds.index_copy_(0, index, seeds)
        self.view = StackedUnit.around(self.stack, self.trace_cache)
        self._rest()

    def release(self, rows: Sequence[int]) -> None:
        """Make rows free."""
        for row in rows:
            self.by_row[row] = None
        self._rest()

    def _rest(self) -> None:
        """Stop the schedules of members that have left, which may be at their end."""
        self.stack.optimizer.freeze_schedules([row for row, member in enumerate(self.by_row) if member is None])

    def fitted(self) -> Chunk:
        """Return this chunk, or a smaller one with the same members if half of the rows are free."""
        rows = self.alive
        if len(rows) > len(self.by_row) // 2 or not rows:
            return self
        stack = self.stack.keep(rows, len(rows))
        return Chunk(stack, self.trace_cache, self.cache, solo=self.solo, shared=self.shared, compiled=self.compiled)

    # --- batches ----------------------------------------------------------------------------------------------------

    def load(self, batches: int, rows: int) -> None:
        """Prepare for this many batches of the members whose next batch has `rows` rows."""
        self.inputs.tick.zero_()
        if not self.alive:  # the captured graph runs anyway, without changing rows
            self.move(rows)
            return
        self._load_orders()
        places = [0 if member is None else member.place for member in self.by_row]
        if places != self._places:
            self.inputs.place.copy_(torch.tensor(places[self.alive[0]] if self.shared else places))
            self._places = places
        self.move(rows)
        self.stack.optimizer.look_ahead(batches, least=1)
        for part, held in zip(self.stack.optimizer.ruled(), self.inputs.tables, strict=True):
            if held is not None:  # members with a schedule may have left, so that the numbers are constant
                coming = part.columns.packed if part.table is None else part.table.permute(3, 0, 1, 2)
                held[: batches + 1].copy_(coming)

    def move(self, rows: int, after: int = 0) -> None:
        """Let the members step whose batch, `after` batches from now, has `rows` rows; the others do not change."""
        moving = [m is not None and m.rows_in(after + 1) - m.rows_in(after) == rows for m in self.by_row]
        if moving != self._moving:
            self.inputs.moving.copy_(torch.tensor(moving))
            self._moving = moving

    def _load_orders(self) -> None:
        """Copy the members' new orders to the device."""
        held = self.inputs.orders
        assert held is not None
        if self.shared:
            order = self.members[0].order
            if self._orders[0] is not order and order is not None:
                held.copy_(order)
                self._orders = [order] * len(self.by_row)
            return
        orders = [self._orders[row] if member is None else member.order for row, member in enumerate(self.by_row)]
        fresh = [row for row, order in enumerate(orders) if order is not None and order is not self._orders[row]]
        if len(fresh) == len(orders):
            self._stage([order for order in orders if order is not None])
            held.copy_(self._staged, non_blocking=True)
            if self._sent is not None:
                self._sent.record(torch.cuda.current_stream(self.stack.device))
        else:
            for row in fresh:
                order = orders[row]
                assert order is not None
                held[row].copy_(order)
        self._orders = orders

    def look_ahead(self) -> None:
        """Stage the next epoch's orders, if all members begin it together."""
        ahead = [member.ahead[0] for member in self.by_row if member is not None and member.ahead is not None]
        if not self.shared and len(ahead) == len(self.by_row):
            self._stage(ahead)

    def _stage(self, orders: list[Tensor]) -> None:
        """Copy all rows' orders into pinned memory, which the device reads by itself."""
        if len(orders) == len(self._laid) and all(a is b for a, b in zip(orders, self._laid, strict=True)):
            return
        if not self._staged.numel():
            shape, cuda = (len(orders), len(orders[0])), self.stack.device.type == "cuda"
            self._staged = torch.empty(shape, dtype=torch.int64, pin_memory=cuda)
            self._sent = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]
        if self._sent is not None:
            self._sent.synchronize()  # the last copy to the device may not be done
        torch.stack(orders, out=self._staged)
        self._laid = orders

    def step(self, rows: int) -> Step:
        """Return the step on batches of this many rows."""
        if rows not in self._steps:
            recipes = self.stack.recipes
            traces = [recipes[row].steps[rows] for row in self.stack.rows]
            flags = [not self.shared] * traces[0].batch_spec.num_leaves
            program = Program(
                traces, device=self.stack.device, stacked_batch=flags, solo=self.solo, shared=self.stack.shared
            )
            self._steps[rows] = Step(self.stack, program, rows=rows, batch_size=self.stack.members[0].job.batch_size)
        return self._steps[rows]

    def tensors(self) -> list[Tensor]:
        return [*stack_tensors(self.stack), *self.inputs.tensors()]

    def written(self) -> list[Tensor]:
        """Return the tensors that a step writes."""
        inputs = self.inputs
        unshared = [tensor for place, tensor in enumerate(stack_tensors(self.stack)) if place not in self.stack.shared]
        logs = [] if inputs.logs is None else [inputs.logs]
        return [*unshared, inputs.place, inputs.tick, inputs.count, inputs.losses, *logs]

    def prepare(self, rows: int, full: bool = True) -> float:
        """Make the step on `rows` rows ready for capture, and return the seconds spent compiling now. Only steps on
        full batches are compiled."""
        if rows in self._ready:
            return 0.0
        step, compiled = self.step(rows), self.compiled and full
        key = self.key(rows, compiled=compiled)
        new, known = key not in self.cache, self.cache.get(key)
        if isinstance(known, Fused):
            step.fused = known
        ready = known if isinstance(known, Executable) else executable(step, self.inputs, compiled=compiled)
        if new:
            warm_up(ready, step, self.inputs, fuse=not self.trace_cache.deterministic)
            self.cache[key] = ready if compiled else step.fused
        self._ready[rows] = ready
        return ready.seconds if new else 0.0

    def key(self, rows: int, *, compiled: bool) -> Hashable:
        """Return the key of the step on `rows` rows in the cache."""
        traces = tuple(self.stack.recipes[row].steps[rows].number for row in self.stack.rows)
        rules = tuple(
            (part.span.start, part.span.stop, *((repr(rule), tuple(held)) for rule, held in part.groups))
            for part in self.stack.optimizer.ruled()
        )
        clipping = (self.stack.clip_limits is None, self.stack.clips_by_value)
        extras = (*clipping, self.stack.shared, *(table is None for table in self.inputs.tables))
        return traces, rules, extras, self.solo, self.shared, compiled, rows

    def graph(self, rows: int) -> GraphModule:
        """Return the step on this many rows as a graph that can be compiled."""
        return step_graph(self.step(rows), self.inputs)

    def ready(self, rows: int) -> Executable | None:
        """Return the step on this many rows, if it has been made ready."""
        return self._ready.get(rows)

    def use(self, rows: int, ready: Executable | None) -> None:
        """Use this step on full batches, of `rows` rows; None: make it ready again when it is needed."""
        self.compiled = ready is not None and ready.compiled
        self._ready.pop(rows, None)
        if ready is not None:
            self._ready[rows] = ready

    def warm_up(self, rows: int, ready: Executable) -> None:
        """Run a compiled step on `rows` rows once, and let similar chunks use it, too."""
        warm_up(ready, self.step(rows), self.inputs)
        self.cache[self.key(rows, compiled=True)] = ready

    def branch(self, rows: int) -> Callable[[], None]:
        """Return one step on this many rows, to be captured, on the tensors of this chunk."""
        return partial(self._ready[rows].run, self.tensors())

    def batch(self, rows: int) -> None:
        """Run one step on a batch of this many rows, operator by operator."""
        self.step(rows).run(self.stack, self.inputs)

    def note(self, batches: int) -> None:
        """Write the results of this many batches into the members."""
        losses = self.inputs.losses[:batches].T.tolist()
        logs = [] if self.inputs.logs is None else self.inputs.logs[:batches].permute(2, 1, 0).tolist()
        for row, member in enumerate(self.by_row):
            if member is not None:
                member.losses += losses[row]
                member.place += batches
                member.batches += batches
                if logs:
                    member.log(batches, dict(zip(self.log_names, logs[row], strict=True)))
        self._places = [0 if member is None else member.place for member in self.by_row]
        self.stack.optimizer.skip_steps(batches)


def _to_host(member: Member) -> None:
    """Move a member's model to the host, unless it is there: even then `to` would take as long as a move."""
    if any(tensor.device.type != "cpu" for tensor in (*member.model.parameters(), *member.model.buffers())):
        member.model.to("cpu")


def _table(part: StackedOptimizer, batches: int) -> Tensor | None:
    """Return a tensor for the scheduled numbers of this many steps, or None if no schedule changes them."""
    if not any(m.job.schedule is not None and m.job.schedule_every == "step" for m in part.span.members):
        return None
    packed = part.columns.packed
    return torch.zeros(batches + 1, *packed.shape, dtype=packed.dtype, device=packed.device)


def _fits(part: StackedOptimizer, table: Tensor | None, recipe: Recipe) -> bool:
    """Return whether a part, unchanged, can run a member's optimizer and schedule."""
    plan, job = recipe.optimizer, recipe.member.job
    stepped = job.schedule is not None and job.schedule_every == "step"
    if plan.flags is None or kind(recipe) != kind(part.span.recipes[0]) or (stepped and table is None):
        return False
    return all(
        merge_flags(plan.kind, [rule.flags, flags]) == rule.flags
        for (rule, _), flags in zip(part.groups, plan.flags, strict=True)
    )
