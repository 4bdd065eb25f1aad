"""Save and restore the part of a member's state that no `state_dict()` contains, such as Python state of its step.

Only jobs whose step changes Python state, or whose optimizer or schedule is the user's own, have such state. For other
jobs nothing is searched and nothing saved.
"""

from __future__ import annotations

import functools
import types
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.optim import Optimizer, lr_scheduler
from torch.utils import _pytree as pytree

from shoal.engine.python_state._state_codec import Plain
from shoal.engine.python_state.state_keeper import Keeper
from shoal.errors import OutError
from shoal.jobs.job import Job

Saved = Mapping[str, Plain]


class SavedState:
    """The Python state of one member. Each process creates its own and loads what another process saved."""

    def __init__(self) -> None:
        self.watched = True
        """Whether the member's step may change Python state; a step that could be traced does not."""
        self.wanted = False
        """Whether the state will be needed, for a run folder or for clones."""
        self.job: Keeper | None = None
        """Keeps the state that the job's functions and the model reach."""
        self.driver: Keeper | None = None
        """Keeps the state of the current optimizer and scheduler."""
        self.keeps_schedule = False
        """Whether the scheduler's attributes are saved here, since it is not one of torch's schedulers."""
        self.stand_ins: dict[str, Any] = {}
        """For a clone: copies of its source's optimizer and scheduler, until it gets its own."""
        self._loaded: Saved | None = None
        self._name = ""

    @property
    def problems(self) -> dict[str, str]:
        """The state that could not be saved so far: its location -> the reason."""
        keepers = (self.job, self.driver)
        return {where: why for keeper in keepers if keeper is not None for where, why in keeper.problems.items()}

    def capture(self) -> dict[str, Plain] | None:
        """Return the state that has changed since the beginning, as plain data and tensors; None if there is none."""
        if self.job is None and self.driver is None:
            return None if self._loaded is None else dict(self._loaded)
        parts = {"job": self.job, "driver": self.driver}
        saved = {name: keeper.capture() for name, keeper in parts.items() if keeper is not None}
        saved = {name: state for name, state in saved.items() if state is not None}
        return saved or None

    def load(self, saved: Saved | None) -> None:
        """Take a state that `capture()` returned. It is restored when the member gets its optimizer."""
        self._loaded, self.driver, self.keeps_schedule = saved, None, False

    def begin(self, job: Job, model: nn.Module) -> None:
        """Record the initial state, or the current one of a member that has trained, before an optimizer is made."""
        self._name = job.name
        if self._loaded is None and (self.job is not None or self.driver is not None):
            self._loaded = self.capture()
        if self.job is not None:
            self.job.know({("model tensor", n): t for n, t in (*model.named_parameters(), *model.named_buffers())})
        else:
            loaded = (self._loaded or {}).get("job") is not None
            if self.wanted or loaded:  # a lazy network was watched before it had its weights
                self.job = Keeper(state_roots(job, model if self.watched or loaded else None), model=model)

    def attach(
        self, optimizer: Optimizer, schedule: Any, model: nn.Module, device: torch.device, *, started: bool
    ) -> None:
        """Use a new optimizer and scheduler. `started`: the member has trained before, so its state is restored."""
        self.keeps_schedule = schedule is not None and not _is_torchs(schedule)
        roots = driver_roots(optimizer, schedule)
        self.driver = Keeper(roots, model=model, beside=self.job) if roots else None
        if self.job is not None:
            made = {"optimizer": optimizer, "scheduler": schedule}
            self.job.swap({id(old): made[name] for name, old in self.stand_ins.items()})
            self.job.know({(name,): value for name, value in made.items()})
            self.stand_ins = {}
        if started:
            self._put_back(device)
            end_lazy_modules(model)
        self._loaded = None

    def _put_back(self, device: torch.device) -> None:
        saved = self._loaded or {}
        try:
            if self.job is not None:
                self.job.restore(saved.get("job"), device)
            if self.driver is not None:
                self.driver.restore(saved.get("driver"), device)
        except KeyError as error:
            raise OutError(
                f"job {self._name!r}: its checkpoint holds {error.args[0]}, which this job does not have; put the code "
                "back as it was, or use another folder"
            ) from error

    def finish(self, job: Job, model: nn.Module, device: torch.device) -> None:
        """Restore the loaded state of a member that has ended, except for its optimizer."""
        if self._loaded is not None and self._loaded.get("job") is not None:
            self.job = self.job or Keeper(state_roots(job, model), model=model)
            with suppress(Exception):  # the weights are already restored, and they matter most
                self.job.restore(self._loaded["job"], device, partly=True)
                end_lazy_modules(model)


