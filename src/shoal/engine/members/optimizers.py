"""A job's optimizer and schedule, made for one network."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils import _pytree as pytree

from shoal.engine.members.hooks import hooks_set_once
from shoal.engine.optim.kinds import has_modes, set_mode
from shoal.engine.optim.schedules import make_scheduler
from shoal.engine.python_state.preserve import preserved
from shoal.errors import JobError, describe
from shoal.jobs.job import Job


def make_optimizer(job: Job, model: nn.Module) -> Optimizer:
    """The job's own optimizer on this model."""
    settings = pytree.tree_map_only(Tensor, _own_copy, dict(job.hparams))
    with hooks_set_once(model) if _of_users(job.params, job.optimizer) else nullcontext():
        optimizer = job.optimizer(job.params(model) if job.params is not None else model.parameters(), **settings)
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
    return preserved(roots) if _of_users(*roots.values()) else nullcontext()


def _of_users(*code: Any) -> bool:
    """Whether some of this is not torch's own."""
    return any(not str(getattr(item, "__module__", "torch.")).startswith("torch.") for item in code)


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
