"""The stacked tier, step by step in eager mode: it runs on a CPU, and is the readable form of what a GPU captures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.engine.members.batch_stream import Stream, pace
from shoal.engine.members.member import Member
from shoal.engine.proof.prove import proven_together
from shoal.engine.recipes.program import Program, as_column
from shoal.engine.recipes.recipe import Evaluation, Recipe, TraceCache
from shoal.engine.stack.batches import Feed
from shoal.engine.stack.optimizers import kind
from shoal.engine.stack.stack import LEAST, Stack
from shoal.engine.stack.transfer import fill
from shoal.engine.tiers.serial import serial_unit
from shoal.engine.tiers.stacked._evaluations import EvaluationPrograms
from shoal.engine.tiers.stacked._failing_members import added, failing_members, gradients, row_of, undraw
from shoal.engine.tiers.stacked._next_batch import Loaded, next_batch
from shoal.engine.tiers.unit import Alone, Findings, Unit, context_lost, out_of_memory
from shoal.engine.tracing.trace import autocast
from shoal.errors import ReadError
from shoal.jobs.job import Job
from shoal.utils.randomness import Draw, draw_step, generator_at


class StackedUnit(Unit):
    """Members of one recipe as one network with a member axis."""

    tier = "stacked"

    def __init__(self, recipes: Sequence[Recipe], trace_cache: TraceCache) -> None:
        self.trace_cache = trace_cache
        self.stack = Stack(recipes, size=max(len(recipes), LEAST))
        self._set_up()
        for rows, step in recipes[0].steps.items():
            self.program(rows, [True] * step.batch_spec.num_leaves)  # raises NotStackable here, before any step

    @classmethod
    def around(cls, stack: Stack, trace_cache: TraceCache) -> Self:
        """Return a unit of an existing stack."""
        unit = object.__new__(cls)
        unit.trace_cache, unit.stack = trace_cache, stack
        unit._set_up()
        return unit

    def _set_up(self) -> None:
        self.members: list[Member] = self.stack.members
        self._losses: list[Tensor] = []
        self._logs: list[dict[str, Any]] = []
        self.loaded = Loaded()
        """What is known about a DataLoader's batches."""
        self._grads: list[Tensor | None] = []
        self._noise: list[Tensor] | None = None
        self._streams: dict[int, Stream] = {}
        self._failed: dict[int, Exception] = {}
        """Exceptions that end members, by slot: of their optimizers in the last step, which is not counted for them, of
        reading, and of members that ran separately."""
        self._repeating: dict[int, list[Tensor | None]] = {}
        """Members, by slot, that must repeat the last batch alone, and their gradients of earlier batches of the
        group."""
        self._drawn: list[Sequence[Draw]] = []
        """The random draws since the turn began, batch by batch."""
        self._written: list[tuple[Tensor, Tensor]] = []
        """The parameters that the last step itself wrote to, and their values before it."""
        self._steps: dict[tuple[int, bool], Program] = {}  # by the size of batches, and whether all members share them
        self._evaluations = EvaluationPrograms()
        self._all_active = bool(self.stack.active.all())  # whether all rows still train
        self._generators = [
            member.rng if i < len(self.members) else generator_at(member.rng.get_state())
            for i, member in enumerate(self.members[row] for row in self.stack.rows)
        ]

    # --- many batches -----------------------------------------------------------------------------------------------

    def run(self, batches: int) -> None:
        same_rows = self._by_rows(batches)
        if len(same_rows) > 1:
            self._run_groups(same_rows, batches)
            return
        self.stack.optimizer.look_ahead(self.members[0].steps_in(batches))
        feed = Feed(self.members, self.stack.rows, batches, self._streams)
        self._losses, self._logs, self._drawn, self.loaded.sizes = [], [], [], []
        rng_states = [generator.get_state() for generator in self._generators]
        try:
            for index in range(batches):
                if not feed.has_next():
                    break
                self._batch(feed, index)
                if self._failed or self._repeating or self.stack.optimizer.schedule_failed:
                    break
        except Exception as error:
            undraw(self, rng_states, range(len(rng_states)) if self._noise is not None else ())
            self._end_turn()
            if context_lost(error) or out_of_memory(error):
                raise
            if isinstance(error, ReadError):  # all members need this batch
                self._failed |= dict.fromkeys(range(len(self.members)), error)
                return
            raise Alone(failing_members(self, error)) from error
        except BaseException:
            self._end_turn()
            raise
        undraw(self, rng_states, list(self._repeating))
        self._end_turn()
        feed.finish()
        if self._repeating:
            raise Alone(dict.fromkeys(self._repeating, "a check in its step failed, or its loss is not finite"))

    def _end_turn(self) -> None:
        """End the turn: record rates and losses in the members."""
        self.stack.optimizer.note_rates()
        self._append_losses()

    def begin_reading(self) -> None:
        if self.members[0].batched:
            self._streams.setdefault(self.members[0].index, Stream()).open(self.members[0])

    def end_reading(self) -> None:
        self._streams = {}

    def failures(self) -> dict[int, Exception]:
        return {**self.stack.optimizer.schedule_failures(), **self._failed}

    def _by_rows(self, batches: int) -> list[list[int]]:
        """Group the slots by the number of rows in the coming batches: some members may be at a short last batch."""
        by_rows: dict[int, list[int]] = {}
        for slot, member in enumerate(self.members):
            by_rows.setdefault(member.rows_in(batches), []).append(slot)
        return list(by_rows.values())

    def _run_groups(self, groups: list[list[int]], batches: int) -> None:
        """Run members whose batches have the same shape together, one group after another."""
        alone: dict[int, str] = {}
        for slots in groups:
            part = self.keep(slots)
            try:
                part.run(batches)
            except Alone as caught:
                alone |= {slots[slot]: reason for slot, reason in caught.reasons.items()}
            failed = part.failures()
            self.take(slots, part)
            self._failed |= {slots[slot]: error for slot, error in failed.items()}
            self._repeating |= {slots[slot]: grads for slot, grads in part._repeating.items()}
        if alone:
            raise Alone(alone)

    def take(self, slots: list[int], part: StackedUnit) -> None:
        """Take over the state of `part`, a unit that `keep` made of these slots."""
        self.stack.take(slots, part.stack)
        self._all_active = bool(self.stack.active.all())

    def _append_losses(self) -> None:
        """Append the losses and logs since the last call to the members'."""
        done = len(self._losses)
        if not done:
            return
        losses = torch.stack(self._losses, 1)[: len(self.members)].double().tolist()
        names = sorted({name for row in self._logs for name in row})
        logs = {
            name: torch.stack([self._column(row.get(name, math.nan)) for row in self._logs], 1).tolist()
            for name in names
        }
        for slot, member in enumerate(self.members):
            counted = done - (slot in self._failed or slot in self._repeating)
            member.batches -= done - counted
            member.losses += losses[slot][:counted]
            member.rows += self.loaded.sizes[:counted]
            member.place += counted
            if names or member.logs:
                member.log(counted, {name: values[slot][:counted] for name, values in logs.items()})
        self._losses, self._logs, self.loaded.sizes = [], [], []

    def _column(self, value: Any) -> Tensor:
        """Return a log as one number for each row, on the device."""
        return as_column(value, len(self.stack.rows)).to(self.stack.device, torch.float64)

    @property
    def at_step_boundary(self) -> bool:
        return self._noise is None and super().at_step_boundary

    def rates(self) -> list[float]:
        return self.stack.optimizer.last_rates

    def end_epoch(self, values: Mapping[int, float | None]) -> None:
        self.stack.optimizer.end_epoch(values)

    # --- one batch --------------------------------------------------------------------------------------------------

    def program(self, rows: int, stacked_batch: list[bool]) -> Program:
        """Return the step on batches of so many rows."""
        traces = self.loaded.traces(self.stack, rows, self.stack.rows)
        return self.trace_cache.programs.get(traces, stacked_batch, self.stack.device, self.stack.shared)

    def _batch(self, feed: Feed, index: int) -> None:
        """Read and run one batch."""
        member, done = self.members[0], len(self._losses)
        place, k = member.place + done, member.job.accumulate
        first = place - place % k
        group = min(k, member.num_batches - first)
        size, batch = next_batch(self, feed, index)
        program = self._steps.get((size, feed.shared)) or self.program(size, [not feed.shared] * len(batch))
        self._steps[size, feed.shared] = program
        if self._noise is None:
            self._drawn.append(program.draws)
        active = self.stack.active.clone() if program.trace.checked else None
        grads = [] if first == place else self._grads
        self.advance(program, batch, group, first == place, place + 1 == first + group)
        if active is not None and not self._all_active:
            self._set_aside(active & ~self.stack.active, grads)

    def _set_aside(self, stopped: Tensor, grads: list[Tensor | None]) -> None:
        """Undo the batch for members for which a check in the graph failed; they repeat it in a plain loop."""
        self._repeating = {s: [row_of(grad, s) for grad in grads] for s in range(len(self.members)) if stopped[s]}
        for param, value in self._written:
            param[stopped] = value[stopped]

    def advance(
        self, program: Program, batch: list[Tensor], group: int = 1, first: bool = True, last: bool = True
    ) -> None:
        """Run one batch of every member, the first or last of a `group` of batches that make one optimizer step.

        If it raises, nothing has changed, and the same batch can be tried again.
        """
        stack = self.stack
        if self._noise is None:
            self._noise = self.draw(program, stack.rows, self._generators) if program.draws else []
        buffers_before = stack.saved_buffers()
        params = [stack.params[index].detach() for index in program.written]
        self._written = [(param, param.clone()) for param in params]
        try:
            with autocast(self.members[0].job.precision, stack.device):
                (losses, logs), after = program(stack.state, batch, self._noise.__getitem__)
            total = losses.sum()
            noted_losses, active = self._check_losses(losses.detach(), total)
            grads = self._backward(losses, total, group, first)
            if last:
                stack.reserve()
        except Exception:
            stack.restore_buffers(buffers_before)
            for param, value in self._written:
                param.copy_(value)
            raise
        self._noise = None
        for member in self.members:
            member.batches += 1
        ok = self._stop_rows(active)
        self._losses.append(noted_losses)
        self._logs.append(logs)
        self._grads = grads
        if buffers_before:
            stack.set_buffers(after, ok, buffers_before)
        if last:
            try:
                stack.apply(self._grads, ok)
                self._failed = stack.optimizer.failures()
            except Exception as error:
                if context_lost(error) or out_of_memory(error):
                    raise
                # some weights were updated and others not, so no member can continue
                self._failed = {slot: error for slot in range(len(self.members)) if stack.active[slot]}
            self._grads = []
            self._restore_buffers(list(self._failed), buffers_before)
            stack.optimizer.step_schedules()

    def _restore_buffers(self, slots: Sequence[int], before: list[Tensor]) -> None:
        """Restore the buffers of these members from before the batch."""
        rows = [row for row, slot in enumerate(self.stack.rows) if slot in slots]
        first = len(self.stack.params)
        for index, (buffer, previous) in enumerate(zip(self.stack.buffers, before, strict=True) if rows else ()):
            if first + index not in self.stack.shared:
                buffer[rows] = previous[rows]

    def draw(self, program: Program, slots: Sequence[int], generators: Sequence[torch.Generator]) -> list[Tensor]:
        """Return the random draws of these members' next batch, from the generators; on a GPU they are
        counter-based."""
        members = [self.members[slot] for slot in slots]
        seeds, batches = [m.job.seed for m in members], [m.batches for m in members]
        return draw_step(program.draws, generators, seeds, batches, self.stack.device)

    def _check_losses(self, losses: Tensor, total: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the losses to record, and which rows still train; None: all, as before."""
        if self._all_active and math.isfinite(total.item()):  # a sum is finite only if all its terms are
            return losses, None
        fine = torch.isfinite(losses)
        active = self.stack.active & fine
        return torch.where(active, losses, torch.where(fine, float("nan"), losses)), active

    def _stop_rows(self, active: Tensor | None) -> Tensor | None:
        """Stop rows whose loss is not finite, and return the rows that still train; None: all."""
        if active is not None:
            self.stack.active.copy_(active)
            self._all_active = bool(active.all())
        return None if self._all_active else self.stack.active

    def _backward(self, losses: Tensor, total: Tensor, group: int, first: bool) -> list[Tensor | None]:
        """Return the gradients of this batch, added to those of earlier batches of its group."""
        if group > 1:
            losses = losses / group
        if self.stack.scaler is not None:
            losses = self.stack.scaler.scale(losses)
        if group > 1 or self.stack.scaler is not None:
            total = losses.sum()
        grads: list[Tensor | None] = list(torch.autograd.grad(total, self.stack.leaves, allow_unused=True))
        return grads if first else [added(a, b) for a, b in zip(self._grads, grads, strict=True)]

    # --- in and out -------------------------------------------------------------------------------------------------

    def write_back(self, slots: list[int] | None = None) -> None:
        self.stack.write_back(range(len(self.members)) if slots is None else slots)

    def keep(self, slots: list[int]) -> Self:
        part = self.around(self.stack.keep(slots, max(len(slots), LEAST)), self.trace_cache)
        rows = [slots[slot] for slot in part.stack.rows]
        part._grads = [None if grad is None else grad[rows] for grad in self._grads]
        part._noise = None if self._noise is None else [value[rows] for value in self._noise]
        part._evaluations = self._evaluations.of(slots)
        return part

    def alone(self, slots: list[int]) -> list[Unit]:
        self.write_back(slots)
        return [serial_unit(self.members[slot], gradients(self, slot)) for slot in slots]

    def accepts(self, recipe: Recipe, beside: Sequence[Recipe] = ()) -> bool:
        """Return whether a member may join now. Members that accumulate or share a stream must be at the same batch.

        On a GPU a unit that is not captured is slow, so it accepts only kinds of optimizers that it has.
        """
        return (
            self.at_step_boundary
            and recipe.key == self.stack.recipes[0].key
            and proven_together([self.stack.recipes[0], recipe], self.trace_cache)
            and (self.stack.device.type == "cpu" or kind(recipe) in map(kind, self.stack.recipes))
            and all(pace(member) == pace(recipe.member) for member in self.members)
        )

    def join(self, recipes: Sequence[Recipe]) -> Self:
        """Return a unit with these members added, each with its current state; `members` gives their slots."""
        count = len(self.members) + len(recipes)
        new_members = Stack(recipes, size=len(recipes), temporary=True)
        return self.around(self.stack.merged(new_members, max(count, LEAST)), self.trace_cache)

    def forget_evaluations(self) -> None:
        self._evaluations = EvaluationPrograms()

    def outputs(self, inputs: Sequence[Any], slots: list[int] | None = None) -> Any:
        program = self._evaluation("forward", tuple(inputs), lambda job: Evaluation.forward(job.precision))
        if program is None:
            return super().outputs(inputs, slots)
        return pytree.tree_map_only(Tensor, self._row_picker(slots), self._evaluate(program, inputs, []))

    def validate(self, batch: Any, slots: list[int]) -> Findings | None:
        with_outputs = any(member.job.metrics for member in self.members)
        program = self._evaluation("validation", batch, lambda job: Evaluation.validation(job, with_outputs))
        if program is None:
            return None
        (losses, logs), outputs = self._evaluate(program, batch, slots)
        chosen, rows = self._row_picker(slots), len(self.stack.rows)
        columns = {name: chosen(as_column(value, rows)) for name, value in logs.items()}
        return Findings(
            chosen(losses), columns, pytree.tree_map_only(Tensor, chosen, outputs) if with_outputs else None
        )

    def _row_picker(self, slots: list[int] | None) -> Callable[[Tensor], Tensor]:
        """Return a function that picks these members' rows of a stacked tensor."""
        chosen = list(range(len(self.members))) if slots is None else slots
        return lambda leaf: leaf.detach()[chosen] if len(chosen) < len(leaf) else leaf.detach()

    def undo_validation(self) -> Callable[[], None]:
        return partial(fill, [(buffer, buffer.clone()) for buffer in self.stack.own_buffers])

    def evaluation_weights(self, slots: list[int]) -> AbstractContextManager[None]:
        return self.stack.evaluation_weights()

    def adopt_state(self, slots: list[int]) -> None:
        self.stack.adopt_state(slots)

    def _evaluate(self, program: Program, batch: Any, slots: list[int]) -> Any:
        """Return the result of an eval-mode program; buffers that it changes stay changed only for these members."""
        stack = self.stack
        saved = stack.saved_buffers()
        with torch.no_grad(), autocast(self.members[0].job.precision, stack.device):
            out, after = program(stack.state, pytree.tree_leaves(batch), lambda index: torch.empty(0))
            if saved:
                chosen = torch.zeros(len(stack.rows), dtype=torch.bool)
                chosen[slots] = True
                stack.set_buffers(after, chosen.to(stack.device), saved)
        return out

    def _evaluation(self, kind: str, batch: Any, what: Callable[[Job], Evaluation]) -> Program | None:
        return self._evaluations.get(kind, batch, what, self.members, self.stack, self.trace_cache)