def state_roots(job: Job, model: nn.Module | None) -> dict[str, Any]:
    """Return the objects to search for a job's Python state; without a model, only those of optimizer and schedule."""
    roots: dict[str, Any] = {
        "schedule": job.schedule,
        "optimizer class": job.optimizer,
        "params": job.params,
    }
    if model is not None:
        roots |= {"step": job.step, "loss": job.loss, "metrics": job.metrics, "collate": job.collate, "model": model}
        if not isinstance(job.model, nn.Module):
            roots["factory"] = job.model
    return roots


def storable(state: Any) -> bool:
    """Return whether a scheduler's state_dict() has only plain values and tensors; if not, its attributes are saved."""
    leaves = pytree.tree_leaves(state)
    return all(isinstance(leaf, bool | int | float | complex | str | bytes | None | Tensor) for leaf in leaves)


def step_hooks(optimizer: Optimizer) -> list[Any]:
    """Return the hooks of an optimizer's step. One that wraps another, and does not call `Optimizer.__init__`, has
    none."""
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    return [hook for name in names for hook in getattr(optimizer, name, {}).values()]


def driver_roots(optimizer: Optimizer, schedule: Any) -> dict[str, Any]:
    """Return those of an optimizer, a scheduler and its functions that may have state outside any `state_dict()`."""
    torchs = type(optimizer).__module__.partition(".")[0] == "torch"
    roots: dict[str, Any] = {} if torchs and not step_hooks(optimizer) else {"optimizer": optimizer}
    if schedule is None:
        return roots
    if not _is_torchs(schedule):
        return {"optimizer": optimizer, "scheduler": schedule}
    return roots | {f"schedule function {n}": f for n, f in enumerate(schedule_functions(schedule))}


def schedule_functions(schedule: Any) -> list[Any]:
    """Return the user's functions that a scheduler of torch calls.

    A scheduler's state_dict() contains their state only if they are objects with attributes.
    """
    functions = [*getattr(schedule, "lr_lambdas", ()), getattr(schedule, "_scale_fn_custom", None)]
    inner = [function for part in getattr(schedule, "_schedulers", ()) for function in schedule_functions(part)]
    return [f for f in functions if isinstance(f, _FUNCTIONS)] + inner


_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)


def end_lazy_modules(model: nn.Module) -> None:
    """Give restored lazy modules that have their weights the class that torch gives them at the first batch."""
    for module in model.modules():
        if isinstance(module, LazyModuleMixin) and "_initialize_hook" not in vars(module):
            module.__class__ = type(module).cls_to_become or type(module)


def _is_torchs(scheduler: Any) -> bool:
    parts = getattr(scheduler, "_schedulers", ())
    return type(scheduler).__module__ == lr_scheduler.__name__ and all(map(_is_torchs, parts))


def share(states: Sequence[SavedState]) -> None:
    """Find the state that several members can change. It is not saved, since it belongs to none of them alone."""
    keepers = [state.job for state in states if state.job is not None]
    holders = Counter(handle for keeper in keepers for handle in keeper.handles())
    several = {handle for handle, count in holders.items() if count > 1}
    for keeper in keepers:
        keeper.shared = several & keeper.handles()
