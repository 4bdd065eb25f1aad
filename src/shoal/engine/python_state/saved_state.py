"""What a member has become besides weights, optimizer state and schedule: Python state, and what its optimizer keeps.

Only jobs whose step changes Python state, and those with optimizers or schedules of their own making, have any: for the
others nothing is looked for and nothing saved.
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
    """The Python state of one member. Made anew in each process; what was saved elsewhere is loaded."""

    def __init__(self) -> None:
        self.watched = True
        """Whether its step may change Python state; a step that could be traced does not."""
        self.wanted = False
        """Whether it will be needed: for a run folder, or for clones."""
        self.job: Keeper | None = None
        """Of what the job's functions and the model reach."""
        self.driver: Keeper | None = None
        """Of the optimizer and scheduler that train it now."""
        self.keeps_schedule = False
        """Whether the scheduler's attributes are saved with those of the optimizer."""
        self.stand_ins: dict[str, Any] = {}
        """A clone's copies of its source's optimizer and scheduler, until it gets its own."""
        self._loaded: Saved | None = None
        self._name = ""

    @property
    def problems(self) -> dict[str, str]:
        """What could not be saved so far: where it is, and why."""
        keepers = (self.job, self.driver)
        return {where: why for keeper in keepers if keeper is not None for where, why in keeper.problems.items()}

    def capture(self) -> dict[str, Plain] | None:
        """All that has changed since its beginning, as plain data and tensors; None where nothing has."""
        if self.job is None and self.driver is None:
            return None if self._loaded is None else dict(self._loaded)
        parts = {"job": self.job, "driver": self.driver}
        saved = {name: keeper.capture() for name, keeper in parts.items() if keeper is not None}
        saved = {name: state for name, state in saved.items() if state is not None}
        return saved or None

    def load(self, saved: Saved | None) -> None:
        """What was captured elsewhere; it is put in place when the member gets its optimizer."""
        self._loaded, self.driver, self.keeps_schedule = saved, None, False

    def begin(self, job: Job, model: nn.Module) -> None:
        """Before an optimizer is made for the member: note what there is or, if it has trained, what it has become."""
        self._name = job.name
        if self._loaded is None and (self.job is not None or self.driver is not None):
            self._loaded = self.capture()
        if self.job is not None:
            self.job.know({("model tensor", n): t for n, t in (*model.named_parameters(), *model.named_buffers())})
        else:
            loaded = (self._loaded or {}).get("job") is not None
            if self.wanted or loaded:  # a lazy network that has its weights can be traced, and could not before
                self.job = Keeper(state_roots(job, model if self.watched or loaded else None), model=model)

    def attach(
        self, optimizer: Optimizer, schedule: Any, model: nn.Module, device: torch.device, *, started: bool
    ) -> None:
        """An optimizer and a scheduler were made for the member. `started`: it has trained before, with other ones."""
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
        """Put in place what a member at its end has become elsewhere, as far as it needs no optimizer."""
        if self._loaded is not None and self._loaded.get("job") is not None:
            self.job = self.job or Keeper(state_roots(job, model), model=model)
            with suppress(Exception):  # its weights are what counts, and they are there
                self.job.restore(self._loaded["job"], device, partly=True)
                end_lazy_modules(model)


def state_roots(job: Job, model: nn.Module | None) -> dict[str, Any]:
    """What a job's Python state can be reached from; without the model, what its optimizer and schedule can reach."""
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
    """Whether a scheduler's state_dict() is plain values and tensors alone; otherwise its attributes are saved."""
    leaves = pytree.tree_leaves(state)
    return all(isinstance(leaf, bool | int | float | complex | str | bytes | None | Tensor) for leaf in leaves)


def driver_roots(optimizer: Optimizer, schedule: Any) -> dict[str, Any]:
    """An optimizer, a scheduler and its functions, as far as they may have state that no `state_dict()` has."""
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    torchs = type(optimizer).__module__.partition(".")[0] == "torch"
    roots: dict[str, Any] = {} if torchs and not any(hooks) else {"optimizer": optimizer}
    if schedule is None:
        return roots
    if not _is_torchs(schedule):
        return {"optimizer": optimizer, "scheduler": schedule}
    return roots | {f"schedule function {n}": f for n, f in enumerate(schedule_functions(schedule))}


def schedule_functions(schedule: Any) -> list[Any]:
    """Functions of the user's that torch's schedulers call. A scheduler's state_dict() has what they keep only where
    they are objects with attributes."""
    functions = [*getattr(schedule, "lr_lambdas", ()), getattr(schedule, "_scale_fn_custom", None)]
    inner = [function for part in getattr(schedule, "_schedulers", ()) for function in schedule_functions(part)]
    return [f for f in functions if isinstance(f, _FUNCTIONS)] + inner


_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)


def end_lazy_modules(model: nn.Module) -> None:
    """Give lazy modules that were put back to where they had their weights the class that they then had."""
    for module in model.modules():
        if isinstance(module, LazyModuleMixin) and "_initialize_hook" not in vars(module):
            module.__class__ = type(module).cls_to_become or type(module)


def _is_torchs(scheduler: Any) -> bool:
    parts = getattr(scheduler, "_schedulers", ())
    return type(scheduler).__module__ == lr_scheduler.__name__ and all(map(_is_torchs, parts))


def share(states: Sequence[SavedState]) -> None:
    """Note what several of these can change: which of them did cannot be said, so it is not saved."""
    keepers = [state.job for state in states if state.job is not None]
    holders = Counter(handle for keeper in keepers for handle in keeper.handles())
    several = {handle for handle, count in holders.items() if count > 1}
    for keeper in keepers:
        keeper.shared = several & keeper.handles()
