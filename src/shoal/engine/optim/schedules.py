"""Schedules: the user's scheduler runs on the host with a stand-in optimizer, and its values are read as columns.

Torch's schedulers read and write `optimizer.param_groups`, some of them more than the learning rate (OneCycleLR and
CyclicLR change momentum or beta1), and users write their own. On a real optimizer of the same class, with the same
groups and one dummy parameter in each, the scheduler does exactly what it would do in the user's loop.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from shoal.engine.optim.hparams import RULES, numbers, signature, with_defaults
from shoal.engine.python_state.preserve import preserved
from shoal.engine.python_state.saved_state import schedule_functions
from shoal.errors import JobError
from shoal.utils.numpy_values import plain_number

Schedule = Callable[[Any], Any]
"""Either `step -> factor` of the base learning rate, or `optimizer -> lr_scheduler`."""


def make_scheduler(optimizer: Optimizer, schedule: Schedule) -> Any:
    """Return the scheduler that `schedule` creates for this optimizer; a function of the step becomes a LambdaLR.

    It is called with 0 to tell the two kinds apart: a function of the step returns a number.
    """
    first_error: Exception | None = None
    try:
        factor = schedule(0)
    except Exception as error:  # a function of the optimizer may fail on a number in any way
        first_error = error
    else:
        if isinstance(plain_number(factor), (int, float)) or (isinstance(factor, Tensor) and factor.numel() == 1):
            return lr_scheduler.LambdaLR(optimizer, lambda step: float(schedule(step)))
    try:
        scheduler = schedule(optimizer)
    except Exception as error:
        raise error from first_error
    if not (hasattr(scheduler, "step") and hasattr(scheduler, "state_dict")):
        kind = type(scheduler).__name__
        message = f"schedule gave a {kind}; pass step -> factor or optimizer -> torch lr_scheduler"
        raise first_error or JobError(message)
    return scheduler


def jump_to(scheduler: Any, step: int) -> None:
    """Set a schedule to its state after so many steps. Raises a ValueError unless it is a function of the step."""
    if not isinstance(scheduler, lr_scheduler.LambdaLR):
        raise ValueError(f"{type(scheduler).__name__} counts its own steps; only a schedule step -> factor can jump")
    scheduler.last_epoch = step - 1
    scheduler._step_count = max(step, 1)  # at 0 torch would check for optimizer steps and warn
    scheduler.step()


def needs_metric(scheduler: Any) -> bool:
    """Return whether the scheduler's `step` needs a metric, as ReduceLROnPlateau does."""
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        return True
    first = next(iter(inspect.signature(scheduler.step).parameters.values()), None)
    return first is not None and first.default is first.empty and first.kind is first.POSITIONAL_OR_KEYWORD


