"""The state of a pack on its device: parameters, buffers, optimizer state and numbers, members first.

Rows beyond the members are padding: copies of the first member that train along and are never looked at. A pack of one
takes other kernels than a pack of two or more, so a member alone is padded to two, and its bits are those it has in
any company.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.pack.members import Member, make_optimizer, make_schedule
from shoal.pack.optim import (
    Columns,
    MemberScaler,
    Rule,
    clip_,
    from_torch_state,
    merge_flags,
    optimizer_state_dict,
    rule_for,
    to_torch_state,
)
from shoal.pack.recipe import OptimizerPlan, Recipe
from shoal.pack.stacked.fused import FusedAdam, suits
from shoal.pack.trace import used_params

Grads = list[Tensor | None]
Put = Callable[[Tensor, Tensor], None]
"""Copies some rows of the second tensor into the first."""


class Stack:
    """Members' training state with a member axis, and what one optimizer step does to it."""

    def __init__(self, recipes: Sequence[Recipe], *, size: int, channels_last: bool = False) -> None:
        """`channels_last`: filters of a stack of one are laid out as a GPU's convolutions want them."""
        self.recipes = list(recipes)
        self._channels_last = channels_last and size == 1
        first = recipes[0]
        self.device = first.member.device
        self.rows = [*range(len(recipes)), *[0] * (size - len(recipes))]
        graph = next(iter(first.steps.values()))
        models = [recipe.member.model for recipe in recipes]
        named = [dict(model.named_parameters()) for model in models]
        buffered = [dict(model.named_buffers()) for model in models]
        self.param_names, self.buffer_names = graph.params, graph.buffers
        self.params = [self._stacked([named[r][name] for r in self.rows]) for name in self.param_names]
        self.buffers = [self._stacked([buffered[r][name] for r in self.rows]) for name in self.buffer_names]
        trained = [named[0][name].requires_grad for name in self.param_names]
        used = used_params(graph)
        self.trained = [i for i, (wanted, touched) in enumerate(zip(trained, used, strict=True)) if wanted and touched]
        for index in self.trained:
            self.params[index].requires_grad_()
        self.active = torch.ones(size, dtype=torch.bool, device=self.device)
        job = first.member.job
        self.scaler = MemberScaler(size, device=self.device) if job.precision == "fp16" else None
        for row, own in enumerate(self.rows):
            scale = recipes[own].member.scaler_state
            if self.scaler is not None and scale is not None:
                self.scaler.load_state_dict(row, scale)
        norms = [r.member.job.clip_norm for r in recipes]
        self.max_norm = None
        if any(norm is not None for norm in norms):
            limits = [float("inf") if norms[r] is None else float(norms[r] or 0.0) for r in self.rows]
            self.max_norm = torch.tensor(limits, dtype=torch.float64, device=self.device)
        self.optimizer: StackedOptimizer | OwnOptimizers
        if first.optimizer.flags is None:
            self.optimizer = OwnOptimizers(self)
        else:
            self.optimizer = StackedOptimizer(self)

    def _stacked(self, values: list[Tensor]) -> Tensor:
        """Members' own tensors as one on the device, wherever their models are."""
        stacked = torch.stack([value.detach() for value in values]).to(self.device)
        if self._channels_last and stacked.dim() == 5:
            return stacked[0].contiguous(memory_format=torch.channels_last).unsqueeze(0)
        return stacked

    @property
    def members(self) -> list[Member]:
        return [recipe.member for recipe in self.recipes]

    @property
    def state(self) -> list[Tensor]:
        """Parameters and buffers, in the order programs take them."""
        return [*self.params, *self.buffers]

    @property
    def leaves(self) -> list[Tensor]:
        """The parameters that are trained."""
        return [self.params[index] for index in self.trained]

    @torch.no_grad()
    def apply(self, grads: Grads, active: Tensor | None) -> None:
        """One optimizer step from these gradients (one per trained parameter); members outside `active` sit out."""
        present = [grad for grad in grads if grad is not None]
        found_inf = self.scaler.unscale_(present) if self.scaler is not None else None
        if self.max_norm is not None:
            clip_(present, self.max_norm)
        if found_inf is not None:
            active = ~found_inf if active is None else active & ~found_inf
        self.optimizer.update(grads, active)
        if self.scaler is not None and found_inf is not None:
            self.scaler.update_(found_inf)

    @torch.no_grad()
    def set_buffers(self, after: dict[str, Tensor], ok: Tensor | None, before: list[Tensor]) -> None:
        """Take over the buffers a step left; members outside `ok` get back what they had before it."""
        for index, name in enumerate(self.buffer_names):
            value, own = after[name], self.buffers[index]
            if ok is not None:
                value = torch.where(ok.view(-1, *[1] * (value.dim() - 1)), value, before[index])
            if value is not own:
                own.copy_(value.detach())

    @torch.no_grad()
    def write_back(self, slot: int) -> None:
        """One member's weights, buffers and optimizer state, as its own."""
        member = self.members[slot]
        params, buffers = dict(member.model.named_parameters()), dict(member.model.named_buffers())
        for stacked, name in zip(self.params, self.param_names, strict=True):
            params[name].copy_(stacked[slot])
        for stacked, name in zip(self.buffers, self.buffer_names, strict=True):
            buffers[name].copy_(stacked[slot])
        member.optimizer_state = self.optimizer.state_dict(slot)
        member.schedule_state = self.optimizer.schedule_state(slot)
        member.scaler_state = None if self.scaler is None else self.scaler.state_dict(slot)

    @torch.no_grad()
    def merged(self, other: Stack, size: int) -> Stack:
        """One stack of this one's members and the other's, each as it is."""
        mine, theirs = list(range(len(self.recipes))), list(range(len(other.recipes)))
        count = len(mine) + len(theirs)
        rows = [*range(count), *[0] * (size - count)]

        def both(a: Tensor, b: Tensor) -> Tensor:
            return torch.cat([a.detach()[mine], b.detach()[theirs]])[rows]

        new = object.__new__(Stack)
        new.recipes, new.rows = [*self.recipes, *other.recipes], rows
        new.device, new.trained, new._channels_last = self.device, self.trained, False
        new.param_names, new.buffer_names = self.param_names, self.buffer_names
        new.params = [
            both(a, b).requires_grad_(a.requires_grad) for a, b in zip(self.params, other.params, strict=True)
        ]
        new.buffers = [both(a, b) for a, b in zip(self.buffers, other.buffers, strict=True)]
        new.active = both(self.active, other.active)
        new.scaler = None
        if self.scaler is not None and other.scaler is not None:
            new.scaler = MemberScaler(size, device=self.device)
            new.scaler.scale_M.copy_(both(self.scaler.scale_M, other.scaler.scale_M))
            new.scaler.growth_tracker_M.copy_(both(self.scaler.growth_tracker_M, other.scaler.growth_tracker_M))
        new.max_norm = None
        if self.max_norm is not None or other.max_norm is not None:
            new.max_norm = both(self._limits(), other._limits())
        new.optimizer = self.optimizer.merged(new, other.optimizer)
        return new

    def _limits(self) -> Tensor:
        if self.max_norm is not None:
            return self.max_norm
        return torch.full((len(self.rows),), float("inf"), dtype=torch.float64, device=self.device)

    @torch.no_grad()
    def put(self, row: int, one: Stack) -> None:
        """Make a row what a stack of one is, in place: its member sits there now."""
        self.recipes[row] = one.recipes[0]
        optimizer, theirs = self.optimizer, one.optimizer
        assert isinstance(optimizer, StackedOptimizer) and isinstance(theirs, StackedOptimizer)
        pairs = [*zip(self.params, one.params, strict=True), *zip(self.buffers, one.buffers, strict=True)]
        pairs.append((self.active, one.active))
        if self.scaler is not None and one.scaler is not None:
            pairs.append((self.scaler.scale_M, one.scaler.scale_M))
            pairs.append((self.scaler.growth_tracker_M, one.scaler.growth_tracker_M))
        if self.max_norm is not None:
            pairs.append((self.max_norm, one._limits()))
        for ours, value in [*pairs, *optimizer.pairs(theirs)]:
            ours.detach()[row].copy_(value.detach()[0])
        optimizer.columns.packed[:, :, row].copy_(theirs.columns.packed[:, :, 0])
        optimizer.plans[row] = theirs.plans[0]

    @torch.no_grad()
    def take(self, slots: Sequence[int], part: Stack) -> None:
        """Be, for these slots, what `part` is, which was kept from this stack."""
        rows = [row for row, own in enumerate(self.rows) if own in slots]
        theirs = [list(slots).index(self.rows[row]) for row in rows]

        def put(ours: Tensor, value: Tensor) -> None:
            ours.detach()[rows] = value.detach()[theirs]

        for ours, value in zip([*self.params, *self.buffers], [*part.params, *part.buffers], strict=True):
            put(ours, value)
        put(self.active, part.active)
        if self.scaler is not None and part.scaler is not None:
            put(self.scaler.scale_M, part.scaler.scale_M)
            put(self.scaler.growth_tracker_M, part.scaler.growth_tracker_M)
        self.optimizer.take(part.optimizer, put, rows, theirs)

    def keep(self, slots: Sequence[int], size: int) -> Stack:
        """The same training with only these members."""
        rows = [*slots, *[slots[0]] * (size - len(slots))]
        kept = object.__new__(Stack)
        kept.recipes = [self.recipes[slot] for slot in slots]
        kept.device, kept.trained, kept._channels_last = self.device, self.trained, False
        kept.param_names, kept.buffer_names = self.param_names, self.buffer_names
        kept.rows = [*range(len(slots)), *[0] * (size - len(slots))]
        kept.params = [p.detach()[rows].requires_grad_(p.requires_grad) for p in self.params]
        kept.buffers = [b[rows] for b in self.buffers]
        kept.active = self.active[rows]
        kept.scaler = None if self.scaler is None else self.scaler.keep(rows)
        kept.max_norm = None if self.max_norm is None else self.max_norm[rows]
        kept.optimizer = self.optimizer.keep(kept, rows)
        return kept


