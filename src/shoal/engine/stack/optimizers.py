"""What updates a stack: a part for each kind of optimizer among its members, on neighbouring rows.

Forward and backward know nothing of optimizers, so members with different ones are one stack. Its rows are ordered by
kind. Each part works on views of its own rows, so a member's bits do not depend on the other members.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

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
"""Steps from which working out scheduled numbers in advance costs less than asking the schedules each time."""


def kind(recipe: Recipe) -> Hashable:
    """What members of one part have in common: a rule, or that none of them has one."""
    plan = recipe.optimizer
    return plan.key if plan.flags is not None else None


def ordered(recipes: Sequence[Recipe]) -> list[int]:
    """The recipes' places, sorted so that those of one kind are neighbours; otherwise as they come."""
    places: dict[Hashable, list[int]] = {}
    for place, recipe in enumerate(recipes):
        places.setdefault(kind(recipe), []).append(place)
    return [place for same_kind in places.values() for place in same_kind]


class Span:
    """Neighbouring rows of a stack, seen as a stack of their own."""

    def __init__(self, stack: Stack, start: int, stop: int) -> None:
        self._stack, self.start, self.stop = weakref.ref(stack), start, stop  # a GPU's memory waits for no collector
        self.whole = stop - start == len(stack.rows)
        self.leaves = [self.of(leaf.detach()) for leaf in stack.leaves]
        self.device, self.trained = stack.device, stack.trained

    def of(self, value: Tensor) -> Tensor:
        """These rows of a tensor of the stack's."""
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
        """For every row, the slot of its member."""
        return [slot - self.start for slot in self.stack.rows[self.start : self.stop]]


def spans(stack: Stack) -> Iterator[Span]:
    """The rows of each kind."""
    kinds = [kind(stack.recipes[slot]) for slot in stack.rows]
    start = 0
    for row in range(1, len(kinds) + 1):
        if row == len(kinds) or kinds[row] != kinds[start]:
            yield Span(stack, start, row)
            start = row