class ScheduleRunner:
    """Runs one member's schedule. `values()` is what the next optimizer step uses.

    If the scheduler raises, this class does not: the values stay as they are from then on, and `error` holds the
    exception, so that the run can end this member alone.

    >>> runner = ScheduleRunner([{"lr": 1.0}], torch.optim.SGD, lambda step: 0.5**step)
    >>> runner.step(); runner.values()[0]["lr"], runner.table(3)[0, runner.names.index("lr")].tolist()
    (0.5, [0.5, 0.25, 0.125])
    """

    def __init__(
        self,
        hparams: Sequence[Mapping[str, Any]],
        optimizer_cls: type[Optimizer],
        schedule: Schedule | None = None,
        every: Literal["step", "epoch"] = "step",
    ) -> None:
        self.every = every
        self.error: Exception | None = None
        self.raises_in: int | None = None
        """The step of the last `table`, counted from 1, after which the scheduler raises; None if it does not."""
        self.optimizer = _stand_in(optimizer_cls, hparams)
        self._scheduler = None if schedule is None else make_scheduler(self.optimizer, schedule)
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # the stand-in never steps; torch would warn
        self.needs_metric = self._scheduler is not None and needs_metric(self._scheduler)
        if self.needs_metric and every == "step":
            name = type(self._scheduler).__name__
            raise ValueError(f"{name} watches a value that exists once an epoch; use schedule_every='epoch'")
        rule = RULES.get(optimizer_cls)
        groups = [numbers(group) for group in self.optimizer.param_groups]
        self.names: tuple[str, ...] = (
            rule.columns if rule else tuple(n for n in groups[0] if all(n in f for f in groups))
        )

    def values(self) -> list[dict[str, float]]:
        """Return the current number of every column, one dict per param group."""
        groups = [numbers(group) for group in self.optimizer.param_groups]
        return [{name: group[name] for name in self.names} for group in groups]

    def groups(self) -> list[dict[str, Any]]:
        """Return the current param groups as torch has them (with `initial_lr` and similar keys), without the
        parameters."""
        return [
            {name: copy.deepcopy(value) for name, value in group.items() if name not in ("params", "param_names")}
            for group in self.optimizer.param_groups
        ]

    def moves(self) -> frozenset[str]:
        """Return the columns that this schedule may change, for `split_hparams(..., scheduled=)`; all for unknown
        classes."""
        if self._scheduler is None or self.foreign:
            return frozenset(self.names if self.foreign else ())
        cyclic = (lr_scheduler.OneCycleLR, lr_scheduler.CyclicLR)  # all others change only the learning rate
        momentum = {"momentum", "beta1"} if any(isinstance(s, cyclic) for s in _chain(self._scheduler)) else set()
        return frozenset({"lr", *momentum} & set(self.names))

    @property
    def foreign(self) -> bool:
        """Whether a scheduler is not one of torch's own. It may read weights, which the stand-in does not have."""
        return self._scheduler is not None and not all(map(_is_torchs, _chain(self._scheduler)))

    @property
    def functions(self) -> list[Any]:
        """The user's functions that the scheduler calls."""
        return [] if self._scheduler is None else schedule_functions(self._scheduler)

    def step(self, count: int = 1) -> None:
        """Advance the schedule after `count` optimizer steps."""
        if self._scheduler is not None and self.every == "step":
            for _ in range(count):
                self._advance()

    def _advance(self, *metric: float) -> None:
        assert self._scheduler is not None
        if self.error is None:
            try:
                self._scheduler.step(*metric)
            except Exception as error:
                self.error = error

    def jump(self, step: int) -> None:
        """Set the schedule to its state after so many steps."""
        self.error = None
        if self._scheduler is not None:
            jump_to(self._scheduler, step)

    def epoch(self, metric: float | None = None) -> None:
        """Advance the schedule after an epoch. `metric` is the monitored value."""
        if self._scheduler is None or self.every == "step":
            return
        if not self.needs_metric:
            self._advance()
        elif metric is None:
            raise ValueError(f"{type(self._scheduler).__name__} needs a value each epoch, and this epoch has none")
        else:
            self._advance(metric)

    def can_table(self) -> bool:
        """Return whether the coming steps can be computed ahead and undone: the scheduler's state must be complete."""
        if self._scheduler is None or self.every == "epoch":
            return True
        kind = type(self._scheduler)
        complete = kind.state_dict is lr_scheduler.LRScheduler.state_dict
        return isinstance(self._scheduler, lr_scheduler.LRScheduler) and (complete or _is_torchs(self._scheduler))

    def table(self, steps: int) -> Tensor | None:
        """Return what the next `steps` optimizer steps use, float64 [G, names, steps]; the first is `values()`.

        The schedule's state is unchanged afterwards: call `step(steps)` when the steps are done. Returns None if that
        is not possible. A per-epoch schedule is constant within an epoch, so its table is valid until the next
        `epoch()`. If the scheduler raises on the way, the numbers are constant from there, and `raises_in` says where.
        """
        self.raises_in = None
        if not self.can_table():
            return None
        constant = self._scheduler is None or self.every == "epoch" or self.error is not None
        saved = None if constant else self.state_dict()
        rows: list[list[list[float]]] = []
        try:
            with self._users_code_preserved():
                for index in range(1 if constant else steps):
                    if index:
                        self.step()
                    if self.error is not None and self.raises_in is None and not constant:
                        self.raises_in = index
                    rows.append([[group[name] for name in self.names] for group in self.values()])
        finally:
            if saved is not None:
                self.load_state_dict(saved)
        table = torch.tensor(rows, dtype=torch.float64).permute(1, 2, 0)
        return table.expand(-1, -1, steps).contiguous() if constant else table.contiguous()

    def _users_code_preserved(self) -> AbstractContextManager[Any]:
        """Restore the state of the user's code after this context. All state of torch's own schedulers but that of
        the functions which they call is in their `state_dict()`, and to search it again takes long."""
        parts = [] if self._scheduler is None else _chain(self._scheduler)
        held = [f for p in parts for f in (*getattr(p, "lr_lambdas", ()), getattr(p, "_scale_fn_custom", None)) if f]
        roots = {"schedule": self._scheduler} if self.foreign else {str(n): f for n, f in enumerate(held)}
        return preserved(roots) if roots else nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of scheduler and groups. Torch's chainable schedules continue from the groups' values."""
        scheduler = None if self._scheduler is None else copy.deepcopy(self._scheduler.state_dict())
        return {"groups": self.groups(), "scheduler": scheduler}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the `state_dict()` of a runner with the same schedule."""
        self.error = None
        for group, saved in zip(self.optimizer.param_groups, state["groups"], strict=True):
            for name, value in saved.items():
                if isinstance(group.get(name), Tensor):
                    group[name].fill_(float(value))  # in place, since a scheduler may hold this tensor
                else:
                    group[name] = copy.deepcopy(value)
        if self._scheduler is not None:
            self._scheduler.load_state_dict(copy.deepcopy(state["scheduler"]))

    def resume(self, groups: Sequence[Mapping[str, Any]], scheduler: Mapping[str, Any] | None) -> None:
        """Continue from an optimizer's `param_groups` and a scheduler's `state_dict()`."""
        state = scheduler if scheduler is not None or self._scheduler is None else self._scheduler.state_dict()
        settings = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        self.load_state_dict({"groups": settings, "scheduler": state})

    @property
    def scheduler_state(self) -> dict[str, Any] | None:
        """The scheduler's `state_dict()`; None if there is no schedule."""
        return None if self._scheduler is None else copy.deepcopy(self._scheduler.state_dict())


def _chain(scheduler: Any) -> list[Any]:
    """Return a scheduler and those that it contains."""
    parts = getattr(scheduler, "_schedulers", ())
    return [scheduler, *(inner for part in parts for inner in _chain(part))]


def _is_torchs(scheduler: Any) -> bool:
    return type(scheduler).__module__ == lr_scheduler.__name__


def _stand_in(cls: type[Optimizer], hparams: Sequence[Mapping[str, Any]]) -> Optimizer:
    """Create a real optimizer with one dummy parameter per group; tensors among the settings are copied."""
    accepted = set(signature(cls.__init__).parameters)
    groups: list[dict[str, Any]] = []
    for settings in hparams:
        plain = {n: v for n, v in copy.deepcopy(dict(settings)).items() if n not in ("params", "param_names")}
        groups.append({**with_defaults(cls, plain), "params": [nn.Parameter(torch.zeros(1, 1))]})
    first = {name: value for name, value in groups[0].items() if name in accepted and name != "params"}
    return cls(groups, **copy.deepcopy(first))
