"""The stacked tier, step by step in eager mode: what runs on a CPU, and the readable form of what a GPU captures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.errors import MemberError
from shoal.pack.members import Member, draws, run_step
from shoal.pack.prove import prove_evaluation, proven_together
from shoal.pack.recipe import Evaluation, Kitchen, Recipe
from shoal.pack.stacked.feed import Feed
from shoal.pack.stacked.optimizers import kind
from shoal.pack.stacked.program import Program, as_column
from shoal.pack.stacked.rates import Rates
from shoal.pack.stacked.site import NotStackable
from shoal.pack.stacked.stack import Stack
from shoal.pack.stream import Stream
from shoal.pack.trace import Untraceable, autocast
from shoal.pack.unit import Findings, Unit, context_lost, out_of_memory
from shoal.randomness import Draw, draw_members, draw_step, generator_at

LEAST = 2
"""Rows of the smallest stack; see `stack`."""


class StackedUnit(Unit):
    """Members of one recipe as one network with a member axis."""

    tier = "stacked"

    def __init__(self, recipes: Sequence[Recipe], kitchen: Kitchen) -> None:
        self.kitchen = kitchen
        self.stack = Stack(recipes, size=max(len(recipes), LEAST))
        self._set_up()
        for rows, step in recipes[0].steps.items():
            self.program(rows, [True] * step.batch_spec.num_leaves)  # NotStackable shows here, before any step

    @classmethod
    def around(cls, stack: Stack, kitchen: Kitchen) -> StackedUnit:
        """The unit of a stack that exists already."""
        unit = object.__new__(cls)
        unit.kitchen, unit.stack = kitchen, stack
        unit._set_up()
        return unit

    def _set_up(self) -> None:
        self.members: list[Member] = self.stack.members
        self.rates_of = Rates(self.stack)
        self._losses: list[Tensor] = []
        self._logs: list[dict[str, Any]] = []
        self._grads: list[Tensor | None] = []
        self._noise: list[Tensor] | None = None
        self._streams: dict[int, Stream] = {}
        self._drawn: list[Sequence[Draw]] = []
        """What was drawn since the turn began, batch by batch."""
        self._forwards: dict[Any, Program | None] = {}
        self._everybody = bool(self.stack.active.all())
        """Whether all rows still train."""
        self._generators = [
            member.rng if i < len(self.members) else generator_at(member.rng.get_state())
            for i, member in enumerate(self.members[row] for row in self.stack.rows)
        ]

    # --- many batches -----------------------------------------------------------------------------------------------

    def run(self, batches: int) -> None:
        alike = self._by_rows(batches)
        if len(alike) > 1:
            self._run_apart(alike, batches)
            return
        self.rates_of.settle()
        self.rates_of.begin(self.members[0].steps_in(batches))
        feed = Feed(self.members, self.stack.rows, batches, self._streams)
        self._losses, self._logs, self._drawn = [], [], []
        before = [generator.get_state() for generator in self._generators]
        try:
            for index in range(batches):
                self._batch(feed, index)
        except Exception as error:
            if out_of_memory(error):
                self._undraw(before)
            raise
        finally:
            self.rates_of.settle_rates()
            self._note()
        feed.used()

    def _by_rows(self, batches: int) -> list[list[int]]:
        """Slots of members with equally many rows in the coming batches: some may be at a short last batch."""
        found: dict[int, list[int]] = {}
        for slot, member in enumerate(self.members):
            found.setdefault(member.rows_in(batches), []).append(slot)
        return list(found.values())

    def _run_apart(self, alike: list[list[int]], batches: int) -> None:
        """Members whose batches have the same shape go together, the others after them."""
        caught: MemberError | None = None
        for slots in alike:
            part = self.keep(slots)
            assert isinstance(part, StackedUnit)
            try:
                part.run(batches)
            except MemberError as error:  # a second one raises again when its batch is tried again
                caught = caught or MemberError(slots[error.slot], error.cause)
            self._take(slots, part)
        if caught is not None:
            raise caught from caught.cause

    def _take(self, slots: list[int], part: StackedUnit) -> None:
        """Be, for these slots, where a part of this unit is."""
        part.rates_of.settle()
        self.stack.take(slots, part.stack)
        self._everybody = bool(self.stack.active.all())
        self.rates_of.carry(dict(zip(slots, part.rates_of.last, strict=True)))

    def _note(self) -> None:
        """What the batches since the last note gave, to the members."""
        done, rows = len(self._losses), len(self.stack.rows)
        if not done:
            return
        losses = torch.stack(self._losses, 1)[: len(self.members)].double().tolist()
        names = sorted({name for row in self._logs for name in row})
        nan = torch.full((rows,), float("nan"))
        logs = {
            name: torch.stack([as_column(row.get(name, nan), rows).double() for row in self._logs], 1).tolist()
            for name in names
        }
        for slot, member in enumerate(self.members):
            member.losses += losses[slot]
            member.place += done
            if names or member.logs:
                member.log(done, {name: values[slot] for name, values in logs.items()})
        self._losses, self._logs = [], []

    @property
    def settled(self) -> bool:
        return self._noise is None and super().settled

    def rates(self) -> list[float]:
        return list(self.rates_of.last)

    def end_epoch(self, values: Mapping[int, float | None]) -> None:
        self.rates_of.settle()
        self.rates_of.epoch(values)

    # --- one batch --------------------------------------------------------------------------------------------------

    def program(self, rows: int, stacked_batch: list[bool]) -> Program:
        """The step on batches of so many rows."""
        traces = [self.stack.recipes[r].steps[rows] for r in self.stack.rows]
        return self.kitchen.program(traces, stacked_batch, self.stack.device)

    def _batch(self, feed: Feed, index: int) -> None:
        member, done = self.members[0], len(self._losses)
        place, k = member.place + done, member.job.accumulate
        first = place - place % k
        group = min(k, member.num_batches - first)
        try:
            batch = feed.batch(index)
            size = batch[0].shape[0 if feed.shared else 1]
            program = self.program(size, [not feed.shared] * len(batch))
            if self._noise is None:
                self._drawn.append(program.draws)
            active = self.stack.active.clone() if program.trace.checked else None
            self.advance(program, batch, group, first == place, place + 1 == first + group)
        except Exception as error:
            raise self._blame(done, error) from error
        if active is not None and not self._everybody:
            self._look_at_checks(done, active)

    def _look_at_checks(self, done: int, before: Tensor) -> None:
        """Where a check in the graph may have failed, let the member's own step say so."""
        for slot in range(len(self.members)):
            if before[slot] and not self.stack.active[slot]:
                error = self._own_error(slot, done)
                if error is not None:
                    raise MemberError(slot, error) from error

    def advance(
        self, program: Program, batch: list[Tensor], group: int = 1, first: bool = True, last: bool = True
    ) -> None:
        """One batch of every member, the first or last of a group of so many that make one optimizer step.

        When it raises, nothing has changed: the same batch can be tried again.
        """
        stack = self.stack
        if self._noise is None:
            self._noise = self._draw(program)
        before = [buffer.clone() for buffer in stack.buffers]
        try:
            with autocast(self.members[0].job.precision, stack.device):
                (losses, logs), after = program(stack.state, batch, self._noise.__getitem__)
            total = losses.sum()
            seen, active = self._look(losses.detach(), total)
            grads = self._backward(losses, total, group, first)
            if last:
                stack.reserve()
        except Exception:
            stack.set_buffers(dict(zip(stack.buffer_names, before, strict=True)), None, before)
            raise
        self._noise = None
        for member in self.members:
            member.batches += 1
        ok = self._leave(active)
        self._losses.append(seen)
        self._logs.append(logs)
        self._grads = grads
        if before:
            stack.set_buffers(after, ok, before)
        if last:
            stack.apply(self._grads, ok)
            self._grads = []
            self.rates_of.step()

    def _draw(self, program: Program) -> list[Tensor]:
        """The batch's random draws, for every row: from the members' generators, or on a GPU counted."""
        members = [self.members[row] for row in self.stack.rows]
        seeds, batches = [m.job.seed for m in members], [m.batches for m in members]
        return draw_step(program.draws, self._generators, seeds, batches, self.stack.device)

    def _undraw(self, before: list[Tensor]) -> None:
        """Let nobody have drawn for the batch that was not taken; `before`: the generators when the turn began."""
        if self._noise is None or not self._drawn:
            return
        self._noise = None
        self._drawn.pop()
        if self.stack.device.type != "cpu":  # draws are counted there
            return
        for generator, state in zip(self._generators, before, strict=True):
            generator.set_state(state)
        for drawn in self._drawn:
            draw_members(drawn, self._generators, self.stack.device)

    def _look(self, losses: Tensor, total: Tensor) -> tuple[Tensor, Tensor | None]:
        """The losses as they are to be noted, and who is still in training; None: everybody is, as before."""
        if self._everybody and math.isfinite(total.item()):  # a sum is finite only if all its terms are
            return losses, None
        fine = torch.isfinite(losses)
        active = self.stack.active & fine
        return torch.where(active, losses, torch.where(fine, float("nan"), losses)), active

    def _leave(self, active: Tensor | None) -> Tensor | None:
        """Let members leave the step whose loss is not finite; who is in it, None: everybody."""
        if active is not None:
            self.stack.active.copy_(active)
            self._everybody = bool(active.all())
        return None if self._everybody else self.stack.active

    def _backward(self, losses: Tensor, total: Tensor, group: int, first: bool) -> list[Tensor | None]:
        """The gradients, of this batch and those before it of its group."""
        if group > 1:
            losses = losses / group
        if self.stack.scaler is not None:
            losses = self.stack.scaler.scale(losses)
        if group > 1 or self.stack.scaler is not None:
            total = losses.sum()
        grads: list[Tensor | None] = list(torch.autograd.grad(total, self.stack.leaves, allow_unused=True))
        return grads if first else [_sum(a, b) for a, b in zip(self._grads, grads, strict=True)]

    def _blame(self, done: int, error: Exception) -> Exception:
        """Find the member whose own step raises on this batch; the others lose nothing."""
        if context_lost(error) or out_of_memory(error):
            return error
        for slot in range(len(self.members)):
            raised = self._own_error(slot, done)
            if raised is not None:
                return MemberError(slot, raised)
        return error

    def _own_error(self, slot: int, done: int) -> Exception | None:
        """What a member's own step raises on the batch after so many of this turn."""
        member, job = self.members[slot], self.members[slot].job
        self.stack.write_back([slot])
        assert member.order is not None
        start = (member.place + done) * job.batch_size
        model = member.model.to(member.device)
        try:
            rows = member.order[start : start + job.batch_size]
            batch = member.data.source.take(rows, seed=job.order_seed, epoch=member.epoch)
            with draws(member, keep=False), torch.no_grad(), autocast(job.precision, member.device):
                run_step(job, model, batch)
        except Exception as error:
            return error
        return None

    # --- in and out -------------------------------------------------------------------------------------------------

    def write_back(self, slots: list[int] | None = None) -> None:
        self.rates_of.settle()
        self.stack.write_back(range(len(self.members)) if slots is None else slots)

    def keep(self, slots: list[int]) -> Unit:
        self.rates_of.settle()
        kept = self._changed(self.stack.keep(slots, max(len(slots), LEAST)))
        rows = [slots[own] for own in kept.stack.rows]
        kept._grads = [None if grad is None else grad[rows] for grad in self._grads]
        kept._noise = None if self._noise is None else [value[rows] for value in self._noise]
        last = self.rates_of.last
        kept.rates_of.carry({place: last[slot] for place, slot in enumerate(slots)})
        return kept

    def accepts(self, recipe: Recipe, beside: Sequence[Recipe] = ()) -> bool:
        """Whether a member may join as it is. Members that accumulate, or share a stream, have to be in step.

        What is not captured on a GPU is slow there: it takes in members of its own kind only.
        """
        first, member = self.members[0], recipe.member
        apart = member.job.accumulate > 1 or member.data.source.streamed
        return (
            self.settled
            and recipe.key == self.stack.recipes[0].key
            and proven_together([self.stack.recipes[0], recipe], self.kitchen)
            and (self.stack.device.type == "cpu" or kind(recipe) in map(kind, self.stack.recipes))
            and (not apart or all(m.place == member.place for m in self.members))
            and member.data.source.streamed == first.data.source.streamed
        )

    def join(self, recipes: Sequence[Recipe]) -> StackedUnit:
        """The same training with these members too, wherever each of them is; `members` says who is in which slot."""
        self.rates_of.settle()
        count = len(self.members) + len(recipes)
        newcomers = Stack(recipes, size=len(recipes), passing=True)
        grown = self._changed(self.stack.merged(newcomers, max(count, LEAST)))
        last = {member.index: rate for member, rate in zip(self.members, self.rates_of.last, strict=True)}
        grown.rates_of.carry({s: last[m.index] for s, m in enumerate(grown.members) if m.index in last})
        return grown

    def _changed(self, stack: Stack) -> Self:
        unit = object.__new__(type(self))
        unit.kitchen, unit.stack = self.kitchen, stack
        unit._set_up()
        return unit

    def forget_evaluations(self) -> None:
        self._forwards = {}

    def outputs(self, inputs: Sequence[Any], slots: list[int] | None = None) -> Any:
        what = Evaluation.forward(self.members[0].job.precision)
        program = self._evaluation("forward", tuple(inputs), [what] * len(self.members))
        if program is None:
            return super().outputs(inputs, slots)
        return pytree.tree_map(self._chosen(slots), self._evaluate(program, inputs, []))

    def validate(self, batch: Any, slots: list[int]) -> Findings | None:
        wanted = any(member.job.metrics for member in self.members)
        program = self._evaluation("validation", batch, [Evaluation.validation(m.job, wanted) for m in self.members])
        if program is None:
            return None
        (losses, logs), outputs = self._evaluate(program, batch, slots)
        chosen, rows = self._chosen(slots), len(self.stack.rows)
        columns = {name: chosen(as_column(value, rows)) for name, value in logs.items()}
        return Findings(chosen(losses), columns, pytree.tree_map(chosen, outputs) if wanted else None)

    def _chosen(self, slots: list[int] | None) -> Callable[[Tensor], Tensor]:
        """Picks members' rows out of the stack's."""
        chosen = list(range(len(self.members))) if slots is None else slots
        return lambda leaf: leaf.detach()[chosen] if len(chosen) < len(leaf) else leaf.detach()

    def adopt_buffers(self, slots: list[int]) -> None:
        named = [dict(self.members[slot].model.named_buffers()) for slot in slots]
        with torch.no_grad():
            for slot, buffers in zip(slots, named, strict=True):
                for name, stacked in zip(self.stack.buffer_names, self.stack.buffers, strict=True):
                    stacked[slot].copy_(buffers[name])

    def _evaluate(self, program: Program, batch: Any, slots: list[int]) -> Any:
        """What an eval-mode program gives; the buffers that it changes are kept for these members alone."""
        stack = self.stack
        saved = [buffer.clone() for buffer in stack.buffers]
        with torch.no_grad(), autocast(self.members[0].job.precision, stack.device):
            out, after = program(stack.state, pytree.tree_leaves(batch), lambda index: torch.empty(0))
            kept = torch.zeros(len(stack.rows), dtype=torch.bool)
            kept[slots] = True
            stack.set_buffers(after, kept.to(stack.device), saved)
        return out

    def _evaluation(self, kind: str, batch: Any, whats: Sequence[Evaluation]) -> Program | None:
        """An eval-mode program for a batch that all members share; None where it cannot be stacked, or draws."""
        leaves, spec = pytree.tree_flatten(batch)
        shapes = [(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else None for leaf in leaves]
        key = (kind, repr(spec), *shapes)
        if key not in self._forwards:
            try:
                models = [member.model for member in self.members]
                traces = [self.kitchen.evaluation(m, what, batch) for m, what in zip(models, whats, strict=True)]
                rows = [traces[row] for row in self.stack.rows]
                program = self.kitchen.program(rows, [False] * len(leaves), self.stack.device)
                prove_evaluation(models, whats, traces, batch, self.kitchen)
                self._forwards[key] = None if program.draws else program
            except (Untraceable, NotStackable):
                self._forwards[key] = None
        return self._forwards[key]


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return a if b is None else b
    return a + b
