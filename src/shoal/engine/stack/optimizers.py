"""What updates a stack: a part for each kind of optimizer among its members, on neighbouring rows.

Forward and backward know nothing of optimizers, so members with different ones are one stack. Its rows are ordered by
kind; each part works on views of its own rows, and a member's bits are those it has in any company.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from shoal.engine.members.member import Member
from shoal.engine.optim import (
    Columns,
    Rule,
    merge_flags,
    optimizer_state_dict,
    rule_for,
    torch_entry,
    torch_values,
)
from shoal.engine.optim.compile_fence import is_traced
from shoal.engine.recipes.recipe import Recipe
from shoal.engine.stack import _flat_state, fused_update, transfer
from shoal.engine.stack._flat_state import FlatUpdate
from shoal.engine.stack._per_member_optimizers import PerMemberOptimizers
from shoal.engine.stack.fused_update import FusedAdam

if TYPE_CHECKING:
    from shoal.engine.stack.stack import Stack

Grads = Sequence[Tensor | None]


def kind(recipe: Recipe) -> Hashable:
    """What members of one part have in common: a rule, or that none of them has one."""
    plan = recipe.optimizer
    return plan.key if plan.flags is not None else None


def ordered(recipes: Sequence[Recipe]) -> list[int]:
    """Their places such that those of one kind are neighbours: kinds as they come first, members as they come."""
    places: dict[Hashable, list[int]] = {}
    for place, recipe in enumerate(recipes):
        places.setdefault(kind(recipe), []).append(place)
    return [place for own in places.values() for place in own]


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
        assert stack is not None, "who has a stack's optimizer has the stack"
        return stack

    @property
    def recipes(self) -> list[Recipe]:
        return self.stack.recipes[self.start : self.stop]

    @property
    def members(self) -> list[Member]:
        return [recipe.member for recipe in self.recipes]

    @property
    def rows(self) -> list[int]:
        """For every row, whose it is."""
        return [own - self.start for own in self.stack.rows[self.start : self.stop]]


def spans(stack: Stack) -> Iterator[Span]:
    """The rows of each kind."""
    kinds = [kind(stack.recipes[own]) for own in stack.rows]
    start = 0
    for row in range(1, len(kinds) + 1):
        if row == len(kinds) or kinds[row] != kinds[start]:
            yield Span(stack, start, row)
            start = row


class Optimizers:
    """The parts of a stack's update. Rows and slots here are the stack's, those of a part are counted from its own."""

    def __init__(self, parts: Sequence[StackedOptimizer | PerMemberOptimizers]) -> None:
        self.parts = list(parts)
        assert len({kind(part.span.recipes[0]) for part in self.parts}) == len(self.parts), "a kind has one part"

    @classmethod
    def of(cls, stack: Stack) -> Optimizers:
        """Of members wherever they are in their training."""
        return cls([_part(span) for span in spans(stack)])

    def at(self, row: int) -> StackedOptimizer | PerMemberOptimizers:
        """The part that has a row."""
        return next(part for part in self.parts if part.span.start <= row < part.span.stop)

    def ruled(self) -> list[StackedOptimizer]:
        """The parts of a stack in which every member's optimizer has a rule."""
        found = [part for part in self.parts if isinstance(part, StackedOptimizer)]
        assert len(found) == len(self.parts), "only optimizers with a rule are captured"
        return found

    def tensors(self) -> list[Tensor]:
        """All optimizer state, each tensor once."""
        return [tensor for part in self.parts for tensor in part.tensors()]

    def update(self, grads: Grads, active: Tensor | None) -> None:
        """One step from the gradients of all rows; members outside `active` sit out."""
        for part in self.parts:
            own = [None if grad is None else part.span.of(grad) for grad in grads]
            part.update(own, None if active is None else part.span.of(active))

    def failures(self) -> dict[int, Exception]:
        """Whose optimizer raised in the last update, by slots, and what; the others have had theirs."""
        own = [part for part in self.parts if isinstance(part, PerMemberOptimizers)]
        return {part.span.start + slot: error for part in own for slot, error in part.failed.items()}

    def rows(self, slot: int) -> list[Tensor]:
        """All that is a member's own, as it lies on the device."""
        part = self.at(slot)
        return part.rows(slot - part.span.start)

    def state_dict(self, slot: int, rows: Sequence[Tensor]) -> dict[str, Any]:
        """A member's state_dict(), from its `rows` on the host."""
        part = self.at(slot)
        return part.state_dict(slot - part.span.start, rows)

    def schedule_state(self, slot: int) -> dict[str, Any] | None:
        part = self.at(slot)
        return part.schedule_state(slot - part.span.start)

    def merged(self, stack: Stack, other: Optimizers) -> Optimizers:
        """For a stack of both's members, ordered as `ordered` orders them."""
        mine, theirs = self._by_kind(), other._by_kind()
        parts: list[StackedOptimizer | PerMemberOptimizers] = []
        for span in spans(stack):
            a, b = (found.get(kind(span.recipes[0])) for found in (mine, theirs))
            if a is not None and b is not None:
                parts.append(a.merged(span, b))
            else:
                only = a or b
                assert only is not None
                parts.append(only.keep(span, span.rows))
        return Optimizers(parts)

    def _by_kind(self) -> dict[Hashable, StackedOptimizer | PerMemberOptimizers]:
        return {kind(part.span.recipes[0]): part for part in self.parts}

    def keep(self, stack: Stack, rows: Sequence[int]) -> Optimizers:
        """For a stack whose rows were these rows of this one."""
        parts: list[StackedOptimizer | PerMemberOptimizers] = []
        for span in spans(stack):
            own = rows[span.start : span.stop]
            part = self.at(own[0])
            parts.append(part.keep(span, [row - part.span.start for row in own]))
        return Optimizers(parts)

    def take(self, other: Optimizers, rows: Sequence[int], theirs: Sequence[int]) -> None:
        """Be, for these rows, what another one is in those of its own."""
        for part in other.parts:
            span = part.span
            pairs = [(row, own) for row, own in zip(rows, theirs, strict=True) if span.start <= own < span.stop]
            mine = self.at(pairs[0][0])
            first = mine.span.start
            if isinstance(mine, StackedOptimizer) and isinstance(part, StackedOptimizer):
                mine.take(part, [row - first for row, _ in pairs], [own - span.start for _, own in pairs])
            elif isinstance(mine, PerMemberOptimizers):
                mine.take()

    def put(self, rows: Sequence[int], index: Tensor, other: Optimizers) -> None:
        """Make rows what the other's are, one after the other, in place; `index`: the same rows on the device."""
        for part in other.parts:
            own = slice(part.span.start, part.span.stop)
            mine = self.at(rows[own.start])
            assert isinstance(mine, StackedOptimizer) and isinstance(part, StackedOptimizer)
            first = mine.span.start
            mine.put([row - first for row in rows[own]], index[own] - first, part)


