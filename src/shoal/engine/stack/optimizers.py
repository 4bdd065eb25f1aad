"""The optimizers of a stack: one part for each kind of optimizer among its members, on neighbouring rows.

Forward and backward do not depend on optimizers, so members with different ones share a stack, ordered by kind. Each
part works on views of its rows, so a member's bits do not depend on the other members.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.engine.members.member import Member
from shoal.engine.recipes.recipe import Recipe
from shoal.engine.stack._per_member_optimizers import PerMemberOptimizers
from shoal.engine.stack.stacked_optimizer import StackedOptimizer

if TYPE_CHECKING:
    from shoal.engine.stack.stack import Stack

Grads = Sequence[Tensor | None]
Part = StackedOptimizer | PerMemberOptimizers
FEW = 4
"""From so many steps on, computing scheduled values in advance is cheaper than asking the schedules at each step."""


def kind(recipe: Recipe) -> Hashable:
    """Return what the members of one part have in common: the structure of their optimizer, or None for classes without
    a rule."""
    plan = recipe.optimizer
    return plan.key if plan.flags is not None else None


def ordered(recipes: Sequence[Recipe]) -> list[int]:
    """Return the indices of the recipes, sorted so that those of one kind are neighbours; otherwise in their order."""
    by_kind: dict[Hashable, list[int]] = {}
    for i, recipe in enumerate(recipes):
        by_kind.setdefault(kind(recipe), []).append(i)
    return [i for same_kind in by_kind.values() for i in same_kind]


class Span:
    """Neighbouring rows of a stack, with the interface of a stack."""

    def __init__(self, stack: Stack, start: int, stop: int) -> None:
        # weak, so that GPU memory is freed at once, without the garbage collector
        self._stack, self.start, self.stop = weakref.ref(stack), start, stop
        self.whole = stop - start == len(stack.rows)
        self.leaves = [self.of(leaf.detach()) for leaf in stack.leaves]
        self.device, self.trained = stack.device, stack.trained

    def of(self, value: Tensor) -> Tensor:
        """Return these rows of one of the stack's tensors."""
        return value if self.whole else value[self.start : self.stop]

    @property
    def stack(self) -> Stack:
        stack = self._stack()
        assert stack is not None, "whatever holds a stack's optimizer holds the stack"
        return stack

    @property
    def recipes(self) -> list[Recipe]:
        return self.stack.recipes[self.start : self.stop]

    @property
    def members(self) -> list[Member]:
        return [recipe.member for recipe in self.recipes]

    @property
    def rows(self) -> list[int]:
        """The slot of the member in each row, counted from the span's first member."""
        return [slot - self.start for slot in self.stack.rows[self.start : self.stop]]


def spans(stack: Stack) -> Iterator[Span]:
    """Yield the rows of each kind of optimizer."""
    kinds = [kind(stack.recipes[slot]) for slot in stack.rows]
    start = 0
    for row in range(1, len(kinds) + 1):
        if row == len(kinds) or kinds[row] != kinds[start]:
            yield Span(stack, start, row)
            start = row