class StackedOptimizer:
    """One optimizer class for all members: a rule per parameter group and a column per number."""

    def __init__(self, stack: Stack) -> None:
        plans = [recipe.optimizer for recipe in stack.recipes]
        self.stack = stack
        self.plans = plans
        values = [plan.runner.values() for plan in plans if plan.runner is not None]
        self.columns = Columns([values[r] for r in stack.rows], device=stack.device)
        place = {index: i for i, index in enumerate(stack.trained)}
        self.groups: list[tuple[Rule, list[int]]] = []
        self.states: list[list[dict[str, Tensor]]] = []
        for g, positions in enumerate(plans[0].groups):
            flags = merge_flags(plans[0].kind, [plan.flags[g] for plan in plans if plan.flags is not None])
            assert flags is not None, "members of one recipe key have one structure"
            rule = rule_for(plans[0].kind, flags)
            held = [place[p] for p in positions if p in place]
            self.groups.append((rule, held))
            self.states.append(rule.init_all([stack.leaves[i].detach() for i in held], self.columns.groups[g]))
        for row, own in enumerate(stack.rows):
            self._load(row, plans[own], stack.members[own])
        self._set_up()

    def _load(self, row: int, plan: OptimizerPlan, member: Member) -> None:
        """What a member's optimizer has become elsewhere."""
        known = member.optimizer_state.get("state")
        if not known:
            return
        order = [position for group in plan.groups for position in group]
        entries = {position: known.get(i, {}) for i, position in enumerate(order)}
        for (rule, held), states in zip(self.groups, self.states, strict=True):
            for i, state in zip(held, states, strict=True):
                from_torch_state(rule, entries[self.stack.trained[i]], state, row, step=member.step)

    def _set_up(self) -> None:
        """What refers to the stack's tensors, as they are now."""
        leaves, kind = [leaf.detach() for leaf in self.stack.leaves], self.plans[0].kind
        self._fused_for = self.stack
        self._fused = [
            FusedAdam(rule, params, states) if suits(kind, params) else None
            for (rule, held), states in zip(self.groups, self.states, strict=True)
            for params in [[leaves[i] for i in held]]
        ]

    def tensors(self) -> list[Tensor]:
        """All optimizer state, each tensor once: parameters of a group share a clock."""
        found = {id(t): t for states in self.states for state in states for t in state.values()}
        return list(found.values())

    def update(self, grads: Grads, active: Tensor | None) -> None:
        leaves = self.stack.leaves
        for g, ((rule, held), states) in enumerate(zip(self.groups, self.states, strict=True)):
            if not held:
                continue
            wanted: list[Tensor] = [grads[i] for i in held]  # type: ignore[misc]
            fused = self._fused[g]
            if fused is not None and self._fused_for is self.stack:
                fused.update(wanted, self.columns.groups[g], active)
            else:
                rule.update_all_([leaves[i].detach() for i in held], wanted, states, self.columns.groups[g], active)

    def state_dict(self, slot: int) -> dict[str, Any]:
        plan, member = self.plans[slot], self.stack.members[slot]
        assert plan.runner is not None
        numbers = self.columns.row(slot)
        entries: dict[int, dict[str, Tensor]] = {}
        for g, ((rule, held), states) in enumerate(zip(self.groups, self.states, strict=True)):
            for i, state in zip(held, states, strict=True):
                entries[self.stack.trained[i]] = to_torch_state(rule, state, slot, numbers[g])
        order = [position for group in plan.groups for position in group]
        skeleton = make_optimizer(member.job, member.model)
        return optimizer_state_dict(skeleton, [entries.get(p, {}) for p in order], plan.runner.groups())

    def schedule_state(self, slot: int) -> dict[str, Any] | None:
        runner = self.plans[slot].runner
        assert runner is not None
        return runner.scheduler_state

    def merged(self, stack: Stack, other: StackedOptimizer | OwnOptimizers) -> StackedOptimizer:
        """For a stack of both's members; a term that only some of them have is zero for the others."""
        assert isinstance(other, StackedOptimizer)
        count = len(self.plans)
        new = StackedOptimizer.__new__(StackedOptimizer)
        new.stack, new.plans = stack, [*self.plans, *other.plans]
        sources = [(self if own < count else other, own if own < count else own - count) for own in stack.rows]
        new.columns = Columns([source.columns.row(row) for source, row in sources], device=stack.device)
        new.groups, new.states = [], []
        for g, (_, held) in enumerate(self.groups):
            flags = merge_flags(new.plans[0].kind, [plan.flags[g] for plan in new.plans if plan.flags is not None])
            assert flags is not None, "members of one recipe key have one structure"
            rule = rule_for(new.plans[0].kind, flags)
            new.groups.append((rule, held))
            new.states.append(rule.init_all([stack.leaves[i].detach() for i in held], new.columns.groups[g]))
            for i, state in enumerate(new.states[-1]):
                for name, value in state.items():
                    parts = [part.states[g][i].get(name) for part in (self, other)]
                    for rows, part in zip((slice(0, count), slice(count, len(new.plans))), parts, strict=True):
                        if part is not None:
                            value[rows] = part[: rows.stop - rows.start]
                    value[len(new.plans) :] = value[:1]
        new._set_up()
        return new

    def pairs(self, other: StackedOptimizer) -> list[tuple[Tensor, Tensor]]:
        """This optimizer's state tensors and the other's that mean the same; what the other has not, is zero."""
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for states, theirs in zip(self.states, other.states, strict=True):
            for state, their in zip(states, theirs, strict=True):
                for name, value in state.items():
                    if id(value) not in found:
                        found[id(value)] = value, their[name] if name in their else torch.zeros_like(value)
        return list(found.values())

    def take(self, part: StackedOptimizer | OwnOptimizers, put: Put, rows: list[int], theirs: list[int]) -> None:
        """Be, for some rows, what `part` is."""
        assert isinstance(part, StackedOptimizer)
        for mine, other in self.pairs(part):
            put(mine, other)
        self.columns.packed[:, :, rows] = part.columns.packed[:, :, theirs]

    def keep(self, stack: Stack, rows: Sequence[int]) -> StackedOptimizer:
        kept = object.__new__(StackedOptimizer)
        kept.stack, kept.groups = stack, self.groups
        kept.plans = [recipe.optimizer for recipe in stack.recipes]
        kept.columns = self.columns.keep(rows)
        index = list(rows)
        moved: dict[int, Tensor] = {}
        for t in self.tensors():
            moved[id(t)] = t[index]
        kept.states = [[{k: moved[id(t)] for k, t in state.items()} for state in states] for states in self.states]
        kept._set_up()
        return kept


