"""A member of a stack becomes another network of its shapes, in place: no new trace, no new stack."""

from __future__ import annotations

import torch

from shoal.engine.members.member import Member, make_optimizer, make_schedule
from shoal.engine.optim import load_optimizer
from shoal.engine.optim.schedules import jump_to
from shoal.engine.stack.optimizers import StackedOptimizer
from shoal.engine.stack.stack import Stack
from shoal.engine.tiers.stacked.unit import StackedUnit


@torch.no_grad()
def load_slot(unit: StackedUnit, slot: int, step: int | None) -> None:
    """Take a member's own weights, buffers and optimizer state for its rows; `step`: where its schedule stands."""
    unit.rates_of.settle()
    stack, member = unit.stack, unit.members[slot]
    for row, own in enumerate(stack.rows):
        if own == slot:
            _tensors(stack, row, member)
            stack.active[row] = True
    _optimizer(stack, slot, member, step)
    unit._everybody = bool(stack.active.all())


def _tensors(stack: Stack, row: int, member: Member) -> None:
    params, buffers = dict(member.model.named_parameters()), dict(member.model.named_buffers())
    for stacked, name in zip(stack.params, stack.param_names, strict=True):
        stacked.detach()[row].copy_(params[name])
    for stacked, name in zip(stack.buffers, stack.buffer_names, strict=True):
        stacked[row].copy_(buffers[name])
    if stack.scaler is not None and member.scaler_state is not None:
        stack.scaler.load_state_dict(row, member.scaler_state)


def _optimizer(stack: Stack, slot: int, member: Member, step: int | None) -> None:
    part = stack.optimizer.at(slot)
    own = slot - part.span.start
    if not isinstance(part, StackedOptimizer):
        if member.optimizer_state:
            load_optimizer(part.optimizers[own], member.optimizer_state)
        else:
            part.optimizers[own] = make_optimizer(member.job, part.twins[own])
            part.schedules[own] = make_schedule(member.job, part.optimizers[own])
        schedule = part.schedules[own]
        if step is not None and schedule is not None:
            jump_to(schedule, step)
        return
    plan = part.plans[own]
    assert plan.runner is not None
    if member.optimizer_state:
        plan.runner.resume(member.optimizer_state["param_groups"], None)
    if step is not None:
        plan.runner.jump(step)
    for row, whose in enumerate(part.span.rows):
        if whose == own:
            part.columns.set_row(row, plan.runner.values())
            _fresh(part, row)
            part._load([row])


def _fresh(part: StackedOptimizer, row: int) -> None:
    """A row's optimizer state as it is before the first step."""
    for g, ((rule, held), states) in enumerate(zip(part.groups, part.states, strict=True)):
        numbers = {name: column[row : row + 1] for name, column in part.columns.groups[g].items()}
        begun = rule.init_all([part.span.leaves[i][row : row + 1] for i in held], numbers)
        for state, new in zip(states, begun, strict=True):
            for name, value in state.items():
                value[row].copy_(new[name][0])