class Optimizers:
    """The parts of a stack's update. Rows and slots here are the stack's; a part counts from its own first row."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = list(parts)
        assert len({kind(part.span.recipes[0]) for part in self.parts}) == len(self.parts), "a kind has one part"
        self._ruled = [part for part in self.parts if isinstance(part, StackedOptimizer)]

    @classmethod
    def of(cls, stack: Stack) -> Optimizers:
        """The optimizers of members wherever they are in their training."""
        return cls([_part(span) for span in spans(stack)])

    def at(self, row: int) -> tuple[Part, int]:
        """The part that has a row, and the row's place in it."""
        part = next(part for part in self.parts if part.span.start <= row < part.span.stop)
        return part, row - part.span.start

    def ruled(self) -> list[StackedOptimizer]:
        """The parts of a stack in which every member's optimizer has a rule."""
        assert len(self._ruled) == len(self.parts), "only optimizers with a rule are captured"
        return self._ruled

    def tensors(self) -> list[Tensor]:
        """All optimizer state, each tensor once."""
        return [tensor for part in self._ruled for tensor in part.tensors()]

    def update(self, grads: Grads, active: Tensor | None) -> None:
        """One step from the gradients of all rows, for the members in `active`; None: for all."""
        for part in self.parts:
            of_part = [None if grad is None else part.span.of(grad) for grad in grads]
            part.update(of_part, None if active is None else part.span.of(active))

    @property
    def writes_gradients(self) -> bool:
        """Whether an update may write to the gradients, as optimizers without a rule may."""
        return len(self._ruled) < len(self.parts)

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Inside, optimizers with a train and an eval mode are in eval mode, and the weights are those of it."""
        with ExitStack() as inside:
            for part in self.parts:
                if isinstance(part, PerMemberOptimizers):
                    inside.enter_context(part.eval_mode())
            yield

    def failures(self) -> dict[int, Exception]:
        """What members' optimizers raised in the last update, by slots; the other members have had theirs."""
        parts = [part for part in self.parts if isinstance(part, PerMemberOptimizers)]
        return {part.span.start + slot: error for part in parts for slot, error in part.failed.items()}

    # --- schedules --------------------------------------------------------------------------------------------------

    @property
    def last_rates(self) -> list[float]:
        """Every member's learning rate at its last step."""
        return [rate for part in self.parts for rate in part.last_rates]

    @property
    def raises_in(self) -> int | None:
        """Of the steps that `look_ahead` saw: after which one the first schedule raises; None: after none."""
        return min((part.raises_in for part in self._ruled if part.raises_in is not None), default=None)

    @property
    def schedule_failed(self) -> bool:
        """Whether a schedule has raised after the last step."""
        return any(part.schedule_failed for part in self.parts)

    def schedule_failures(self) -> dict[int, Exception]:
        """What members' schedules raised after steps that were taken, by slots."""
        return {
            part.span.start + slot: error for part in self.parts for slot, error in part.schedule_failures().items()
        }

    def look_ahead(self, steps: int, least: int = FEW) -> None:
        """Work out the numbers of the next steps where schedules allow it, so that no step has to ask Python."""
        for part in self._ruled:
            part.look_ahead(steps, least)

    def step_schedules(self) -> None:
        """Move schedules on after an optimizer step of all members."""
        for part in self.parts:
            part.step_schedules()

    def skip_steps(self, steps: int) -> None:
        """Move schedules on after steps on the device, which took their numbers from a table."""
        for part in self.ruled():
            part.skip_steps(steps)

    def note_rates(self) -> None:
        """Note the learning rates of the last step taken."""
        for part in self._ruled:
            part.note_rates()

    def sync_schedules(self) -> None:
        """Catch the schedules up with the steps that took their numbers from a table."""
        for part in self._ruled:
            part.sync_schedules()

    def freeze_schedules(self, slots: Collection[int]) -> None:
        """Stop the schedules of these members, which have left: their rows wait for others."""
        for part in self._ruled:
            part.sync_schedules()
            part.freeze_schedules({slot - part.span.start for slot in slots})

    def end_epoch(self, values: Mapping[int, float | None]) -> None:
        """Move the epoch schedules of these slots on, with the watched value of each."""
        for slot, value in values.items():
            part, place = self.at(slot)
            job = part.span.recipes[place].member.job
            if job.schedule_every == "epoch" and job.schedule is not None:
                part.end_epoch(place, value)

    # --- members' state ---------------------------------------------------------------------------------------------

    def rows(self, slot: int) -> list[Tensor]:
        """A member's rows of all state tensors, as they lie on the device."""
        part, place = self.at(slot)
        return part.rows(place)

    def state_dict(self, slot: int, rows: Sequence[Tensor]) -> dict[str, Any]:
        """A member's state_dict(), from its `rows` on the host."""
        part, place = self.at(slot)
        return part.state_dict(place, rows)

    def schedule_state(self, slot: int) -> dict[str, Any] | None:
        """A member's scheduler's state_dict(); None: it has none."""
        part, place = self.at(slot)
        return part.schedule_state(place)

    def load(self, slot: int, step: int | None) -> None:
        """Take a member's own optimizer state as it is now; `step`: continue its schedule as after so many steps."""
        part, place = self.at(slot)
        part.load(place, step)

    # --- members join and leave -------------------------------------------------------------------------------------

    def merged(self, stack: Stack, other: Optimizers) -> Optimizers:
        """The optimizers of a stack of both's members, ordered as `ordered` orders them."""
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
        """The optimizers of a stack whose rows were these rows of this one."""
        parts: list[Part] = []
        for span in spans(stack):
            of_part = rows[span.start : span.stop]
            part, _ = self.at(of_part[0])
            parts.append(part.keep(span, [row - part.span.start for row in of_part]))
        return Optimizers(parts)

    def take(self, other: Optimizers, rows: Sequence[int], theirs: Sequence[int]) -> None:
        """Copy these rows from the other's rows `theirs`."""
        for part in other.parts:
            span = part.span
            pairs = [(row, place) for row, place in zip(rows, theirs, strict=True) if span.start <= place < span.stop]
            mine, _ = self.at(pairs[0][0])
            places = [row - mine.span.start for row, _ in pairs], [place - span.start for _, place in pairs]
            mine.take(part, *places)  # type: ignore[arg-type]  # parts of one kind are of one class

    def put(self, rows: Sequence[int], index: Tensor, other: Optimizers) -> None:
        """Let the other's members have these rows, in their order; `index`: the same rows on the device."""
        for part in other.ruled():
            places = slice(part.span.start, part.span.stop)
            mine, _ = self.at(rows[places.start])
            assert isinstance(mine, StackedOptimizer)
            first = mine.span.start
            mine.put([row - first for row in rows[places]], index[places] - first, part)


def _part(span: Span) -> Part:
    return PerMemberOptimizers.of(span) if span.recipes[0].optimizer.flags is None else StackedOptimizer(span)
