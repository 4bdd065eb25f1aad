"""One optimizer class for many members: state with a member axis, hyper-parameters and schedules as columns."""

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
"""Optimizer state: a list of parameter groups, each with a dict for each parameter."""


class StackedOptimizer:
    """Updates all members that use one optimizer class, with a rule per parameter group and a column per
    hyper-parameter.

    The columns hold the values of the next step; schedules write them.
    """

    def __init__(self, span: Span) -> None:
        plans = [recipe.optimizer for recipe in span.recipes]
        self.span, self.plans = span, plans
        for plan, member in zip(plans, span.members, strict=True):
            if plan.runner is not None and member.optimizer_state:
                plan.runner.resume(member.optimizer_state["param_groups"], member.schedule_state)
        values = [plan.runner.values() for plan in plans if plan.runner is not None]
        self.columns = Columns([values[r] for r in span.rows], device=span.device)
        position = {index: i for i, index in enumerate(span.trained)}
        group_params = [[position[p] for p in positions if p in position] for positions in plans[0].groups]
        self._make_state(group_params)
        self._load_state(range(len(span.rows)))
        self._set_up([groups[0].get("lr", float("nan")) for groups in values])

    def _make_state(self, group_params: Sequence[list[int]]) -> None:
        """Create the rule of each parameter group, which serves all members, and fresh state."""
        self.groups: list[tuple[Rule, list[int]]] = []
        self.states: States = []
        for g, params in enumerate(group_params):
            flags = merge_flags(self.plans[0].kind, [plan.flags[g] for plan in self.plans if plan.flags is not None])
            assert flags is not None, "members of one kind have one structure"
            rule = rule_for(self.plans[0].kind, flags)
            self.groups.append((rule, params))
            self.states.append(rule.init_all([self.span.leaves[i] for i in params], self.columns.groups[g]))

    def _load_state(self, rows: Sequence[int]) -> None:
        """Copy the members' saved optimizer state into these rows."""
        copies: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        for row in rows:
            for stacked, value in self._saved_state(self.span.rows[row]):
                copies[id(stacked), row] = stacked[row], value  # a step counter that parameters share is written once
        transfer.fill(list(copies.values()))

    def _saved_state(self, slot: int) -> list[tuple[Tensor, Tensor]]:
        """Return a member's saved optimizer state as pairs (stacked tensor, the member's value)."""
        plan, member = self.plans[slot], self.span.recipes[slot].member
        saved = member.optimizer_state.get("state")
        if not saved:
            return []
        order = [position for group in plan.groups for position in group]
        entries = {position: saved.get(i, {}) for i, position in enumerate(order)}
        pairs = []
        for (rule, indices), states in zip(self.groups, self.states, strict=True):
            for i, state in zip(indices, states, strict=True):
                pairs += torch_values(rule, entries[self.span.trained[i]], state, step=member.step)
        return pairs

    def _set_up(self, last_rates: list[float]) -> None:
        """Create what refers to the stack's current tensors, and start without a table of scheduled values."""
        leaves, kind = self.span.leaves, self.plans[0].kind
        self._fused: list[FusedAdam | FlatUpdate | None] = [
            _fast_update(kind, rule, [leaves[i] for i in indices], states)
            for (rule, indices), states in zip(self.groups, self.states, strict=True)
        ]
        self.last_rates = last_rates
        """Each member's learning rate at its last step."""
        self.table: Tensor | None = None
        """Hyper-parameters of the coming steps, [G, names, M, steps + 1]; None if they are constant or not known in
        advance."""
        self.raises_in: int | None = None
        """The step of the table after which the first schedule raises; None if none does."""
        self._ahead = 0
        self.freeze_schedules(())

    def tensors(self) -> list[Tensor]:
        """Return all state tensors, each once. Parameters of a group share their step counter."""
        return list({id(t): t for states in self.states for state in states for t in state.values()}.values())

    def bound(self, span: Span, moved: Mapping[int, Tensor], packed: Tensor) -> StackedOptimizer:
        """Return the same optimizer on other tensors. `moved` maps the id of each current state tensor to its
        replacement."""
        other = copy.copy(self)
        other.span = span
        other.states = [[{k: moved[id(t)] for k, t in state.items()} for state in states] for states in self.states]
        other.columns = self.columns.on(packed)
        other._fused = [None] * len(self.groups)
        return other

    def update(self, grads: Grads, active: Tensor | None) -> None:
        """Take one step for the members in `active`; None: for all."""
        leaves = self.span.leaves
        for g, ((rule, indices), states) in enumerate(zip(self.groups, self.states, strict=True)):
            if not indices:
                continue
            group_grads: list[Tensor] = [grads[i] for i in indices]  # type: ignore[misc]
            at_once, params, hparams = self._fused[g], [leaves[i] for i in indices], self.columns.groups[g]
            if at_once is None and not is_traced() and _update_kernel.suits(rule, params, states):
                _update_kernel.update(rule, params, group_grads, states, hparams, active)
                continue
            group_grads = [grad.to(param.dtype) for grad, param in zip(group_grads, params, strict=True)]
            if at_once is not None:
                at_once.update(group_grads, hparams, active)
            elif not is_traced() and _flat_state.suits_copies(rule, params, states):
                _flat_state.update_copies(rule, params, group_grads, states, hparams, active)
            else:
                rule.update_all_(params, group_grads, states, hparams, active)

    def prepare_kernels(self, dtypes: Sequence[torch.dtype | None]) -> None:
        """Start to compile the kernels of `update`, for gradients of these dtypes."""
        for (rule, indices), states in zip(self.groups, self.states, strict=True):
            params = [self.span.leaves[i] for i in indices]
            if _update_kernel.suits(rule, params, states):
                _update_kernel.prepare(rule, params, [dtypes[i] for i in indices])

    def reads_half(self) -> bool:
        """Return whether `update` accepts gradients in half precision for parameters in float32."""
        return all(
            _update_kernel.suits(rule, [self.span.leaves[i] for i in indices], states)
            for (rule, indices), states in zip(self.groups, self.states, strict=True)
            if indices
        )

    # --- schedules --------------------------------------------------------------------------------------------------

    def freeze_schedules(self, slots: Collection[int]) -> None:
        """Stop the schedules of these members, which have left and whose rows are free."""
        self._frozen = set(slots)
        self._stepped = any(
            member.job.schedule is not None and member.job.schedule_every == "step" and slot not in self._frozen
            for slot, member in enumerate(self.span.members)
        )
        self.schedule_failed = any(runner.error is not None for _, runner in self._active_runners())

    def look_ahead(self, steps: int, least: int) -> None:
        """Compute the hyper-parameters of the next `steps` steps, if schedules allow it and `steps` is at least
        `least`."""
        self.sync_schedules()
        self.raises_in = None
        if not self._stepped or steps < least:
            return
        constant = self.columns.packed.cpu().unsqueeze(-1).expand(-1, -1, -1, steps + 1)
        tables = [
            constant[:, :, slot] if slot in self._frozen else runner.table(steps + 1)
            for slot, runner in enumerate(self._runners())
        ]
        self.raises_in = min((r.raises_in for _, r in self._active_runners() if r.raises_in is not None), default=None)
        if all(table is not None for table in tables):
            wide = torch.stack([tables[r] for r in self.span.rows], 2)  # type: ignore[misc]
            self.table = wide.to(self.span.device)

    def step_schedules(self) -> None:
        """Advance the schedules after an optimizer step of all members."""
        if not self._stepped:
            return
        if self.table is not None:
            self._ahead += 1
            self.columns.packed.copy_(self.table[..., self._ahead])
            self.schedule_failed = self._ahead == self.raises_in
            return
        self.last_rates = self._current_rates()
        for slot, runner in self._active_runners():
            runner.step()
            self.schedule_failed |= runner.error is not None
            self._read_schedule(slot)

    def skip_steps(self, steps: int) -> None:
        """Advance the schedules after steps on the device, which read their hyper-parameters from the table."""
        if self.table is not None:
            self._ahead += steps
            self.schedule_failed = self._ahead == self.raises_in
        elif self._stepped:
            for slot, runner in self._active_runners():
                runner.step(steps - 1)
                self.last_rates[slot] = runner.values()[0].get("lr", float("nan"))
                runner.step()
                self.schedule_failed |= runner.error is not None

    def schedule_failures(self) -> dict[int, Exception]:
        """Return the errors that members' schedules raised after a completed step, by slot."""
        if not self.schedule_failed:
            return {}
        self.note_rates()
        self.sync_schedules()
        return {slot: runner.error for slot, runner in self._active_runners() if runner.error is not None}

    def note_rates(self) -> None:
        """Record the learning rates of the last completed step."""
        names = self.columns.names
        if self.table is not None and self._ahead and "lr" in names:
            self.last_rates = self.table[0, names.index("lr"), : len(self.last_rates), self._ahead - 1].tolist()
        elif not self._stepped:
            self.last_rates = self._current_rates()

    def sync_schedules(self) -> None:
        """Advance the schedule objects by the steps that read their values from the table, and drop the table."""
        if self.table is not None:
            for _, runner in self._active_runners():
                runner.step(self._ahead)
        self.table, self._ahead = None, 0

    def end_epoch(self, slot: int, value: float | None) -> None:
        """Advance one member's per-epoch schedule. `value` is the watched metric."""
        self.sync_schedules()
        runner = self._runners()[slot]
        if not runner.needs_metric or value is not None:
            runner.epoch(value)
            self.schedule_failed |= runner.error is not None
        self._read_schedule(slot)

    def _read_schedule(self, slot: int) -> None:
        """Copy a member's current hyper-parameters into its rows of the columns."""
        values = self._runners()[slot].values()
        for row, owner in enumerate(self.span.rows):
            if owner == slot:
                self.columns.set_row(row, values)

    def _runners(self) -> list[ScheduleRunner]:
        return [plan.runner for plan in self.plans if plan.runner is not None]

    def _active_runners(self) -> list[tuple[int, ScheduleRunner]]:
        """Return the schedules that are not frozen, with their slots."""
        return [(slot, runner) for slot, runner in enumerate(self._runners()) if slot not in self._frozen]

    def _current_rates(self) -> list[float]:
        count = len(self.span.recipes)
        if "lr" not in self.columns.names:
            return [float("nan")] * count
        rates: list[float] = self.columns.groups[0]["lr"][:count].tolist()
        return rates

    # --- members' state ---------------------------------------------------------------------------------------------

    def rows(self, slot: int) -> list[Tensor]:
        """Return a member's row of every state tensor, and its hyper-parameters."""
        return [*(tensor[slot] for tensor in self.tensors()), self.columns.packed[:, :, slot]]

    def state_dict(self, slot: int, rows: Sequence[Tensor]) -> dict[str, Any]:
        """Return a member's `state_dict()`, made from its `rows` on the host."""
        plan = self.plans[slot]
        assert plan.runner is not None
        *state_rows, packed_row = rows
        row_of = dict(zip(map(id, self.tensors()), state_rows, strict=True))
        hparams = self.columns.named(packed_row)
        used: set[int] = set()

        def own_memory(row: Tensor) -> Tensor:
            """Return a tensor that the member may keep: the row itself if nothing else uses its memory, else a copy."""
            alone = row.untyped_storage().nbytes() == row.nbytes and id(row) not in used
            used.add(id(row))
            return row if alone and row.device.type == "cpu" and self.span.stack.device.type != "cpu" else row.clone()

        order = [position for group in plan.groups for position in group]
        saved = self.span.recipes[slot].member.optimizer_state.get("state", {})
        entries: dict[int, dict[str, Tensor]] = {}
        for g, ((rule, indices), states) in enumerate(zip(self.groups, self.states, strict=True)):
            for i, state in zip(indices, states, strict=True):
                copies = {name: own_memory(row_of[id(tensor)]) for name, tensor in state.items()}
                entries[self.span.trained[i]] = torch_entry(rule, copies, hparams[g])
            for position in set(plan.groups[g]) - set(self.span.trained):
                earlier = saved.get(order.index(position), {})  # of steps that gave it a gradient
                fresh = rule.fresh_entry(self.span.stack.params[position][0], hparams[g])
                entries[position] = copy.deepcopy(earlier) or fresh
        return optimizer_state_dict(plan.skeleton(), [entries.get(p, {}) for p in order], plan.runner.groups())

    def schedule_state(self, slot: int) -> dict[str, Any] | None:
        """Return the `state_dict()` of a member's scheduler; None if it has none."""
        runner = self.plans[slot].runner
        assert runner is not None
        return runner.scheduler_state

    def load(self, slot: int, step: int | None) -> None:
        """Load the member's saved optimizer state. `step`: continue its schedule as if so many steps had been taken."""
        self.sync_schedules()
        plan, member = self.plans[slot], self.span.members[slot]
        assert plan.runner is not None
        if member.optimizer_state:
            plan.runner.resume(member.optimizer_state["param_groups"], None)
        if step is not None:
            plan.runner.jump(step)
        self._read_schedule(slot)
        rows = [row for row, owner in enumerate(self.span.rows) if owner == slot]
        for g, ((rule, indices), states) in enumerate(zip(self.groups, self.states, strict=True)):
            hparams = {name: column[rows] for name, column in self.columns.groups[g].items()}
            fresh = rule.init_all([self.span.leaves[i][rows] for i in indices], hparams)
            for state, start in zip(states, fresh, strict=True):
                for name, value in state.items():
                    value[rows] = start[name]
        self._load_state(rows)

    # --- members join and leave -------------------------------------------------------------------------------------

    def merged(self, span: Span, other: StackedOptimizer) -> StackedOptimizer:
        """Return an optimizer of the members of both. State that only some of them have, such as a momentum buffer, is
        zero for the others."""
        self.sync_schedules()
        other.sync_schedules()
        count = len(self.plans)
        new = copy.copy(self)
        new.span, new.plans = span, [*self.plans, *other.plans]
        sources = [(self, slot) if slot < count else (other, slot - count) for slot in span.rows]
        new.columns = Columns([source.columns.row(row) for source, row in sources], device=span.device)
        new._make_state([indices for _, indices in self.groups])
        rows = slice(0, count), slice(count, len(new.plans))
        for value, mine, theirs in _same_entries(new.states, self.states, other.states):
            for target_rows, part in zip(rows, (mine, theirs), strict=True):
                if part is not None:
                    value[target_rows] = part[: target_rows.stop - target_rows.start]
            value[len(new.plans) :] = value[len(new.plans) - 1]
        new._set_up([*self.last_rates, *other.last_rates])
        return new

    def take(self, other: StackedOptimizer, rows: list[int], theirs: list[int]) -> None:
        """Copy rows `theirs` of another optimizer into `rows`. State that the other lacks becomes zero."""
        other.sync_schedules()
        for mine, value in _same_entries(self.states, other.states):
            for row, their_row in zip(rows, theirs, strict=True):  # indexing with a list would wait for the device
                if value is None:
                    mine[row].zero_()
                else:
                    mine[row].copy_(value[their_row])
        for row, their_row in zip(rows, theirs, strict=True):
            self.columns.packed[:, :, row].copy_(other.columns.packed[:, :, their_row])
            if row < len(self.last_rates):
                self.last_rates[row] = other.last_rates[their_row]

    def put(self, rows: Sequence[int], index: Tensor, other: StackedOptimizer) -> None:
        """Replace the members in these rows by the other's members, in their order. State that the other lacks becomes
        zero."""
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
        """Return an optimizer of these rows only; they are the rows of `span`."""
        self.sync_schedules()
        new = copy.copy(self)
        new.span = span
        new.plans = [recipe.optimizer for recipe in span.recipes]
        new.columns = self.columns.on(self.columns.packed[:, :, rows])
        moved = {id(t): t[rows] for t in self.tensors()}
        new.states = [[{k: moved[id(t)] for k, t in state.items()} for state in states] for states in self.states]
        new._set_up([self.last_rates[row] for row in rows[: len(new.plans)]])
        return new


def _fast_update(
    kind: type[Optimizer], rule: Rule, params: list[Tensor], states: list[dict[str, Tensor]]
) -> FusedAdam | FlatUpdate | None:
    """Return a faster way to update the group than parameter by parameter, or None."""
    if fused_update.suits(kind, params):
        return FusedAdam(rule, params, states)
    return FlatUpdate(rule, params, states) if _flat_state.suits(rule, params, states) else None


def _same_entries(first: States, *others: States) -> Iterator[tuple[Any, ...]]:
    """Yield every tensor of the first's state once, with the corresponding tensors of the others; None for one that
    lacks it."""
    seen: set[int] = set()
    for groups in zip(first, *others, strict=True):
        for state, *more in zip(*groups, strict=True):
            for name, value in state.items():
                if id(value) not in seen:
                    seen.add(id(value))
                    yield value, *(other.get(name) for other in more)
