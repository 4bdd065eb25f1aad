"""One optimizer rule for many members: state with a member axis, hyper-parameters and schedules as columns."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.engine.optim.columns import Columns
from shoal.engine.optim.compile_fence import is_traced
from shoal.engine.optim.hparams import merge_flags, rule_for
from shoal.engine.optim.rule import Rule
from shoal.engine.optim.schedules import ScheduleRunner
from shoal.engine.optim.state import optimizer_state_dict, torch_entry, torch_values
from shoal.engine.stack import _flat_state, _update_kernel, fused_update, transfer
from shoal.engine.stack._flat_state import FlatUpdate
from shoal.engine.stack.fused_update import FusedAdam

if TYPE_CHECKING:
    from shoal.engine.stack.optimizers import Grads, Span

States = list[list[dict[str, Tensor]]]
"""Optimizer state by parameter group and parameter."""


class StackedOptimizer:
    """One optimizer class for all its members: a rule per parameter group and a column per number.

    The columns hold the numbers of the next step; schedules write them.
    """

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
        self._make_state(held)
        self._load_state(range(len(span.rows)))
        self._set_up([groups[0].get("lr", float("nan")) for groups in values])

    def _make_state(self, held: Sequence[list[int]]) -> None:
        """Rules that serve all members, and fresh state."""
        self.groups: list[tuple[Rule, list[int]]] = []
        self.states: States = []
        for g, params in enumerate(held):
            flags = merge_flags(self.plans[0].kind, [plan.flags[g] for plan in self.plans if plan.flags is not None])
            assert flags is not None, "members of one kind have one structure"
            rule = rule_for(self.plans[0].kind, flags)
            self.groups.append((rule, params))
            self.states.append(rule.init_all([self.span.leaves[i] for i in params], self.columns.groups[g]))

    def _load_state(self, rows: Sequence[int]) -> None:
        """Copy the members' own optimizer state into these rows."""
        copies: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        for row in rows:
            for stacked, value in self._saved_state(self.span.rows[row]):
                copies[id(stacked), row] = stacked[row], value  # a clock that parameters share is written once
        transfer.fill(list(copies.values()))

    def _saved_state(self, slot: int) -> list[tuple[Tensor, Tensor]]:
        """A member's own optimizer state, each value with the stacked tensor it belongs to."""
        plan, member = self.plans[slot], self.span.recipes[slot].member
        saved = member.optimizer_state.get("state")
        if not saved:
            return []
        order = [position for group in plan.groups for position in group]
        entries = {position: saved.get(i, {}) for i, position in enumerate(order)}
        pairs = []
        for (rule, held), states in zip(self.groups, self.states, strict=True):
            for i, state in zip(held, states, strict=True):
                pairs += torch_values(rule, entries[self.span.trained[i]], state, step=member.step)
        return pairs

    def _set_up(self, last_rates: list[float]) -> None:
        """Make what refers to the stack's tensors as they are now; no schedule has been looked at yet."""
        leaves, kind = self.span.leaves, self.plans[0].kind
        self._fused: list[FusedAdam | FlatUpdate | None] = [
            _at_once(kind, rule, [leaves[i] for i in held], states)
            for (rule, held), states in zip(self.groups, self.states, strict=True)
        ]
        self.last_rates = last_rates
        """Every member's learning rate at its last step."""
        self.table: Tensor | None = None
        """The numbers of the coming steps, [G, names, M, steps + 1]; None: constant, or not known in advance."""
        self.raises_in: int | None = None
        """The step of the table after which the first schedule raises; None: after none."""
        self._ahead = 0
        self.freeze_schedules(())

    def tensors(self) -> list[Tensor]:
        """All state, each tensor once: parameters of a group share a clock."""
        return list({id(t): t for states in self.states for state in states for t in state.values()}.values())

    def bound(self, span: Span, moved: Mapping[int, Tensor], packed: Tensor) -> StackedOptimizer:
        """The same optimizer on other tensors, given by the ids of those that it has."""
        other = copy.copy(self)
        other.span = span
        other.states = [[{k: moved[id(t)] for k, t in state.items()} for state in states] for states in self.states]
        other.columns = self.columns.on(packed)
        other._fused = [None] * len(self.groups)
        return other

    def update(self, grads: Grads, active: Tensor | None) -> None:
        """One step of the members in `active`; None: of all."""
        leaves = self.span.leaves
        for g, ((rule, held), states) in enumerate(zip(self.groups, self.states, strict=True)):
            if not held:
                continue
            wanted: list[Tensor] = [grads[i] for i in held]  # type: ignore[misc]
            at_once, params, numbers = self._fused[g], [leaves[i] for i in held], self.columns.groups[g]
            if at_once is not None:
                at_once.update(wanted, numbers, active)
            elif not is_traced() and _update_kernel.suits(rule, params, states):
                _update_kernel.update(rule, params, wanted, states, numbers, active)
            elif not is_traced() and _flat_state.suits_copies(rule, params, states):
                _flat_state.update_copies(rule, params, wanted, states, numbers, active)
            else:
                rule.update_all_(params, wanted, states, numbers, active)

    # --- schedules --------------------------------------------------------------------------------------------------

    def freeze_schedules(self, slots: Collection[int]) -> None:
        """Stop the schedules of these members, which have left: their rows wait for others."""
        self._frozen = set(slots)
        self._stepped = any(
            member.job.schedule is not None and member.job.schedule_every == "step" and slot not in self._frozen
            for slot, member in enumerate(self.span.members)
        )
        self.schedule_failed = any(runner.error is not None for _, runner in self._moving())

    def look_ahead(self, steps: int, least: int) -> None:
        """Work out the numbers of the next `steps` steps, if schedules allow it and there are `least` of them."""
        self.sync_schedules()
        self.raises_in = None
        if not self._stepped or steps < least:
            return
        constant = self.columns.packed.cpu().unsqueeze(-1).expand(-1, -1, -1, steps + 1)
        tables = [
            constant[:, :, slot] if slot in self._frozen else runner.table(steps + 1)
            for slot, runner in enumerate(self._runners())
        ]
        self.raises_in = min((r.raises_in for _, r in self._moving() if r.raises_in is not None), default=None)
        if all(table is not None for table in tables):
            wide = torch.stack([tables[r] for r in self.span.rows], 2)  # type: ignore[misc]
            self.table = wide.to(self.span.device)

    def step_schedules(self) -> None:
        """Move schedules on after an optimizer step of all members."""
        if not self._stepped:
            return
        if self.table is not None:
            self._ahead += 1
            self.columns.packed.copy_(self.table[..., self._ahead])
            self.schedule_failed = self._ahead == self.raises_in
            return
        self.last_rates = self._current_rates()
        for slot, runner in self._moving():
            runner.step()
            self.schedule_failed |= runner.error is not None
            self._read_schedule(slot)

    def skip_steps(self, steps: int) -> None:
        """Move schedules on after steps that took their numbers from the table on the device."""
        if self.table is not None:
            self._ahead += steps
            self.schedule_failed = self._ahead == self.raises_in
        elif self._stepped:
            for slot, runner in self._moving():
                runner.step(steps - 1)
                self.last_rates[slot] = runner.values()[0].get("lr", float("nan"))
                runner.step()
                self.schedule_failed |= runner.error is not None

    def schedule_failures(self) -> dict[int, Exception]:
        """What members' schedules raised after a step that was taken, by slots."""
        if not self.schedule_failed:
            return {}
        self.note_rates()
        self.sync_schedules()
        return {slot: runner.error for slot, runner in self._moving() if runner.error is not None}

    def note_rates(self) -> None:
        """Note the learning rates of the last step taken."""
        names = self.columns.names
        if self.table is not None and self._ahead and "lr" in names:
            self.last_rates = self.table[0, names.index("lr"), : len(self.last_rates), self._ahead - 1].tolist()
        elif not self._stepped:
            self.last_rates = self._current_rates()

    def sync_schedules(self) -> None:
        """Catch the schedules up with the steps that took their numbers from the table."""
        if self.table is not None:
            for _, runner in self._moving():
                runner.step(self._ahead)
        self.table, self._ahead = None, 0

    def end_epoch(self, slot: int, value: float | None) -> None:
        """Move one member's epoch schedule on; `value`: the watched value."""
        self.sync_schedules()
        runner = self._runners()[slot]
        if not runner.needs_metric or value is not None:
            runner.epoch(value)
            self.schedule_failed |= runner.error is not None
        self._read_schedule(slot)

    def _read_schedule(self, slot: int) -> None:
        values = self._runners()[slot].values()
        for row, owner in enumerate(self.span.rows):
            if owner == slot:
                self.columns.set_row(row, values)

    def _runners(self) -> list[ScheduleRunner]:
        return [plan.runner for plan in self.plans if plan.runner is not None]

    def _moving(self) -> list[tuple[int, ScheduleRunner]]:
        return [(slot, runner) for slot, runner in enumerate(self._runners()) if slot not in self._frozen]

    def _current_rates(self) -> list[float]:
        count = len(self.span.recipes)
        if "lr" not in self.columns.names:
            return [float("nan")] * count
        rates: list[float] = self.columns.groups[0]["lr"][:count].tolist()
        return rates

    # --- members' state ---------------------------------------------------------------------------------------------

    def rows(self, slot: int) -> list[Tensor]:
        """A member's row of every state tensor, and its numbers."""
        return [*(tensor[slot] for tensor in self.tensors()), self.columns.packed[:, :, slot]]

    def state_dict(self, slot: int, rows: Sequence[Tensor]) -> dict[str, Any]:
        """A member's state_dict(), from its `rows` on the host."""
        plan = self.plans[slot]
        assert plan.runner is not None
        *state_rows, last = rows
        row_of = dict(zip(map(id, self.tensors()), state_rows, strict=True))
        numbers = self.columns.named(last)
        taken: set[int] = set()

        def own(row: Tensor) -> Tensor:
            """A row that is a tensor by itself, the first time as it is; others are copied."""
            alone = row.untyped_storage().nbytes() == row.nbytes and id(row) not in taken
            taken.add(id(row))
            return row if alone and row.device.type == "cpu" and self.span.stack.device.type != "cpu" else row.clone()

        entries: dict[int, dict[str, Tensor]] = {}
        for g, ((rule, held), states) in enumerate(zip(self.groups, self.states, strict=True)):
            for i, state in zip(held, states, strict=True):
                copies = {name: own(row_of[id(tensor)]) for name, tensor in state.items()}
                entries[self.span.trained[i]] = torch_entry(rule, copies, numbers[g])
            for position in set(plan.groups[g]) - set(self.span.trained):
                entries[position] = rule.fresh_entry(self.span.stack.params[position][0], numbers[g])
        order = [position for group in plan.groups for position in group]
        return optimizer_state_dict(plan.skeleton(), [entries.get(p, {}) for p in order], plan.runner.groups())

    def schedule_state(self, slot: int) -> dict[str, Any] | None:
        """A member's scheduler's state_dict(); None: it has none."""
        runner = self.plans[slot].runner
        assert runner is not None
        return runner.scheduler_state

    def load(self, slot: int, step: int | None) -> None:
        """Take the member's own optimizer state as it is now; `step`: continue its schedule as after so many steps."""
        self.sync_schedules()
        plan, member = self.plans[slot], self.span.members[slot]
        assert plan.runner is not None
        if member.optimizer_state:
            plan.runner.resume(member.optimizer_state["param_groups"], None)
        if step is not None:
            plan.runner.jump(step)
        self._read_schedule(slot)
        rows = [row for row, owner in enumerate(self.span.rows) if owner == slot]
        for g, ((rule, held), states) in enumerate(zip(self.groups, self.states, strict=True)):
            numbers = {name: column[rows] for name, column in self.columns.groups[g].items()}
            fresh = rule.init_all([self.span.leaves[i][rows] for i in held], numbers)
            for state, start in zip(states, fresh, strict=True):
                for name, value in state.items():
                    value[rows] = start[name]
        self._load_state(rows)

    # --- members join and leave -------------------------------------------------------------------------------------

    def merged(self, span: Span, other: StackedOptimizer) -> StackedOptimizer:
        """An optimizer of both's members; a term that only some of them have is zero for the others."""
        self.sync_schedules()
        other.sync_schedules()
        count = len(self.plans)
        new = copy.copy(self)
        new.span, new.plans = span, [*self.plans, *other.plans]
        sources = [(self, slot) if slot < count else (other, slot - count) for slot in span.rows]
        new.columns = Columns([source.columns.row(row) for source, row in sources], device=span.device)
        new._make_state([held for _, held in self.groups])
        rows = slice(0, count), slice(count, len(new.plans))
        for value, mine, theirs in _same_entries(new.states, self.states, other.states):
            for places, part in zip(rows, (mine, theirs), strict=True):
                if part is not None:
                    value[places] = part[: places.stop - places.start]
            value[len(new.plans) :] = value[len(new.plans) - 1]
        new._set_up([*self.last_rates, *other.last_rates])
        return new

    def take(self, other: StackedOptimizer, rows: list[int], theirs: list[int]) -> None:
        """Copy these rows from the other's rows `theirs`; an entry that it lacks is zero."""
        other.sync_schedules()
        for mine, value in _same_entries(self.states, other.states):
            for row, place in zip(rows, theirs, strict=True):  # a list as an index would have the device wait for us
                if value is None:
                    mine[row].zero_()
                else:
                    mine[row].copy_(value[place])
        for row, place in zip(rows, theirs, strict=True):
            self.columns.packed[:, :, row].copy_(other.columns.packed[:, :, place])
            if row < len(self.last_rates):
                self.last_rates[row] = other.last_rates[place]

    def put(self, rows: Sequence[int], index: Tensor, other: StackedOptimizer) -> None:
        """Let the other's members have these rows, in their order; an entry that it lacks is zero."""
        self.sync_schedules()
        for mine, value in _same_entries(self.states, other.states):
            if value is None:
                mine.index_fill_(0, index, 0)
            else:
                mine.index_copy_(0, index, value.to(mine.dtype))
        self.columns.packed.index_copy_(2, index, other.columns.packed)
        for row, plan, rate in zip(rows, other.plans, other.last_rates, strict=True):
            self.plans[row], self.last_rates[row] = plan, rate

    def keep(self, span: Span, rows: list[int]) -> StackedOptimizer:
        """An optimizer of these rows, which are those of `span` now."""
        self.sync_schedules()
        new = copy.copy(self)
        new.span = span
        new.plans = [recipe.optimizer for recipe in span.recipes]
        new.columns = self.columns.on(self.columns.packed[:, :, rows])
        moved = {id(t): t[rows] for t in self.tensors()}
        new.states = [[{k: moved[id(t)] for k, t in state.items()} for state in states] for states in self.states]
        new._set_up([self.last_rates[row] for row in rows[: len(new.plans)]])
        return new


def _at_once(
    kind: type[Optimizer], rule: Rule, params: list[Tensor], states: list[dict[str, Tensor]]
) -> FusedAdam | FlatUpdate | None:
    """A faster way than parameter by parameter, where there is one."""
    if fused_update.suits(kind, params):
        return FusedAdam(rule, params, states)
    return FlatUpdate(rule, params, states) if _flat_state.suits(rule, params, states) else None


def _same_entries(first: States, *others: States) -> Iterator[tuple[Any, ...]]:
    """Every tensor of the first's state once, with the others' that mean the same; None: one lacks it."""
    seen: set[int] = set()
    for groups in zip(first, *others, strict=True):
        for state, *more in zip(*groups, strict=True):
            for name, value in state.items():
                if id(value) not in seen:
                    seen.add(id(value))
                    yield value, *(other.get(name) for other in more)