class Optimizers:
    """All optimizers of a stack, as parts. Rows and slots here are the stack's; a part counts from its first row."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = list(parts)
        assert len({kind(part.span.recipes[0]) for part in self.parts}) == len(self.parts), "a kind has one part"
        self._ruled = [part for part in self.parts if isinstance(part, StackedOptimizer)]

    @classmethod
    def of(cls, stack: Stack) -> Optimizers:
        """Create the optimizers of a stack from the members' current training state."""
        return cls([_make_part(span) for span in spans(stack)])

    def at(self, row: int) -> tuple[Part, int]:
        """Return the part that has a row, and the row's index in it."""
        part = next(part for part in self.parts if part.span.start <= row < part.span.stop)
        return part, row - part.span.start

    def ruled(self) -> list[StackedOptimizer]:
        """Return the parts of a stack in which every member's optimizer has a rule."""
        assert len(self._ruled) == len(self.parts), "only optimizers with a rule are captured"
        return self._ruled

    def tensors(self) -> list[Tensor]:
        """Return all optimizer state, each tensor once."""
        return [tensor for part in self._ruled for tensor in part.tensors()]

    def update(self, grads: Grads, active: Tensor | None) -> None:
        """Take one step from the gradients of all rows, for the members in `active`; None: for all."""
        for part in self.parts:
            part_grads = [None if grad is None else part.span.of(grad) for grad in grads]
            part.update(part_grads, None if active is None else part.span.of(active))

    @property
    def writes_gradients(self) -> bool:
        """Whether an update may write to the gradients, as optimizers without a rule may."""
        return len(self._ruled) < len(self.parts)

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Inside this context, optimizers with a train and an eval mode are in eval mode, with its weights."""
        with ExitStack() as contexts:
            for part in self.parts:
                if isinstance(part, PerMemberOptimizers):
                    contexts.enter_context(part.eval_mode())
            yield

    def failures(self) -> dict[int, Exception]:
        """Return the errors that members' optimizers raised in the last update, by slot. Other members were updated."""
        parts = [part for part in self.parts if isinstance(part, PerMemberOptimizers)]
        return {part.span.start + slot: error for part in parts for slot, error in part.failed.items()}

    # --- schedules --------------------------------------------------------------------------------------------------

    @property
    def last_rates(self) -> list[float]:
        """Each member's learning rate at its last step."""
        return [rate for part in self.parts for rate in part.last_rates]

    @property
    def raises_in(self) -> int | None:
        """The step of those that `look_ahead` computed after which the first schedule raises; None if none does."""
        return min((part.raises_in for part in self._ruled if part.raises_in is not None), default=None)

    @property
    def schedule_failed(self) -> bool:
        """Whether a schedule raised after the last step."""
        return any(part.schedule_failed for part in self.parts)

    def schedule_failures(self) -> dict[int, Exception]:
        """Return the errors that members' schedules raised after completed steps, by slot."""
        return {
            part.span.start + slot: error for part in self.parts for slot, error in part.schedule_failures().items()
        }

    def look_ahead(self, steps: int, least: int = FEW) -> None:
        """Compute the hyper-parameters of the next steps if schedules allow it, so that a step runs no Python for
        them."""
        for part in self._ruled:
            part.look_ahead(steps, least)

    def step_schedules(self) -> None:
        """Advance the schedules after an optimizer step of all members."""
        for part in self.parts:
            part.step_schedules()

    def skip_steps(self, steps: int) -> None:
        """Advance the schedules after steps on the device, which read their hyper-parameters from a table."""
        for part in self.ruled():
            part.skip_steps(steps)

    def note_rates(self) -> None:
        """Record the learning rates of the last completed step."""
        for part in self._ruled:
            part.note_rates()

    def sync_schedules(self) -> None:
        """Advance the schedule objects by the steps that read their values from a table."""
        for part in self._ruled:
            part.sync_schedules()

    def freeze_schedules(self, slots: Collection[int]) -> None:
        """Stop the schedules of these members, which have left and whose rows are free."""
        for part in self._ruled:
            part.sync_schedules()
            part.freeze_schedules({slot - part.span.start for slot in slots})

    def end_epoch(self, values: Mapping[int, float | None]) -> None:
        """Advance the per-epoch schedules of these slots, with the watched value of each."""
        for slot, value in values.items():
            part, index = self.at(slot)
            job = part.span.recipes[index].member.job
            if job.schedule_every == "epoch" and job.schedule is not None:
                part.end_epoch(index, value)

    # --- members' state ---------------------------------------------------------------------------------------------

    def prepare_kernels(self, dtypes: Sequence[torch.dtype | None]) -> None:
        """Start to compile the kernels that updates on a GPU will use, for gradients of these dtypes."""
        for part in self._ruled:
            part.prepare_kernels(dtypes)

    def reads_half(self) -> bool:
        """Return whether `update` accepts gradients in half precision for parameters in float32."""
        return not self.writes_gradients and all(part.reads_half() for part in self._ruled)

    def rows(self, slot: int) -> list[Tensor]:
        """Return a member's rows of all state tensors, on the device."""
        part, index = self.at(slot)
        return part.rows(index)

    def state_dict(self, slot: int, rows: Sequence[Tensor]) -> dict[str, Any]:
        """Return a member's `state_dict()`, made from its `rows` on the host."""
        part, index = self.at(slot)
        return part.state_dict(index, rows)

    def schedule_state(self, slot: int) -> dict[str, Any] | None:
        """Return the `state_dict()` of a member's scheduler; None if it has none."""
        part, index = self.at(slot)
        return part.schedule_state(index)

    def load(self, slot: int, step: int | None) -> None:
        """Load a member's saved optimizer state. `step`: continue its schedule as if so many steps had been taken."""
        part, index = self.at(slot)
        part.load(index, step)

    # --- members join and leave -------------------------------------------------------------------------------------

    def merged(self, stack: Stack, other: Optimizers) -> Optimizers:
        """Return the optimizers of a stack of the members of both, in the order of `ordered`."""
        mine, theirs = self._by_kind(), other._by_kind()
        parts: list[Part] = []
        for span in spans(stack):
            a, b = (by_kind.get(kind(span.recipes[0])) for by_kind in (mine, theirs))
            only = a or b
            assert only is not None
            parts.append(only.keep(span, span.rows) if a is None or b is None else a.merged(span, b))  # type: ignore[arg-type]  # parts of one kind are of one class
        return Optimizers(parts)

    def _by_kind(self) -> dict[Hashable, Part]:
        return {kind(part.span.recipes[0]): part for part in self.parts}

    def keep(self, stack: Stack, rows: Sequence[int]) -> Optimizers:
        """Return the optimizers of `stack`, whose rows were `rows` of this one."""
        parts: list[Part] = []
        for span in spans(stack):
            part_rows = rows[span.start : span.stop]
            part, _ = self.at(part_rows[0])
            parts.append(part.keep(span, [row - part.span.start for row in part_rows]))
        return Optimizers(parts)

    def take(self, other: Optimizers, rows: Sequence[int], theirs: Sequence[int]) -> None:
        """Copy rows `theirs` of the other optimizers into `rows`."""
        for part in other.parts:
            span = part.span
            pairs = [
                (row, their_row)
                for row, their_row in zip(rows, theirs, strict=True)
                if span.start <= their_row < span.stop
            ]
            mine, _ = self.at(pairs[0][0])
            part_rows = [row - mine.span.start for row, _ in pairs], [their_row - span.start for _, their_row in pairs]
            mine.take(part, *part_rows)  # type: ignore[arg-type]  # parts of one kind are of one class

    def put(self, rows: Sequence[int], index: Tensor, other: Optimizers) -> None:
        """Replace the members in these rows by the other's members, in their order. `index` holds the same rows on the
        device."""
        for part in other.ruled():
            span_rows = slice(part.span.start, part.span.stop)
            mine, _ = self.at(rows[span_rows.start])
            assert isinstance(mine, StackedOptimizer)
            first = mine.span.start
            mine.put([row - first for row in rows[span_rows]], index[span_rows] - first, part)


def _make_part(span: Span) -> Part:
    return PerMemberOptimizers.of(span) if span.recipes[0].optimizer.flags is None else StackedOptimizer(span)