class OwnOptimizers:
    """Any other optimizer class: the real object of each member, on a twin of its model with its slices as weights."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.twins = [copy.deepcopy(member.model) for member in stack.members]
        self._point()
        self.optimizers = [make_optimizer(m.job, twin) for m, twin in zip(stack.members, self.twins, strict=True)]
        self.schedules = [make_schedule(m.job, opt) for m, opt in zip(stack.members, self.optimizers, strict=True)]
        for member, optimizer, schedule in zip(stack.members, self.optimizers, self.schedules, strict=True):
            if member.optimizer_state:
                optimizer.load_state_dict(member.optimizer_state)
                optimizer._opt_called = True  # type: ignore[attr-defined]  # it has stepped, elsewhere
            if schedule is not None and member.schedule_state is not None:
                schedule.load_state_dict(copy.deepcopy(member.schedule_state))

    def _point(self) -> None:
        """Make the twins' parameters views of the stack."""
        self._params = []
        for slot, twin in enumerate(self.twins):
            params = dict(twin.named_parameters())
            for stacked, name in zip(self.stack.params, self.stack.param_names, strict=True):
                params[name].data = stacked.detach()[slot]
            self._params.append([params[self.stack.param_names[i]] for i in self.stack.trained])

    def tensors(self) -> list[Tensor]:
        return []

    def update(self, grads: Grads, active: Tensor | None) -> None:
        moving = [True] * len(self.optimizers) if active is None else active.tolist()
        for slot, optimizer in enumerate(self.optimizers):
            if not moving[slot]:
                continue
            for param, grad in zip(self._params[slot], grads, strict=True):
                param.grad = None if grad is None else grad[slot]
            optimizer.step()
            for param in self._params[slot]:
                param.grad = None

    def state_dict(self, slot: int) -> dict[str, Any]:
        return copy.deepcopy(self.optimizers[slot].state_dict())

    def schedule_state(self, slot: int) -> dict[str, Any] | None:
        schedule = self.schedules[slot]
        return None if schedule is None else copy.deepcopy(schedule.state_dict())

    def merged(self, stack: Stack, other: StackedOptimizer | OwnOptimizers) -> OwnOptimizers:
        """For a stack of both's members: the optimizer and scheduler objects themselves."""
        assert isinstance(other, OwnOptimizers)
        new = object.__new__(OwnOptimizers)
        new.stack = stack
        new.twins = [*self.twins, *other.twins]
        new.optimizers = [*self.optimizers, *other.optimizers]
        new.schedules = [*self.schedules, *other.schedules]
        new._point()
        return new

    def take(self, part: StackedOptimizer | OwnOptimizers, put: Put, rows: list[int], theirs: list[int]) -> None:
        """The objects of `part` are this one's: only their parameters have to be this stack's again."""
        self._point()

    def keep(self, stack: Stack, rows: Sequence[int]) -> OwnOptimizers:
        """The same optimizer objects, on the members' new slices."""
        kept = object.__new__(OwnOptimizers)
        slots = list(rows)[: len(stack.recipes)]
        kept.stack = stack
        kept.twins = [self.twins[slot] for slot in slots]
        kept.optimizers = [self.optimizers[slot] for slot in slots]
        kept.schedules = [self.schedules[slot] for slot in slots]
        kept._point()
        return kept
