"""The training state of a pack on its device: parameters, buffers, optimizer state and hyper-parameters, members first.

Rows beyond the members are padding: copies of the last member, which train too and are never read. A pack of one uses
other kernels than a larger pack, so a single member is padded to two rows, and its bits do not depend on the other
members. Members are ordered by their kind of optimizer, see `optimizers`.

A slot is a member's position in the stack; a row is an index on the member axis, padding included.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterator, Sequence
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
"""The number of rows of the smallest stack."""


class Stack:
    """The training state of several members with a member axis, and the optimizer step on it."""

    def __init__(
        self, recipes: Sequence[Recipe], *, size: int, channels_last: bool = False, temporary: bool = False
    ) -> None:
        """Stack the members' current state.

        Args:
            size: The number of rows, padding included.
            channels_last: Store filters of a stack of one row as channels_last, which convolutions on a GPU prefer.
            temporary: The stack is merged into another one at once, so its tensors may share memory.
        """
        self.recipes = recipes = [recipes[i] for i in ordered(recipes)]
        self._channels_last = channels_last and size == 1
        first = recipes[0]
        self.device = first.member.device
        self.rows = _pad(range(len(recipes)), size)
        graph = next(iter(first.steps.values()))
        models = [recipe.member.model for recipe in recipes]
        params_of = [dict(model.named_parameters()) for model in models]
        buffers_of = [dict(model.named_buffers()) for model in models]
        self.param_names, self.buffer_names = graph.params, graph.buffers
        columns: list[list[Tensor]] = [[params_of[r][name] for r in self.rows] for name in self.param_names]
        columns += [[buffers_of[r][name] for r in self.rows] for name in self.buffer_names]
        self.shared = first.shared if size > 1 else frozenset()
        """Indices into `state` of frozen tensors that exist once; their member axis is only expanded."""
        per_member = [column for i, column in enumerate(columns) if i not in self.shared]
        stacked = iter(transfer.stacked(per_member, self.device) if temporary else map(self._stack_column, per_member))
        state = [
            _expand_members(column[0].detach().to(self.device), size) if i in self.shared else next(stacked)
            for i, column in enumerate(columns)
        ]
        self.params, self.buffers = state[: len(self.param_names)], state[len(self.param_names) :]
        requires_grad = [params_of[0][name].requires_grad for name in self.param_names]
        self.trained = [i for i, both in enumerate(zip(requires_grad, graph.used, strict=True)) if all(both)]
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
        """Return the indices into `state` of the tensors that are averaged."""
        first, rule = len(self.params), self.recipes[0].member.job.average
        floating = [i for i, b in enumerate(self.buffers, first) if b.is_floating_point() or b.is_complex()]
        buffers = floating if rule is not None and rule.use_buffers else []
        return [*self.trained, *(index for index in buffers if index not in self.shared)]

    @property
    def names(self) -> list[str]:
        """The names of parameters and buffers, in the order of `state`."""
        return [*self.param_names, *self.buffer_names]

    def _stack_column(self, values: list[Tensor]) -> Tensor:
        """Stack the members' tensors on the device, wherever their models are."""
        stacked = torch.stack([value.detach() for value in values]).to(self.device)
        if self._channels_last and stacked.dim() == 5:
            return stacked[0].contiguous(memory_format=torch.channels_last).unsqueeze(0)
        return stacked

    @property
    def members(self) -> list[Member]:
        return [recipe.member for recipe in self.recipes]

    @property
    def state(self) -> list[Tensor]:
        """Parameters, then buffers, in the order that programs take them."""
        return [*self.params, *self.buffers]

    @property
    def own_state(self) -> list[Tensor]:
        """The part of `state` that is not shared by all members."""
        return [tensor for i, tensor in enumerate(self.state) if i not in self.shared]

    @property
    def own_buffers(self) -> list[Tensor]:
        """The buffers that are not shared by all members."""
        return self.own_state[len(self.params) - sum(i < len(self.params) for i in self.shared) :]

    @property
    def _average_tensors(self) -> list[Tensor]:
        return [] if self.averages is None else self.averages.values

    @property
    def row_bytes(self) -> int:
        """The bytes that one member occupies in the stack."""
        tensors = (*self.own_state, *self.optimizer.tensors(), *self._average_tensors)
        return sum(tensor.nbytes for tensor in tensors) // len(self.rows)

    @property
    def clips_by_value(self) -> bool:
        """Whether a member clips its gradients element by element."""
        return any(member.job.clip_value is not None for member in self.members)

    @property
    def leaves(self) -> list[Tensor]:
        """The parameters that are trained."""
        return [self.params[index] for index in self.trained]

    def reserve(self) -> None:
        """Raise an out-of-memory error now if the next update would, while the state is unchanged (GPU only)."""
        if self.device.type == "cuda":
            torch.empty(_flat_state.scratch_bytes(self.leaves), dtype=torch.uint8, device=self.device)

    @torch.no_grad()
    def apply(self, grads: Grads, active: Tensor | None) -> None:
        """Take one optimizer step. `grads` has one entry per trained parameter; members outside `active` take no
        step."""
        grads = [g.resolve_conj().resolve_neg() if g is not None and g.is_complex() else g for g in grads]
        if self.scaler is not None or self.clip_limits is not None or self.optimizer.writes_gradients:
            grads = _make_writable(grads)
        training_M = active
        present = [grad for grad in grads if grad is not None]
        found_inf = self.scaler.unscale_(present) if self.scaler is not None else None
        if self.clip_limits is not None:
            clip_(present, self.clip_limits, by_value=self.clips_by_value)
        if found_inf is not None:
            active = ~found_inf if active is None else active & ~found_inf
        self.optimizer.update(grads, active)
        if self.scaler is not None and found_inf is not None:
            self.scaler.update_(found_inf)
        if self.averages is not None:  # a step that is skipped after an overflow counts too
            failed = self.optimizer.failures()
            trained = [True] * len(self.rows) if training_M is None else training_M.tolist()
            moved = [trains and slot not in failed for trains, slot in zip(trained, self.rows, strict=True)]
            self.averages.update(self.state, moved)

    @contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        """Use the weights of validation inside this context: averages, or those of the optimizers' eval mode."""
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
        """Return copies of the buffers, for `set_buffers`. Buffers that no step writes to are not copied."""
        indexed = enumerate(self.buffers, len(self.params))
        return [buffer if i in self.shared else buffer.clone() for i, buffer in indexed]

    def restore_buffers(self, before: list[Tensor]) -> None:
        """Set the buffers of all members to the values that `saved_buffers` returned."""
        self.set_buffers(dict(zip(self.buffer_names, before, strict=True)), None, before)

    @torch.no_grad()
    def set_buffers(self, after: dict[str, Tensor], ok: Tensor | None, before: list[Tensor]) -> None:
        """Set the buffers to their values after a step. Members outside `ok` get their values from before the step."""
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
        """Copy the weights and buffers of these members from their models into the stack."""
        for row, slot in enumerate(self.rows):
            if slot in slots:
                model = self.recipes[slot].member.model
                tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
                for i, (name, stacked) in enumerate(zip(self.names, self.state, strict=True)):
                    if i not in self.shared:
                        stacked[row].copy_(tensors[name])

    @torch.no_grad()
    def write_back(self, slots: Sequence[int]) -> None:
        """Write weights, buffers and optimizer state of these slots into their members, with few copies from a GPU."""
        self.optimizer.sync_schedules()
        for start, stop in transfer.portions([self.row_bytes] * len(slots)):
            self._write_back(slots[start:stop])

    def rehearse(self) -> None:
        """Copy two members to the host as when they leave, since a GPU loads its kernels at the first such copy."""
        if self.device.type != "cpu" and self.row_bytes <= transfer.MOST_BYTES:
            for slot in range(min(2, len(self.recipes))):
                transfer.moved(self._member_tensors(slot), transfer.CPU)

    def _member_tensors(self, slot: int) -> list[Tensor]:
        """Return all tensors of one member: its rows of weights, buffers, optimizer state and averages."""
        state = (tensor.detach()[slot] for tensor in self.own_state)
        return [*state, *self.optimizer.rows(slot), *(value[slot] for value in self._average_tensors)]

    def _write_back(self, slots: Sequence[int]) -> None:
        device_rows = [self._member_tensors(slot) for slot in slots]
        host_rows = iter(transfer.moved([row for rows in device_rows for row in rows], transfer.CPU))
        scaler = self.scaler
        if scaler is not None:  # copied to the host once, so that reading one member does not wait for the device
            scaler = scaler.on(scaler.scale_M.cpu(), scaler.growth_tracker_M.cpu())
        for slot, member_rows in zip(slots, device_rows, strict=True):
            member, values = self.recipes[slot].member, [next(host_rows) for _ in member_rows]
            params, buffers = dict(member.model.named_parameters()), dict(member.model.named_buffers())
            targets = [*(params[name] for name in self.param_names), *(buffers[name] for name in self.buffer_names)]
            targets = [tensor for i, tensor in enumerate(targets) if i not in self.shared]
            for target, row, on_device in zip(targets, values, member_rows, strict=False):
                if row.device == on_device.device or not give_memory(target, row):
                    target.copy_(row if target.device == row.device else on_device)
            if member.batches:
                _set_module_attributes(member.model, self.recipes[slot])
            end = len(values) - len(self._average_tensors)
            member.optimizer_state = self.optimizer.state_dict(slot, values[len(targets) : end])
            if self.averages is not None:
                member.average = self.averages.member_state(slot, self.names, values[end:])
            member.schedule_state = self.optimizer.schedule_state(slot)
            member.scaler_state = None if scaler is None else scaler.state_dict(slot)

    # --- members join and leave -------------------------------------------------------------------------------------

    def _row_tensors(self, shared: Collection[int], clips: bool) -> list[Tensor]:
        """Return the tensors that have a row for each member, except those of the optimizer.

        Args:
            shared: Indices into `state` of tensors to leave out.
            clips: Whether clipping limits are among them; they are infinite for members that do not clip.
        """
        own_state = [tensor for i, tensor in enumerate(self.state) if i not in shared]
        scaler = [] if self.scaler is None else [self.scaler.scale_M, self.scaler.growth_tracker_M]
        limits = self.clip_limits
        if limits is None:
            limits = torch.full((len(self.rows),), math.inf, dtype=torch.float64, device=self.device)
        tensors = (*own_state, self.active, *scaler, *([limits] if clips else []), *self._average_tensors)
        return [tensor.detach() for tensor in tensors]

    def _pairs(self, other: Stack) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each of the stack's row tensors with that of another stack."""
        clips = self.clip_limits is not None
        return zip(self._row_tensors(self.shared, clips), other._row_tensors(self.shared, clips), strict=True)

    def _rebuilt(self, recipes: list[Recipe], rows: list[int], *stacks: Stack) -> Stack:
        """Return a stack with copies of some rows of these stacks, and without its optimizer.

        Args:
            recipes: The members of the new stack.
            rows: For each row of the new stack, a position among the members of all `stacks`.
            stacks: Those that the rows come from; this one is the first.
        """
        size, counts = len(rows), [len(stack.recipes) for stack in stacks]
        clips = any(stack.clip_limits is not None for stack in stacks)

        def chosen(parts: tuple[Tensor, ...]) -> Tensor:
            if len(parts) == 1:
                return parts[0][rows]
            joined = torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
            return joined if rows == list(range(sum(counts))) else joined[rows]

        tensors_of = [stack._row_tensors(self.shared, clips) for stack in stacks]
        tensors = iter([chosen(parts) for parts in zip(*tensors_of, strict=True)])
        new = copy.copy(self)
        new.recipes, new.rows = recipes, _pad(range(len(recipes)), size)
        new.shared = self.shared if size > 1 else frozenset()
        state = [
            _expand_members(tensor[0], size) if i in self.shared else next(tensors)
            for i, tensor in enumerate(self.state)
        ]
        new.params = [p.requires_grad_(a.requires_grad) for a, p in zip(self.params, state, strict=False)]
        new.buffers = state[len(self.params) :]
        new.active = next(tensors)
        new.scaler = None if self.scaler is None else self.scaler.on(next(tensors), next(tensors))
        new.clip_limits = next(tensors) if clips else None
        if self.averages is not None:
            pairs = zip(stacks, counts, strict=True)
            progress = [row for stack, count in pairs if stack.averages for row in stack.averages.rows[:count]]
            new.averages = self.averages.each(lambda _: next(tensors), [progress[row] for row in rows])
        return new

    @torch.no_grad()
    def merged(self, other: Stack, size: int) -> Stack:
        """Return one stack of the members of both stacks, each with its current state."""
        recipes = [*self.recipes, *other.recipes]
        order = ordered(recipes)
        new = self._rebuilt([recipes[i] for i in order], _pad(order, size), self, other)
        new.optimizer = self.optimizer.merged(new, other.optimizer)
        return new

    def keep(self, slots: Sequence[int], size: int) -> Stack:
        """Return a stack with only these members, which keeps their state and order."""
        assert list(slots) == sorted(slots), "members of one kind of optimizer stay neighbours"
        rows = _pad(slots, size)
        new = self._rebuilt([self.recipes[slot] for slot in slots], rows, self)
        new.optimizer = self.optimizer.keep(new, rows)
        return new

    @torch.no_grad()
    def take(self, slots: Sequence[int], part: Stack) -> None:
        """Copy these slots back from `part`, a stack that `keep` made of them."""
        rows = [row for row, slot in enumerate(self.rows) if slot in slots]
        theirs = [list(slots).index(self.rows[row]) for row in rows]
        for ours, value in self._pairs(part):
            ours[rows] = value[theirs]
        if self.averages is not None and part.averages is not None:
            for row, their in zip(rows, theirs, strict=True):
                self.averages.rows[row] = replace(part.averages.rows[their])
        self.optimizer.take(part.optimizer, rows, theirs)

    @torch.no_grad()
    def put(self, rows: Sequence[int], other: Stack) -> None:
        """Replace the members in these rows by another stack's members, in place and in their order."""
        assert self.averages is None, "a stack with averages is not captured"
        for row, recipe in zip(rows, other.recipes, strict=True):
            self.recipes[row] = recipe
        index = torch.tensor(rows, device=self.device)
        for ours, value in self._pairs(other):
            ours.index_copy_(0, index, value)
        self.optimizer.put(rows, index, other.optimizer)


