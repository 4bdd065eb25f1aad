"""A job's optimizer and schedule, made for one network."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils import _pytree as pytree

from shoal.engine.members.hooks import hooks_set_once
from shoal.engine.optim.kinds import has_modes, set_mode
from shoal.engine.optim.schedules import make_scheduler
from shoal.engine.python_state.preserve import preserved
from shoal.errors import JobError, describe
from shoal.jobs.job import Job

_lazy_groups: WeakKeyDictionary[nn.Module, list[Any]] = WeakKeyDictionary()
"""What `params` gave for networks with lazy modules, as they were built."""


def note_lazy_groups(job: Job, model: nn.Module) -> None:
    """Call `params` on a new network with lazy modules: once they have shapes, as after a resume, it may give others.

    `p.ndim` of a parameter without a shape is 1, so that groups by `p.ndim` are others then.
    """
    if job.params is not None and any(map(is_lazy, model.parameters())):
        with suppress(Exception), trying(job):  # what it raises is said when the optimizer is made
            _lazy_groups[model] = _copied_groups(job.params(model))


def _copied_groups(groups: Iterable[Any]) -> list[Any]:
    """Parameter groups that an optimizer may write to, with the same parameters."""
    return [_copied_group(group) if isinstance(group, dict) else group for group in groups]


def _copied_group(group: dict[str, Any]) -> dict[str, Any]:
    return group | {"params": group["params"] if isinstance(group["params"], Tensor) else list(group["params"])}


def make_optimizer(job: Job, model: nn.Module) -> Optimizer:
    """The job's own optimizer on this model."""
    settings = pytree.tree_map_only(Tensor, _own_copy, dict(job.hparams))
    with hooks_set_once(model):
        if model in _lazy_groups:
            params: Any = _copied_groups(_lazy_groups[model])
        else:
            params = model.parameters() if job.params is None else job.params(model)
        optimizer = job.optimizer(params, **settings)
    if not isinstance(optimizer, Optimizer):
        raise JobError(f"optimizer built a {type(optimizer).__name__}; use a torch.optim.Optimizer class")
    if has_modes(optimizer):
        set_mode(optimizer, "train")
    return optimizer


def trying(job: Job, *, step: bool = False) -> AbstractContextManager[Any]:
    """Inside, optimizers and schedules may be made and moved to see what they are like, with `step` also the step.

    After: whatever Python state that has changed (a counter in a closure) is as it was.
    """
    roots: dict[str, Any] = {"schedule": job.schedule, "optimizer": job.optimizer, "params": job.params}
    if step:
        factory = None if isinstance(job.model, nn.Module) else job.model
        roots |= {"step": job.step, "loss": job.loss, "metrics": job.metrics, "factory": factory}
    users = [root for root in roots.values() if not str(getattr(root, "__module__", "torch.")).startswith("torch.")]
    return preserved(roots) if users else nullcontext()


def _own_copy(value: Tensor) -> Tensor:
    """Schedulers write into a learning rate that is a tensor; the user's, which jobs may share, stays as it is."""
    return value if value.requires_grad or isinstance(value, nn.Parameter) else value.clone()


def make_schedule(job: Job, optimizer: Optimizer) -> LRScheduler | None:
    """The job's schedule on this optimizer; JobError, in words, where there can be none."""
    try:
        scheduler: LRScheduler | None = None if job.schedule is None else make_scheduler(optimizer, job.schedule)
        return scheduler
    except JobError:
        raise
    except Exception as error:
        first = f"; schedule(0) raised {describe(error.__cause__)}" if error.__cause__ is not None else ""
        raise JobError(
            f"schedule raised {describe(error)}{first}; pass step -> factor or optimizer -> lr_scheduler"
        ) from error
