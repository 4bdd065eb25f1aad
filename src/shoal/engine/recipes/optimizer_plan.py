"""A member's optimizer as a stack sees it: groups of parameters, their hyper-parameters, and the schedule."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.utils import _pytree as pytree

from shoal.engine.members.member import Member, draws
from shoal.engine.members.optimizers import drawn_by_optimizer, make_optimizer, make_schedule, trying
from shoal.engine.optim.hparams import split_hparams, structure
from shoal.engine.optim.kinds import needs_closure
from shoal.engine.optim.rule import Flags
from shoal.engine.optim.schedules import ScheduleRunner
from shoal.engine.python_state.preserve import PythonState
from shoal.engine.python_state.saved_state import step_hooks
from shoal.engine.tracing.patches import Untraceable


@dataclass(slots=True, eq=False)
class OptimizerPlan:
    """The parts of a member's optimizer: which parameters are in which group, and the settings of each group."""

    kind: type[Optimizer]
    groups: list[list[int]]
    """For each group, the indices of its parameters in the trace's order."""
    settings: list[dict[str, Any]]
    """For each group, its options as in `param_groups`, before the schedule changed any."""
    flags: list[Flags] | None
    """For each group, the settings that change the arithmetic. None: the class has no rule, and each member's own
    optimizer object runs."""
    runner: ScheduleRunner | None = None

    def skeleton(self) -> list[dict[str, Any]]:
        """Return the param groups as a new optimizer's `state_dict()` has them."""
        first = 0
        groups = []
        for group, settings in zip(self.groups, self.settings, strict=True):
            groups.append({**settings, "params": list(range(first, first + len(group)))})
            first += len(group)
        return groups

    def began_together(self, member: Member, used: Sequence[bool]) -> bool:
        """Return whether the trained parameters of each group have had the same number of steps, which rules require.

        Args:
            used: For each parameter, whether it gets a gradient. A clone with a new step may be the first to use one.
        """
        trained = [p.requires_grad and use for p, use in zip(member.model.parameters(), used, strict=True)]
        state_index = iter(range(sum(map(len, self.groups))))
        saved_state = member.optimizer_state.get("state", {})
        for group in self.groups:
            entries = [saved_state.get(index, {}) for _, index in zip(group, state_index, strict=False)]
            trained_entries = [e for e, position in zip(entries, group, strict=True) if trained[position]]
            if len({(any(x is not None for x in e.values()), float(e.get("step", 0))) for e in trained_entries}) > 1:
                return False
        return True

    @property
    def key(self) -> Hashable:
        """A key that is equal for optimizers that one `StackedOptimizer` can update."""
        common = None if self.flags is None else tuple(structure(self.kind, flags) for flags in self.flags)
        return (self.kind, tuple(map(tuple, self.groups)), common)


def _is_customized(optimizer: Optimizer) -> bool:
    """Return whether this optimizer differs from a new one of its class: hooks, a replaced `step`, or state."""
    hooks = (
        step_hooks(optimizer),
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    )
    started = any(float(state.get("step", 1)) for state in optimizer.state.values())
    return any(hooks) or "step" in vars(optimizer) or started


def _grouped(optimizer: Optimizer) -> list[list[int]]:
    """Return the ids of the parameters in each group."""
    return [[id(param) for param in group["params"]] for group in optimizer.param_groups]


def _has_coarse_setting(group: dict[str, Any]) -> bool:
    """Return whether a setting is a tensor of lower precision than the parameters; torch computes in that precision."""
    settings = (value for name, value in group.items() if name != "params")
    leaves = [x for x in pytree.tree_leaves(list(settings)) if isinstance(x, Tensor) and x.is_floating_point()]
    params = [p for p in group["params"] if p.is_floating_point() or p.is_complex()]  # frozen ones may be integers
    least = min((torch.finfo(p.dtype).eps for p in params), default=1.0)
    return any(torch.finfo(x.dtype).eps > least for x in leaves)


def _has_side_effects(runner: ScheduleRunner, state: PythonState) -> bool:
    """Return whether creating or stepping the schedule changes Python state. Then only the real one may be used, in
    order.

    Args:
        runner: A separate runner to try it on, since a schedule may count its calls.
    """
    functions = PythonState({"functions": runner.functions})  # made by the schedule, so that `state` does not have them
    if not state.changes() and runner.can_table():
        runner.step()
    for function in runner.functions:
        with suppress(Exception):
            function(1)
    return any(noted.changes() or noted.unrestorable for noted in (state, functions))


def plan_optimizer(member: Member) -> OptimizerPlan:
    """Return the parts of the member's optimizer.

    Raises:
        Untraceable: If only the plain loop can run it, such as one that needs a closure.
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
    if job.schedule is not None:  # the schedule writes to the groups
        with draws(member, keep=False):
            fresh = make_optimizer(job, model)
        if _grouped(fresh) != _grouped(optimizer):
            raise Untraceable("its schedule changes the optimizer's parameter groups")
    settings = [{k: v for k, v in group.items() if k != "params"} for group in fresh.param_groups]
    is_customized = _is_customized(fresh) or bool(step_hooks(optimizer))  # the latter are those that the schedule set
    is_plain = not is_customized and not any(map(_has_coarse_setting, fresh.param_groups))
    splits = [split_hparams(kind, group) if is_plain else None for group in settings]
    if any(split is None for split in splits):
        if any(drawn_by_optimizer(job, model)):
            raise Untraceable(f"its optimizer {kind.__name__} draws random numbers")
        return OptimizerPlan(kind, groups, settings, None)
    runner = ScheduleRunner(settings, kind, job.schedule, job.schedule_every)
    trial_runner = None if state is None else ScheduleRunner(settings, kind, job.schedule, job.schedule_every)
    if runner.foreign or (state is not None and trial_runner is not None and _has_side_effects(trial_runner, state)):
        return OptimizerPlan(kind, groups, settings, None)
    if member.optimizer_state:
        runner.resume(member.optimizer_state["param_groups"], member.schedule_state)
    with_schedule = [split_hparams(kind, group, scheduled=runner.moves()) for group in settings]
    return OptimizerPlan(kind, groups, settings, [split[0] for split in with_schedule if split is not None], runner)
