"""The state of a pack on its device: parameters, buffers, optimizer state and numbers, members first.

Rows beyond the members are padding: copies of the last member, which train too and are never read. A pack of one
takes other kernels than a pack of two or more, so a member alone is padded to two, and its bits do not depend on
the other members. Members are ordered by their kind of optimizer, see `optimizers`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from shoal.engine.members.member import Member
from shoal.engine.optim.gradients import MemberScaler, clip_, clip_limit
from shoal.engine.recipes.recipe import Recipe
from shoal.engine.stack import _flat_state, transfer
from shoal.engine.stack.averages import Averages
from shoal.engine.stack.optimizers import Grads, Optimizers, ordered
from shoal.utils.weights import give_memory

LEAST = 2
"""Rows of the smallest stack."""


class Stack:
    """Members' training state with a member axis, and what one optimizer step does to it."""

    def __init__(
        self, recipes: Sequence[Recipe], *, size: int, channels_last: bool = False, passing: bool = False
    ) -> None:
        """`channels_last`: filters of a stack of one are laid out as a GPU's convolutions want them. `passing`: it will
        be merged into another at once, so its tensors may share memory."""
        self.recipes = recipes = [recipes[place] for place in ordered(recipes)]
        self._channels_last = channels_last and size == 1
        first = recipes[0]
        self.device = first.member.device
        self.rows = _padded(range(len(recipes)), size)
        graph = next(iter(first.steps.values()))
        models = [recipe.member.model for recipe in recipes]
        named = [dict(model.named_parameters()) for model in models]
        buffered = [dict(model.named_buffers()) for model in models]
        self.param_names, self.buffer_names = graph.params, graph.buffers
        columns: list[list[Tensor]] = [[named[r][name] for r in self.rows] for name in self.param_names]
        columns += [[buffered[r][name] for r in self.rows] for name in self.buffer_names]
        self.shared = first.shared if size > 1 else frozenset()
        """Of the state: what is there once for all rows, and has a member axis without memory of its own."""
        varied = [column for place, column in enumerate(columns) if place not in self.shared]
        stacked = iter(transfer.stacked(varied, self.device) if passing else map(self._stacked, varied))
        state = [
            _once(column[0].detach().to(self.device), size) if place in self.shared else next(stacked)
            for place, column in enumerate(columns)
        ]
        self.params, self.buffers = state[: len(self.param_names)], state[len(self.param_names) :]
        trained = [named[0][name].requires_grad for name in self.param_names]
        self.trained = [i for i, both in enumerate(zip(trained, graph.used, strict=True)) if all(both)]
        for index in self.trained:
            self.params[index].requires_grad_()
        self.active = torch.ones(size, dtype=torch.bool, device=self.device)
        job = first.member.job
        self.scaler = MemberScaler(size, device=self.device) if job.precision == "fp16" else None
        for row, slot in enumerate(self.rows):
            scale = recipes[slot].member.scaler_state
            if self.scaler is not None and scale is not None:
                self.scaler.load_state_dict(row, scale)
        limits = [clip_limit(recipe.member.job) for recipe in recipes]
        self.clip_limits = None
        if any(limit != math.inf for limit in limits):
            self.clip_limits = torch.tensor([limits[r] for r in self.rows], dtype=torch.float64, device=self.device)
        self.optimizer = Optimizers.of(self)
        self.averages = None
        if job.average is not None:
            self.averages = Averages.of([self.members[r] for r in self.rows], self.state, self.names, self._averaged())

    def _averaged(self) -> list[int]:
        """Which parameters and buffers are averaged."""
        first, rule = len(self.params), self.recipes[0].member.job.average
        kinds = [i for i, b in enumerate(self.buffers, first) if b.is_floating_point() or b.is_complex()]
        buffers = kinds if rule is not None and rule.use_buffers else []
        return [*self.trained, *(place for place in buffers if place not in self.shared)]

    @property
    def names(self) -> list[str]:
        """Of parameters and buffers, as in `state`."""
        return [*self.param_names, *self.buffer_names]

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
    def own_state(self) -> list[Tensor]:
        """Parameters and buffers of which each member has its own."""
        return [tensor for place, tensor in enumerate(self.state) if place not in self.shared]

    @property
    def own_buffers(self) -> list[Tensor]:
        return self.own_state[len(self.params) - sum(place < len(self.params) for place in self.shared) :]

    @property
    def row_bytes(self) -> int:
        """What a member has in the stack."""
        averages = self.averages.values if self.averages is not None else []
        return sum(t.nbytes for t in (*self.own_state, *self.optimizer.tensors(), *averages)) // len(self.rows)

    @property
    def leaves(self) -> list[Tensor]:
        """The parameters that are trained."""
        return [self.params[index] for index in self.trained]

    def reserve(self) -> None:
        """Raise now, while nothing has changed, if the next update would find no memory. Only on a GPU, where an
        allocation that fails raises."""
        if self.device.type == "cuda":
            torch.empty(_flat_state.scratch_bytes(self.leaves), dtype=torch.uint8, device=self.device)

    @torch.no_grad()
    def apply(self, grads: Grads, active: Tensor | None) -> None:
        """One optimizer step from these gradients (one per trained parameter); members outside `active` take none."""
        grads = [g.resolve_conj().resolve_neg() if g is not None and g.is_complex() else g for g in grads]
        if self.scaler is not None or self.clip_limits is not None or self.optimizer.writes_gradients:
            grads = _apart(grads)
        training = active
        present = [grad for grad in grads if grad is not None]
        found_inf = self.scaler.unscale_(present) if self.scaler is not None else None
        if self.clip_limits is not None:
            clip_(present, self.clip_limits, by_value=any(m.job.clip_value is not None for m in self.members))
        if found_inf is not None:
            active = ~found_inf if active is None else active & ~found_inf
        self.optimizer.update(grads, active)
        if self.scaler is not None and found_inf is not None:
            self.scaler.update_(found_inf)
        if self.averages is not None:  # a step that an overflow skips is a step
            failed = self.optimizer.failures()
            trained = [True] * len(self.rows) if training is None else training.tolist()
            moved = [took and slot not in failed for took, slot in zip(trained, self.rows, strict=True)]
            self.averages.update(self.state, moved)

    @contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        """Inside, the weights are those that validation uses."""
        params, buffers = self.params, self.buffers
        with self.optimizer.eval_mode():
            if self.averages is not None:
                state = self.averages.evaluation_state(self.state, len(params))
                self.params, self.buffers = state[: len(params)], state[len(params) :]
            try:
                yield
            finally:
                self.params, self.buffers = params, buffers

    def saved_buffers(self) -> list[Tensor]:
        """The buffers as they are now, for `set_buffers`; those that nobody writes to are not copied."""
        places = enumerate(self.buffers, len(self.params))
        return [buffer if place in self.shared else buffer.clone() for place, buffer in places]

    def restore_buffers(self, before: list[Tensor]) -> None:
        """Set the buffers to what they were for all members."""
        self.set_buffers(dict(zip(self.buffer_names, before, strict=True)), None, before)

    @torch.no_grad()
    def set_buffers(self, after: dict[str, Tensor], ok: Tensor | None, before: list[Tensor]) -> None:
        """Set the buffers to what a step left; members outside `ok` get back what they had before it."""
        for index, name in enumerate(self.buffer_names):
            value, buffer = after[name], self.buffers[index]
            if len(self.params) + index in self.shared:  # no step writes it
                continue
            if ok is not None:
                value = torch.where(ok.view(-1, *[1] * (value.dim() - 1)), value, before[index])
            if value is not buffer:
                buffer.copy_(value.detach())

    @torch.no_grad()
    def adopt_state(self, slots: Sequence[int]) -> None:
        """Take members' weights and buffers as their own networks have them now."""
        for row, slot in enumerate(self.rows):
            if slot in slots:
                model = self.recipes[slot].member.model
                tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
                for place, (name, stacked) in enumerate(zip(self.names, self.state, strict=True)):
                    if place not in self.shared:
                        stacked[row].copy_(tensors[name])

    @torch.no_grad()
    def write_back(self, slots: Sequence[int]) -> None:
        """Write members' weights, buffers and optimizer state into the members; from a GPU all in one go."""
        self.optimizer.sync_schedules()
        for start, stop in transfer.portions([self.row_bytes] * len(slots)):
            self._write_back(slots[start:stop])

    def rehearse(self) -> None:
        """Move members as when they leave: a GPU loads what that takes the first time, which is many times as long, and
        other code for rows that lie at odd places."""
        if self.device.type != "cpu" and self.row_bytes <= transfer.MOST_BYTES:
            for slot in range(min(2, len(self.recipes))):
                transfer.moved(self._row(slot), transfer.CPU)

    def _row(self, slot: int) -> list[Tensor]:
        """All that a member has in the stack."""
        averages = self.averages.values if self.averages is not None else []
        state = (tensor.detach()[slot] for tensor in self.own_state)
        return [*state, *self.optimizer.rows(slot), *(value[slot] for value in averages)]

    def _write_back(self, slots: Sequence[int]) -> None:
        there = [self._row(slot) for slot in slots]
        here = iter(transfer.moved([row for rows in there for row in rows], transfer.CPU))
        scaler = self.scaler
        if scaler is not None:  # on the host, where looking at one member waits for nothing
            scaler = scaler.on(scaler.scale_M.cpu(), scaler.growth_tracker_M.cpu())
        for slot, far in zip(slots, there, strict=True):
            member, near = self.recipes[slot].member, [next(here) for _ in far]
            params, buffers = dict(member.model.named_parameters()), dict(member.model.named_buffers())
            places = [*(params[name] for name in self.param_names), *(buffers[name] for name in self.buffer_names)]
            places = [tensor for place, tensor in enumerate(places) if place not in self.shared]
            for place, row, on_device in zip(places, near, far, strict=False):
                if row.device == on_device.device or not give_memory(place, row):
                    place.copy_(row if place.device == row.device else on_device)
            if member.batches:
                _leave_attributes(member.model, self.recipes[slot])
            end = len(near) - (len(self.averages.values) if self.averages is not None else 0)
            member.optimizer_state = self.optimizer.state_dict(slot, near[len(places) : end])
            if self.averages is not None:
                member.average = self.averages.member_state(slot, self.names, near[end:])
            member.schedule_state = self.optimizer.schedule_state(slot)
            member.scaler_state = None if scaler is None else scaler.state_dict(slot)

    @torch.no_grad()
    def merged(self, other: Stack, size: int) -> Stack:
        """One stack of this one's members and the other's, each as it is."""
        mine, theirs = len(self.recipes), len(other.recipes)
        recipes = [*self.recipes, *other.recipes]
        order = ordered(recipes)
        rows = _padded(order, size)
        in_order = rows == list(range(mine + theirs))

        def both(a: Tensor, b: Tensor) -> Tensor:
            joined = torch.cat([a.detach()[:mine], b.detach()[:theirs]])
            return joined if in_order else joined[rows]

        new = copy.copy(self)
        new.recipes, new.rows = [recipes[place] for place in order], _padded(range(len(order)), size)
        state = [
            _once(a[0], size) if place in self.shared else both(a, b)
            for place, (a, b) in enumerate(zip(self.state, other.state, strict=True))
        ]
        new.params = [p.requires_grad_(a.requires_grad) for a, p in zip(self.params, state, strict=False)]
        new.buffers = state[len(self.params) :]
        new.active = both(self.active, other.active)
        new.scaler = None
        if (a := self.scaler) is not None and (b := other.scaler) is not None:
            new.scaler = a.on(both(a.scale_M, b.scale_M), both(a.growth_tracker_M, b.growth_tracker_M))
        new.clip_limits = None
        if self.clip_limits is not None or other.clip_limits is not None:
            new.clip_limits = both(self._limits(), other._limits())
        new.optimizer = self.optimizer.merged(new, other.optimizer)
        if (x := self.averages) is not None and (y := other.averages) is not None:
            all_rows = [*x.rows[:mine], *y.rows[:theirs]]
            values = iter([both(a, b) for a, b in zip(x.values, y.values, strict=True)])
            new.averages = x.each(lambda _: next(values), [all_rows[row] for row in rows])
        return new

    def _limits(self) -> Tensor:
        if self.clip_limits is not None:
            return self.clip_limits
        return torch.full((len(self.rows),), float("inf"), dtype=torch.float64, device=self.device)

    @torch.no_grad()
    def put(self, rows: Sequence[int], other: Stack) -> None:
        """Let another stack's members have these rows, in their order, in place."""
        for row, recipe in zip(rows, other.recipes, strict=True):
            self.recipes[row] = recipe
        pairs = [
            (a, b) for place, (a, b) in enumerate(zip(self.state, other.state, strict=True)) if place not in self.shared
        ]
        pairs.append((self.active, other.active))
        if self.scaler is not None and other.scaler is not None:
            pairs.append((self.scaler.scale_M, other.scaler.scale_M))
            pairs.append((self.scaler.growth_tracker_M, other.scaler.growth_tracker_M))
        if self.clip_limits is not None:
            pairs.append((self.clip_limits, other._limits()))
        assert self.averages is None, "a stack with averages is not captured"
        index = torch.tensor(rows, device=self.device)
        for ours, value in pairs:
            ours.detach().index_copy_(0, index, value.detach())
        self.optimizer.put(rows, index, other.optimizer)

    @torch.no_grad()
    def take(self, slots: Sequence[int], part: Stack) -> None:
        """Copy these slots back from `part`, which was taken from this stack."""
        rows = [row for row, slot in enumerate(self.rows) if slot in slots]
        theirs = [list(slots).index(self.rows[row]) for row in rows]

        def put(ours: Tensor, value: Tensor) -> None:
            ours.detach()[rows] = value.detach()[theirs]

        for ours, value in zip(self.own_state, part.own_state, strict=True):
            put(ours, value)
        put(self.active, part.active)
        if self.scaler is not None and part.scaler is not None:
            put(self.scaler.scale_M, part.scaler.scale_M)
            put(self.scaler.growth_tracker_M, part.scaler.growth_tracker_M)
        if self.averages is not None and part.averages is not None:
            for ours, value in zip(self.averages.values, part.averages.values, strict=True):
                put(ours, value)
            for row, their in zip(rows, theirs, strict=True):
                self.averages.rows[row] = replace(part.averages.rows[their])
        self.optimizer.take(part.optimizer, rows, theirs)

    def keep(self, slots: Sequence[int], size: int) -> Stack:
        """The same training with only these members, in the order they have."""
        assert list(slots) == sorted(slots), "members of one kind of optimizer stay neighbours"
        rows = _padded(slots, size)
        new = copy.copy(self)
        new.recipes = [self.recipes[slot] for slot in slots]
        new.rows = _padded(range(len(slots)), size)
        new.shared = self.shared if size > 1 else frozenset()
        state = [
            _once(tensor.detach()[0], size) if place in self.shared else tensor.detach()[rows]
            for place, tensor in enumerate(self.state)
        ]
        new.params = [p.requires_grad_(a.requires_grad) for a, p in zip(self.params, state, strict=False)]
        new.buffers = state[len(self.params) :]
        new.active = self.active[rows]
        new.scaler = self.scaler
        if new.scaler is not None:
            new.scaler = new.scaler.on(new.scaler.scale_M[rows], new.scaler.growth_tracker_M[rows])
        new.clip_limits = None if self.clip_limits is None else self.clip_limits[rows]
        new.optimizer = self.optimizer.keep(new, rows)
        if self.averages is not None:
            new.averages = self.averages.each(lambda value: value[rows], [self.averages.rows[row] for row in rows])
        return new