def _set_module_attributes(model: nn.Module, recipe: Recipe) -> None:
    """Set the module attributes that the first call of the step sets, such as the mode of a layer that it freezes."""
    for trace in recipe.steps.values():
        for (where, name), value in trace.left.items():
            setattr(model.get_submodule(where), name, value.clone() if isinstance(value, Tensor) else value)


def _make_writable(grads: Grads) -> Grads:
    """Return gradients that can be changed in place: those that share memory or are expanded tensors are cloned."""
    storages: set[int] = set()
    separate: list[Tensor | None] = []
    for grad in grads:
        memory = 0 if grad is None else grad.untyped_storage()._cdata
        if grad is not None and (memory in storages or _overlaps(grad)):
            grad = grad.clone(memory_format=torch.contiguous_format)
        separate.append(grad)
        storages.add(memory)
    return separate


def _overlaps(tensor: Tensor) -> bool:
    """Return whether elements of the tensor share memory, as in an expanded tensor."""
    return any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))


def _expand_members(tensor: Tensor, size: int) -> Tensor:
    """Add a member axis of `size` rows without copying."""
    return tensor.detach().unsqueeze(0).expand(size, *tensor.shape)


def _pad(rows: Sequence[int], size: int) -> list[int]:
    """Repeat the last entry until there are `size` of them."""
    return [*rows, *[rows[-1]] * (size - len(rows))]