def _part(span: Span) -> StackedOptimizer | PerMemberOptimizers:
    return PerMemberOptimizers(span) if span.recipes[0].optimizer.flags is None else StackedOptimizer(span)


class StackedOptimizer:
    """One optimizer class for all its members: a rule per parameter group and a column per number."""

    def __init__(self, span: Span) -> None:
        plans = [recipe.optimizer for recipe in span.recipes]
        self.span, self.plans = span, plans
        for plan, member in zip(plans, span.members, strict=True):
            if plan.runner is not None and member.optimizer_state:
                plan.runner.resume(member.optimizer_state["param_groups"], member.schedule_state)
        values = [plan.runner.values() for plan in plans if plan.runner is not None]
        self.columns = Columns([values[r] for r in span.rows], device=span.device)
        place = {index: i for i, index in enumerate(span.trained)}
        held = [[place[p] for p in positions if p in place] for positions in plans[0].groups]
        self._begin(held)
        self._load(range(len(span.rows)))
        self._set_up()

    def _begin(self, held: Sequence[list[int]]) -> None:
        """Rules that serve all members, and fresh state."""
        self.groups: list[tuple[Rule, list[int]]] = []
        self.states: list[list[dict[str, Tensor]]] = []
        for g, own in enumerate(held):
            flags = merge_flags(self.plans[0].kind, [plan.flags[g] for plan in self.plans if plan.flags is not None])
            assert flags is not None, "members of one kind have one structure"
            rule = rule_for(self.plans[0].kind, flags)
            self.groups.append((rule, own))
            self.states.append(rule.init_all([self.span.leaves[i] for i in own], self.columns.groups[g]))

    def _load(self, rows: Sequence[int]) -> None:
        """What the optimizers of these rows' members have become elsewhere."""
        found: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        for row in rows:
            for stacked, value in self._known(self.span.rows[row]):
                found[id(stacked), row] = stacked[row], value  # a clock that parameters share is written once
        transfer.fill(list(found.values()))

    def _known(self, slot: int) -> list[tuple[Tensor, Tensor]]:
        """A member's own state, with the tensors it goes to."""
        plan, member = self.plans[slot], self.span.recipes[slot].member
        known = member.optimizer_state.get("state")
        if not known:
            return []
        order = [position for group in plan.groups for position in group]
        entries = {position: known.get(i, {}) for i, position in enumerate(order)}
        found = []
        for (rule, held), states in zip(self.groups, self.states, strict=True):
            for i, state in zip(held, states, strict=True):
                found += torch_values(rule, entries[self.span.trained[i]], state, step=member.step)
        return found

    def _set_up(self) -> None:
        """What refers to the stack's tensors, as they are now."""
        leaves, kind = self.span.leaves, self.plans[0].kind
        self._fused: list[FusedAdam | FlatUpdate | None] = [
            _at_once(kind, rule, [leaves[i] for i in held], states)
            for (rule, held), states in zip(self.groups, self.states, strict=True)
        ]

    def tensors(self) -> list[Tensor]:
        """All state, each tensor once: parameters of a group share a clock."""
        found = {id(t): t for states in self.states for state in states for t in state.values()}
        return list(found.values())

    def bound(self, span: Span, moved: Mapping[int, Tensor], packed: Tensor) -> StackedOptimizer:
        """The same on other tensors, by the ids of those that it has."""
        found = object.__new__(StackedOptimizer)
        found.span, found.plans, found.groups = span, self.plans, self.groups
        found.states = [[{k: moved[id(t)] for k, t in state.items()} for state in states] for states in self.states]
        found.columns = object.__new__(Columns)
        found.columns.names = self.columns.names
        found.columns._view(packed)
        found._fused = [None] * len(self.groups)
        return found

    def update(self, grads: Grads, active: Tensor | None) -> None:
        leaves = self.span.leaves
        for g, ((rule, held), states) in enumerate(zip(self.groups, self.states, strict=True)):
            if not held:
                continue
            wanted: list[Tensor] = [grads[i] for i in held]  # type: ignore[misc]
            at_once, params, numbers = self._fused[g], [leaves[i] for i in held], self.columns.groups[g]
            if at_once is not None:
                at_once.update(wanted, numbers, active)
            elif not is_traced() and _flat_state.suits_copies(rule, params, states):
                _flat_state.update_copies(rule, params, wanted, states, numbers, active)
            else:
                rule.update_all_(params, wanted, states, numbers, active)

    def rows(self, slot: int) -> list[Tensor]:
        """A member's row of every state tensor, and its numbers."""
        return [*(tensor[slot] for tensor in self.tensors()), self.columns.packed[:, :, slot]]

    def state_dict(self, slot: int, rows: Sequence[Tensor]) -> dict[str, Any]:
        """A member's state_dict(), from its `rows` on the host."""
        plan = self.plans[slot]
        assert plan.runner is not None
        *own, last = rows
        found = dict(zip(map(id, self.tensors()), own, strict=True))
        numbers = self.columns.named(last)
        entries: dict[int, dict[str, Tensor]] = {}
        for g, ((rule, held), states) in enumerate(zip(self.groups, self.states, strict=True)):
            for i, state in zip(held, states, strict=True):
                copies = {name: found[id(tensor)].clone() for name, tensor in state.items()}
                entries[self.span.trained[i]] = torch_entry(rule, copies, numbers[g])
            for position in set(plan.groups[g]) - set(self.span.trained):
                entries[position] = rule.fresh_entry(self.span.stack.params[position][0], numbers[g])
        order = [position for group in plan.groups for position in group]
        return optimizer_state_dict(plan.skeleton(), [entries.get(p, {}) for p in order], plan.runner.groups())

    def schedule_state(self, slot: int) -> dict[str, Any] | None:
        runner = self.plans[slot].runner
        assert runner is not None
        return runner.scheduler_state

    def merged(self, span: Span, other: StackedOptimizer | PerMemberOptimizers) -> StackedOptimizer:
        """For rows of both's members; a term that only some of them have is zero for the others."""
        assert isinstance(other, StackedOptimizer)
        count = len(self.plans)
        new = object.__new__(StackedOptimizer)
        new.span, new.plans = span, [*self.plans, *other.plans]
        sources = [(self if own < count else other, own if own < count else own - count) for own in span.rows]
        new.columns = Columns([source.columns.row(row) for source, row in sources], device=span.device)
        new._begin([held for _, held in self.groups])
        rows = slice(0, count), slice(count, len(new.plans))
        for value, mine, theirs in _alike(new.states, self.states, other.states):
            for own, part in zip(rows, (mine, theirs), strict=True):
                if part is not None:
                    value[own] = part[: own.stop - own.start]
            value[len(new.plans) :] = value[len(new.plans) - 1]
        new._set_up()
        return new

    def take(self, other: StackedOptimizer, rows: list[int], theirs: list[int]) -> None:
        """Be, for these rows, what the other is in those; what it has not, is zero."""
        for mine, value in _alike(self.states, other.states):
            for row, place in zip(rows, theirs, strict=True):  # a list as an index would have the device wait for us
                if value is None:
                    mine[row].zero_()
                else:
                    mine[row].copy_(value[place])
        for row, place in zip(rows, theirs, strict=True):
            self.columns.packed[:, :, row].copy_(other.columns.packed[:, :, place])

    def put(self, rows: Sequence[int], index: Tensor, other: StackedOptimizer) -> None:
        """Make rows what the other's are, one after the other; what it has not, is zero."""
        for mine, value in _alike(self.states, other.states):
            if value is None:
                mine.index_fill_(0, index, 0)
            else:
                mine.index_copy_(0, index, value.to(mine.dtype))
        self.columns.packed.index_copy_(2, index, other.columns.packed)
        for row, plan in zip(rows, other.plans, strict=True):
            self.plans[row] = plan

    def keep(self, span: Span, rows: list[int]) -> StackedOptimizer:
        """For these rows, which are those of a span now."""
        kept = object.__new__(StackedOptimizer)
        kept.span, kept.groups = span, self.groups
        kept.plans = [recipe.optimizer for recipe in span.recipes]
        kept.columns = self.columns.keep(rows)
        moved = {id(t): t[rows] for t in self.tensors()}
        kept.states = [[{k: moved[id(t)] for k, t in state.items()} for state in states] for states in self.states]
        kept._set_up()
        return kept


def _at_once(
    kind: type[Optimizer], rule: Rule, params: list[Tensor], states: list[dict[str, Tensor]]
) -> FusedAdam | FlatUpdate | None:
    """A faster way than parameter by parameter, where there is one."""
    if fused_update.suits(kind, params):
        return FusedAdam(rule, params, states)
    return FlatUpdate(rule, params, states) if _flat_state.suits(rule, params, states) else None


def _alike(first: list[list[dict[str, Tensor]]], *others: list[list[dict[str, Tensor]]]) -> Iterator[tuple[Any, ...]]:
    """Every tensor of the first's state once, with the others' that mean the same; None: one has it not."""
    seen: set[int] = set()
    for groups in zip(first, *others, strict=True):
        for state, *more in zip(*groups, strict=True):
            for name, value in state.items():
                if id(value) not in seen:
                    seen.add(id(value))
                    yield value, *(own.get(name) for own in more)
