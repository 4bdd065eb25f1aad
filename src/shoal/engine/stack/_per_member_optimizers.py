"""Optimizers without a rule: the members' own objects, on their rows of the stack."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shoal.engine.members.member import make_optimizer, make_schedule, trying
from shoal.engine.optim import load_optimizer

if TYPE_CHECKING:
    from shoal.engine.stack.optimizers import Grads, Span, StackedOptimizer


class PerMemberOptimizers:
    """Classes without a rule: the real object of each member, on a twin of its model with its slices as weights."""

    def __init__(self, span: Span) -> None:
        self.span = span
        members = span.members
        self.twins = [copy.deepcopy(member.model) for member in members]
        self._point()
        for member in members:
            member.own.begin(member.job, member.model)
        self.optimizers: list[Any] = []
        self.schedules: list[Any] = []
        for member, twin in zip(members, self.twins, strict=True):
            # of one that has begun, asking the schedule for its beginning must not change what its step reads
            with trying(member.job) if member.batches else nullcontext():
                self.optimizers.append(make_optimizer(member.job, twin))
                self.schedules.append(make_schedule(member.job, self.optimizers[-1]))
        for member, optimizer, schedule in zip(members, self.optimizers, self.schedules, strict=True):
            if member.optimizer_state:
                load_optimizer(optimizer, member.optimizer_state)
                optimizer._opt_called = True  # it has stepped, elsewhere
            if schedule is not None and member.schedule_state is not None:
                schedule.load_state_dict(copy.deepcopy(member.schedule_state))
        self.failed: dict[int, Exception] = {}
        """Whose optimizer raised in its last step, by slots, and what."""
        for member, optimizer, schedule, twin in zip(members, self.optimizers, self.schedules, self.twins, strict=True):
            member.own.attach(optimizer, schedule, twin, span.device, started=member.batches > 0)

    def _point(self) -> None:
        """Make the twins' parameters views of the stack."""
        self._params = []
        stack = self.span.stack
        for row, twin in enumerate(self.twins, self.span.start):
            params = dict(twin.named_parameters())
            for stacked, name in zip(stack.params, stack.param_names, strict=True):
                params[name].data = stacked.detach()[row]
            self._params.append([params[stack.param_names[i]] for i in stack.trained])

    def tensors(self) -> list[Tensor]:
        return []

    def update(self, grads: Grads, active: Tensor | None) -> None:
        moving = [True] * len(self.optimizers) if active is None else active.tolist()
        for slot, optimizer in enumerate(self.optimizers):
            if not moving[slot]:
                continue
            for param, grad in zip(self._params[slot], grads, strict=True):
                param.grad = None if grad is None else grad[slot]
            try:
                optimizer.step()
            except Exception as error:
                self.failed[slot] = error
            for param in self._params[slot]:
                param.grad = None

    def rows(self, slot: int) -> list[Tensor]:
        """Nothing of its state lies in rows."""
        return []

    def state_dict(self, slot: int, rows: Sequence[Tensor]) -> dict[str, Any]:
        return copy.deepcopy(self.optimizers[slot].state_dict())

    def schedule_state(self, slot: int) -> dict[str, Any] | None:
        schedule = self.schedules[slot]
        return None if schedule is None else copy.deepcopy(schedule.state_dict())

    def merged(self, span: Span, other: StackedOptimizer | PerMemberOptimizers) -> PerMemberOptimizers:
        """For rows of both's members: the optimizer and scheduler objects themselves."""
        assert isinstance(other, PerMemberOptimizers)
        new = object.__new__(PerMemberOptimizers)
        new.span = span
        new.twins = [*self.twins, *other.twins]
        new.optimizers = [*self.optimizers, *other.optimizers]
        new.schedules = [*self.schedules, *other.schedules]
        new.failed = {}
        new._point()
        return new

    def take(self) -> None:
        """After some of the objects were at work elsewhere: their parameters have to be this stack's again."""
        self._point()

    def keep(self, span: Span, rows: list[int]) -> PerMemberOptimizers:
        """The same optimizer objects, on the members' new slices."""
        kept = object.__new__(PerMemberOptimizers)
        slots = rows[: len(span.recipes)]
        kept.span = span
        kept.twins = [self.twins[slot] for slot in slots]
        kept.optimizers = [self.optimizers[slot] for slot in slots]
        kept.schedules = [self.schedules[slot] for slot in slots]
        kept.failed = {}
        kept._point()
        return kept