def _leave_attributes(model: nn.Module, recipe: Recipe) -> None:
    """Set in the model's modules what the first call of its step sets, such as the mode of a layer that it freezes."""
    for trace in recipe.steps.values():
        for (where, name), value in trace.left.items():
            setattr(model.get_submodule(where), name, value.clone() if isinstance(value, Tensor) else value)


def _apart(grads: Grads) -> Grads:
    """Gradients that can be changed in place: parameters that are added to each other get one and the same tensor, and
    one that is summed up gets a single number for all its elements."""
    seen: set[int] = set()
    separate: list[Tensor | None] = []
    for grad in grads:
        memory = 0 if grad is None else grad.untyped_storage()._cdata
        if grad is not None and (memory in seen or _overlaps(grad)):
            grad = grad.clone(memory_format=torch.contiguous_format)
        separate.append(grad)
        seen.add(memory)
    return separate


def _overlaps(tensor: Tensor) -> bool:
    """Whether elements of a tensor share memory, as those of an expanded one do."""
    return any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))


def _once(tensor: Tensor, size: int) -> Tensor:
    """A tensor with a member axis, in memory once."""
    return tensor.detach().unsqueeze(0).expand(size, *tensor.shape)


def _padded(rows: Sequence[int], size: int) -> list[int]:
    return [*rows, *[rows[-1]] * (size - len(rows))]
