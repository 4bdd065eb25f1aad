"""Create a job's optimizer and schedule for a network."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils import _pytree as pytree

from shoal.engine.members.hooks import hooks_set_once
from shoal.engine.optim.kinds import has_modes, set_mode
from shoal.engine.optim.schedules import make_scheduler
from shoal.engine.optim.state import copy_settings, in_torch_form, load_optimizer
from shoal.engine.python_state.module_modes import trainable_as_built
from shoal.engine.python_state.preserve import preserved
from shoal.errors import JobError, describe
from shoal.jobs.job import Job
from shoal.utils.random_state import restored

_lazy_groups: WeakKeyDictionary[nn.Module, list[Any]] = WeakKeyDictionary()
"""The parameter groups that `params` returned for new networks with lazy modules."""


def note_lazy_groups(job: Job, model: nn.Module) -> None:
    """Store the parameter groups that `params` returns for a new network with lazy modules.

    They may be others once the parameters have shapes, as after a resume: `p.ndim` of one without a shape is 1.
    """
    if job.params is not None and any(map(is_lazy, model.parameters())):
        with suppress(Exception), trying(job):  # the same error is reported when the optimizer is made
            _lazy_groups[model] = _copied_groups(job.params(model))


def _copied_groups(groups: Iterable[Any]) -> list[Any]:
    """Copy parameter groups, with the same parameters, since an optimizer writes to its groups."""
    return [_copied_group(group) if isinstance(group, dict) else group for group in groups]


def _copied_group(group: dict[str, Any]) -> dict[str, Any]:
    return group | {"params": group["params"] if isinstance(group["params"], Tensor) else list(group["params"])}


def make_optimizer(job: Job, model: nn.Module) -> Optimizer:
    """Create the job's optimizer for this model."""
    settings = pytree.tree_map_only(Tensor, _own_copy, dict(job.hparams))
    with hooks_set_once(model) if of_users(job.params, job.optimizer) else nullcontext():
        if model in _lazy_groups:
            params: Any = _copied_groups(_lazy_groups[model])
        else:
            with trainable_as_built(model):
                params = model.parameters() if job.params is None else _materialised(job.params(model))
        optimizer = job.optimizer(params, **settings)
    if not isinstance(optimizer, Optimizer):
        raise JobError(f"optimizer built a {type(optimizer).__name__}; use a torch.optim.Optimizer class")
    if has_modes(optimizer):
        set_mode(optimizer, "train")
    return optimizer


def _materialised(params: Any) -> Any:
    """Return what `params` gave, with an iterator's parameters in a list."""
    return list(params) if isinstance(params, Iterator) else params


def make_optimizer_again(
    job: Job, model: nn.Module, optimizer: Optimizer, schedule: LRScheduler | None
) -> tuple[Optimizer, LRScheduler | None]:
    """Create the optimizer and schedule again, with fresh state but the settings and the schedule's place of these."""
    new = make_optimizer(job, model)
    new_schedule = make_schedule(job, new)
    if in_torch_form(state := new.state_dict()):
        load_optimizer(new, {**state, "param_groups": optimizer.state_dict()["param_groups"]})
    else:
        copy_settings(new, optimizer)
    if schedule is not None and new_schedule is not None:
        new_schedule.load_state_dict(copy.deepcopy(schedule.state_dict()))
    return new, new_schedule


def drawn_by_optimizer(job: Job, model: nn.Module) -> tuple[bool, bool]:
    """Return whether the job's optimizer draws from torch's generator, and whether from `random` or `numpy.random`.

    It is tried for one step on a copy of the network.
    """
    if str(getattr(job.optimizer, "__module__", "")).startswith("torch."):
        return False, False
    with restored() as modules, torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        step_on_copy(job, model)
        return not torch.equal(torch.get_rng_state(), before), modules.moved()


def step_on_copy(job: Job, model: nn.Module) -> None:
    """Take one step of the job's optimizer on a copy of the network, to see what it does besides."""
    with suppress(Exception):  # training reports the same error
        model_copy = copy.deepcopy(model)
        optimizer = make_optimizer(job, model_copy)
        for parameter in model_copy.parameters():
            parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
        optimizer.step()


def trying(job: Job, *, step: bool = False) -> AbstractContextManager[Any]:
    """Create and advance optimizers and schedules for inspection inside this context; with `step`, also run the step.

    Afterwards, Python state that this has changed (a counter in a closure) is restored.
    """
    roots: dict[str, Any] = {"schedule": job.schedule, "optimizer": job.optimizer, "params": job.params}
    if step:
        factory = None if isinstance(job.model, nn.Module) else job.model
        roots |= {"step": job.step, "loss": job.loss, "metrics": job.metrics, "factory": factory}
    return preserved(roots) if of_users(*roots.values()) else nullcontext()


def of_users(*code: Any) -> bool:
    """Return whether some of these functions and classes are not torch's own."""
    return any(not str(getattr(item, "__module__", "torch.")).startswith("torch.") for item in code)


def _own_copy(value: Tensor) -> Tensor:
    """Copy a learning rate that is a tensor, since schedulers write to it and jobs may share the user's."""
    return value if value.requires_grad or isinstance(value, nn.Parameter) else value.clone()


def make_schedule(job: Job, optimizer: Optimizer) -> LRScheduler | None:
    """Create the job's schedule for this optimizer. Raises a JobError if it cannot be created."""
    try:
        scheduler: LRScheduler | None = None if job.schedule is None else make_scheduler(optimizer, job.schedule)
        return scheduler
    except JobError:
        raise
    except Exception as error:
        if isinstance(job.schedule, type) and issubclass(job.schedule, LRScheduler):
            name = job.schedule.__name__
            raise JobError(
                f"schedule is the class {name}, and building it with the optimizer alone raised {describe(error)}; "
                f"pass its other arguments too: lambda optimizer: {name}(optimizer, ...)"
            ) from error
        first = f"; schedule(0) raised {describe(error.__cause__)}" if error.__cause__ is not None else ""
        raise JobError(
            f"schedule raised {describe(error)}{first}; pass step -> factor or optimizer -> lr_scheduler"
        ) from error
