"""A member's optimizer as a stack sees it: groups of parameters, their numbers, its schedule."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.utils import _pytree as pytree

from shoal.engine.members.member import Member, draws
from shoal.engine.members.optimizers import make_optimizer, make_schedule, trying
from shoal.engine.optim.hparams import split_hparams, structure
from shoal.engine.optim.kinds import needs_closure
from shoal.engine.optim.rule import Flags
from shoal.engine.optim.schedules import ScheduleRunner
from shoal.engine.python_state.preserve import PythonState
from shoal.engine.tracing.patches import Untraceable


@dataclass(slots=True, eq=False)
class OptimizerPlan:
    """A member's optimizer, taken apart: which parameters are in which group, and the numbers of each group."""

    kind: type[Optimizer]
    groups: list[list[int]]
    """Positions of the parameters, in the trace's order."""
    settings: list[dict[str, Any]]
    flags: list[Flags] | None
    """Structural settings per group; None: no rule, the real class runs a member at a time."""
    runner: ScheduleRunner | None = None

    def skeleton(self) -> list[dict[str, Any]]:
        """The param groups as the optimizer's own `state_dict()` has them at its beginning."""
        first = 0
        groups = []
        for group, settings in zip(self.groups, self.settings, strict=True):
            groups.append({**settings, "params": list(range(first, first + len(group)))})
            first += len(group)
        return groups

    def began_together(self, member: Member, used: Sequence[bool]) -> bool:
        """Whether the parameters of each group that are trained have had equally many steps, as rules take it.

        `used`: by a parameter's position, whether it gets a gradient. A clone's new step may be the first to use one.
        """
        trained = [p.requires_grad and use for p, use in zip(member.model.parameters(), used, strict=True)]
        saved = iter(range(sum(map(len, self.groups))))
        known = member.optimizer_state.get("state", {})
        for group in self.groups:
            entries = [known.get(index, {}) for _, index in zip(group, saved, strict=False)]
            begun = [e for e, position in zip(entries, group, strict=True) if trained[position]]
            if len({(any(x is not None for x in e.values()), float(e.get("step", 0))) for e in begun}) > 1:
                return False
        return True

    @property
    def key(self) -> Hashable:
        common = None if self.flags is None else tuple(structure(self.kind, flags) for flags in self.flags)
        return (self.kind, tuple(map(tuple, self.groups)), common)


def _its_own(optimizer: Optimizer) -> bool:
    """Does this optimizer do something of its own: hooks, another step than its class's, state it came with?"""
    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    )
    started = any(float(state.get("step", 1)) for state in optimizer.state.values())
    return any(hooks) or "step" in vars(optimizer) or started


def _narrow(group: dict[str, Any]) -> bool:
    """Whether a setting is a tensor of fewer digits than the parameters, in which torch then computes with it."""
    settings = (value for name, value in group.items() if name != "params")
    leaves = [x for x in pytree.tree_leaves(list(settings)) if isinstance(x, Tensor) and x.is_floating_point()]
    least = min((torch.finfo(p.dtype).eps for p in group["params"]), default=1.0)
    return any(torch.finfo(x.dtype).eps > least for x in leaves)


def _keeps_state(runner: ScheduleRunner, state: PythonState) -> bool:
    """Whether making or asking a schedule changes Python state: then only the real one may be asked, and in order.

    `runner`: one to try it on, since a schedule may count its calls by itself.
    """
    if not state.changes() and runner.can_table():
        runner.step()
    return bool(state.changes() or state.unrestorable)


def plan_optimizer(member: Member) -> OptimizerPlan:
    """Take the member's own optimizer apart.

    Raises:
        Untraceable: when only the real loop can drive it.
    """
    with trying(member.job) as state:
        return _plan_optimizer(member, state)


def _plan_optimizer(member: Member, state: PythonState | None) -> OptimizerPlan:
    job, model = member.job, member.model
    with draws(member, keep=False):
        optimizer = make_optimizer(job, model)
        make_schedule(job, optimizer)
    if needs_closure(optimizer):
        raise Untraceable(f"{type(optimizer).__name__} evaluates the loss itself")
    position = {id(p): i for i, (_, p) in enumerate(model.named_parameters())}
    groups = []
    for group in optimizer.param_groups:
        if any(id(p) not in position for p in group["params"]):
            raise Untraceable("its optimizer has parameters that are not the model's")
        groups.append([position[id(p)] for p in group["params"]])
    kind = type(optimizer)
    fresh = optimizer
    if job.schedule is not None:  # which writes to the groups
        with draws(member, keep=False):
            fresh = make_optimizer(job, model)
    settings = [{k: v for k, v in group.items() if k != "params"} for group in fresh.param_groups]
    plain = not _its_own(fresh) and not any(map(_narrow, fresh.param_groups))
    splits = [split_hparams(kind, group) if plain else None for group in settings]
    if any(split is None for split in splits):
        return OptimizerPlan(kind, groups, settings, None)
    runner = ScheduleRunner(settings, kind, job.schedule, job.schedule_every)
    tried = None if state is None else ScheduleRunner(settings, kind, job.schedule, job.schedule_every)
    if runner.foreign or (state is not None and tried is not None and _keeps_state(tried, state)):
        return OptimizerPlan(kind, groups, settings, None)
    if member.optimizer_state:
        runner.resume(member.optimizer_state["param_groups"], member.schedule_state)
    moved = [split_hparams(kind, group, scheduled=runner.moves()) for group in settings]
    return OptimizerPlan(kind, groups, settings, [split[0] for split in moved if split is not None], runner)
