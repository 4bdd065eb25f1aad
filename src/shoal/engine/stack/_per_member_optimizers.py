"""Optimizer classes without a rule: each member's own optimizer object works on its rows of the stack."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from shoal.engine.members.optimizers import make_optimizer, make_optimizer_again, make_schedule, trying
from shoal.engine.optim.kinds import has_modes, learning_rate, set_mode
from shoal.engine.optim.schedules import jump_to
from shoal.engine.optim.state import load_optimizer

if TYPE_CHECKING:
    from shoal.engine.stack.optimizers import Grads, Span


class PerMemberOptimizers:
    """The real optimizer object of each member, on a copy of its model (its model_copy) whose weights are views of the
    stack."""

    def __init__(
        self, span: Span, copies: list[nn.Module], optimizers: list[Any], schedules: list[Any], last_rates: list[float]
    ) -> None:
        self.span, self.copies, self.optimizers, self.schedules = span, copies, optimizers, schedules
        self.last_rates = last_rates
        """Each member's learning rate at its last step."""
        self.failed: dict[int, Exception] = {}
        """Errors that members' optimizers raised in their last step, by slot."""
        self._schedule_errors: dict[int, Exception] = {}
        self._view_stack()

    @classmethod
    def of(cls, span: Span) -> PerMemberOptimizers:
        """Create the optimizers and schedules of a span's members from their current training state."""
        members = span.members
        new = cls(span, [copy.deepcopy(member.model) for member in members], [], [], [])
        for member in members:
            member.saved_state.begin(member.job, member.model)
        for member, model_copy in zip(members, new.copies, strict=True):
            # for a member that has trained, a new schedule starts over, which must not change state that its step reads
            with trying(member.job) if member.batches else nullcontext():
                new.optimizers.append(make_optimizer(member.job, model_copy))
                new.schedules.append(make_schedule(member.job, new.optimizers[-1]))
        for member, optimizer, schedule in zip(members, new.optimizers, new.schedules, strict=True):
            if member.optimizer_state:
                load_optimizer(optimizer, member.optimizer_state)
                optimizer._opt_called = (
                    True  # it has taken steps elsewhere; avoids torch's warning about the order of calls
                )
            if schedule is not None and member.schedule_state is not None:
                schedule.load_state_dict(copy.deepcopy(member.schedule_state))
        for member, optimizer, schedule, model_copy in zip(
            members, new.optimizers, new.schedules, new.copies, strict=True
        ):
            member.saved_state.attach(optimizer, schedule, model_copy, span.device, started=member.batches > 0)
        new.last_rates = new._current_rates()
        return new

    def _view_stack(self) -> None:
        """Make the copies' parameters views of the stack."""
        self._params = []
        stack = self.span.stack
        for row, model_copy in enumerate(self.copies, self.span.start):
            params = dict(model_copy.named_parameters())
            for stacked, name in zip(stack.params, stack.param_names, strict=True):
                params[name].data = stacked.detach()[row]
            self._params.append([params[stack.param_names[i]] for i in stack.trained])

    def update(self, grads: Grads, active: Tensor | None) -> None:
        """Take one step for the members in `active`; None: for all. A member whose optimizer raises is noted in
        `failed`."""
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

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Inside this context, optimizers with modes are in eval mode. Afterwards the weights are restored, bit for
        bit."""
        optimizers = [optimizer for optimizer in self.optimizers if has_modes(optimizer)]
        with torch.no_grad():
            saved = [(p, p.detach().clone()) for o in optimizers for g in o.param_groups for p in g["params"]]
        try:
            for optimizer in optimizers:
                set_mode(optimizer, "eval")
            yield
        finally:
            for optimizer in optimizers:
                set_mode(optimizer, "train")
            with torch.no_grad():
                for param, value in saved:
                    param.copy_(value)

    # --- schedules --------------------------------------------------------------------------------------------------

    @property
    def schedule_failed(self) -> bool:
        return bool(self._schedule_errors)

    def schedule_failures(self) -> dict[int, Exception]:
        """Return the errors that members' schedules raised after a completed step, by slot."""
        return self._schedule_errors

    def step_schedules(self) -> None:
        """Advance the schedules after an optimizer step of all members."""
        self.last_rates = self._current_rates()
        for slot, (member, schedule) in enumerate(zip(self.span.members, self.schedules, strict=True)):
            if schedule is not None and member.job.schedule_every == "step" and slot not in self.failed:
                self._advance_schedule(slot, schedule)

    def end_epoch(self, slot: int, value: float | None) -> None:
        """Advance one member's per-epoch schedule. `value` is the watched metric."""
        schedule = self.schedules[slot]
        if not isinstance(schedule, ReduceLROnPlateau):
            self._advance_schedule(slot, schedule)
        elif value is not None:
            self._advance_schedule(slot, schedule, value)

    def _advance_schedule(self, slot: int, schedule: Any, *metric: float) -> None:
        if slot not in self._schedule_errors:
            try:
                schedule.step(*metric)
            except Exception as error:
                self._schedule_errors[slot] = error

    def _current_rates(self) -> list[float]:
        return [learning_rate(optimizer) for optimizer in self.optimizers]

    # --- members' state ---------------------------------------------------------------------------------------------

    def rows(self, slot: int) -> list[Tensor]:
        """Return an empty list: a member's state is in its own optimizer."""
        return []

    def state_dict(self, slot: int, rows: Sequence[Tensor]) -> dict[str, Any]:
        """Return a copy of a member's `state_dict()`."""
        return copy.deepcopy(self.optimizers[slot].state_dict())

    def schedule_state(self, slot: int) -> dict[str, Any] | None:
        """Return the `state_dict()` of a member's scheduler; None if it has none."""
        schedule = self.schedules[slot]
        return None if schedule is None else copy.deepcopy(schedule.state_dict())

    def load(self, slot: int, step: int | None) -> None:
        """Load the member's saved optimizer state. `step`: continue its schedule as if so many steps had been taken."""
        member = self.span.members[slot]
        if member.optimizer_state:
            load_optimizer(self.optimizers[slot], member.optimizer_state)
        else:
            self.optimizers[slot], self.schedules[slot] = make_optimizer_again(
                member.job, self.copies[slot], self.optimizers[slot], self.schedules[slot]
            )
        if step is not None and self.schedules[slot] is not None:
            jump_to(self.schedules[slot], step)

    # --- members join and leave -------------------------------------------------------------------------------------

    def merged(self, span: Span, other: PerMemberOptimizers) -> PerMemberOptimizers:
        """Return the optimizer and scheduler objects of the members of both, on the rows of `span`."""
        return PerMemberOptimizers(
            span,
            [*self.copies, *other.copies],
            [*self.optimizers, *other.optimizers],
            [*self.schedules, *other.schedules],
            [*self.last_rates, *other.last_rates],
        )

    def take(self, other: PerMemberOptimizers, rows: list[int], theirs: list[int]) -> None:
        """Point the members' optimizer objects, which the other shares, at this stack again."""
        self._view_stack()
        for row, their_row in zip(rows, theirs, strict=True):
            if row < len(self.last_rates):
                self.last_rates[row] = other.last_rates[their_row]

    def keep(self, span: Span, rows: list[int]) -> PerMemberOptimizers:
        """Return the optimizer objects of these rows only; they are the rows of `span`."""
        slots = rows[: len(span.recipes)]
        return PerMemberOptimizers(
            span,
            [self.copies[slot] for slot in slots],
            [self.optimizers[slot] for slot in slots],
            [self.schedules[slot] for slot in slots],
            [self.last_rates[slot] for slot in slots],
        )
