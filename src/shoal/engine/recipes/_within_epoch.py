"""Checks of users' code that runs during an epoch beside the step: schedules, optimizers, metrics and reading data.

A stacked step is recorded once and then runs without its Python code, so nothing that runs beside it may change what it
reads. All but metrics are tried before training: a schedule over all steps of the job, an optimizer for one step, and
reading on the first rows.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from shoal.data.loader import LoaderSource
from shoal.engine.members.member import draws
from shoal.engine.members.optimizers import step_on_copy, trying
from shoal.engine.optim.schedules import ScheduleRunner
from shoal.engine.python_state.places import path_text
from shoal.engine.python_state.preserve import PythonState, preserved
from shoal.engine.python_state.state_walk import Walk
from shoal.engine.python_state.user_code import is_library_function
from shoal.engine.python_state.watch import Watch
from shoal.engine.tracing.patches import Untraceable

if TYPE_CHECKING:
    from shoal.engine.members.member import Member

MOST_STEPS = 20_000
"""The most steps of a schedule that are tried."""
_WRITES = ("STORE_ATTR", "STORE_SUBSCR", "STORE_GLOBAL", "STORE_DEREF", "DELETE_ATTR", "DELETE_SUBSCR", "DELETE_GLOBAL")
_WRITING = frozenset({"add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popleft"})
_WRITING |= {"remove", "set", "setattr", "setdefault", "update"}
"""Names of methods that change their object. Those of tensors end in an underscore."""


def refuse_changes(member: Member, settings: Sequence[Mapping[str, Any]], kind: type[Optimizer]) -> None:
    """Check that neither reading data nor the schedule or a metric changes what the member's step reads.

    Args:
        settings: The settings of each parameter group of its optimizer.
        kind: The class of its optimizer.

    Raises:
        Untraceable: If one of them does.
    """
    job = member.job
    streamed = member.data.source.streamed
    schedule_writes = job.schedule is not None and job.schedule_every == "step" and _can_write(job.schedule)
    metrics_write = job.val_every_steps is not None and _can_write(job.metrics)
    if not (streamed or schedule_writes or metrics_write):
        return
    step_state = _state_of_step(member)
    source = member.data.source
    if isinstance(source, LoaderSource):
        if step_state.shared_with(Walk({"data": source.loader.parts})):
            source.try_reading()
            _refuse_if_changed(step_state, "reading its data")
    elif streamed:
        _try_reading(member, step_state)
    if schedule_writes and step_state.shared_with(Walk({"schedule": job.schedule})):
        with preserved({"schedule": job.schedule}):
            _try_schedule(member, ScheduleRunner(settings, kind, job.schedule), step_state)
    if metrics_write and step_state.shared_with(Walk({"metrics": job.metrics})):
        raise Untraceable("a metric, which val_every_steps computes within epochs, may change what its step reads")


def _try_reading(member: Member, step_state: Watch) -> None:
    """Read a few rows twice, and raise Untraceable if that changes what the step reads, or each time the state of the
    job's collate function, which is saved for jobs alone that are not stacked."""
    source, rows = member.data.source, member.data.rows(torch.arange(min(2, member.shape_rows)))
    with source.trying():
        source.take(rows)
        _refuse_if_changed(step_state, "reading its data")
        if member.job.collate is not None and _can_write(member.job.collate):
            state = PythonState({"collate": member.job.collate})  # after a first call, which may fill a cache
            source.take(rows)
            for path in state.changes():
                raise Untraceable(f"its collate changes a state of its own ({path_text(path)})")


def refuse_changes_by_optimizer(member: Member) -> None:
    """Check that an optimizer of the users' own does not change what the member's step reads.

    Raises:
        Untraceable: If it does.
    """
    job, optimizer = member.job, Walk({"optimizer": member.job.optimizer})
    if not any(optimizer.places):
        return
    step_state = _state_of_step(member)
    if step_state.shared_with(optimizer):
        with draws(member, keep=False), trying(job):
            step_on_copy(job, member.model)
            _refuse_if_changed(step_state, "its optimizer")


def _state_of_step(member: Member) -> Watch:
    step_state = Watch()
    step_state.add(member.index, {"step": member.job.step, "loss": member.job.loss}, member.model)
    return step_state


def _try_schedule(member: Member, schedule: ScheduleRunner, step_state: Watch) -> None:
    """Step the schedule as often as training will, and raise Untraceable at the first change of what the step reads."""
    job = member.job
    if member.optimizer_state:
        schedule.resume(member.optimizer_state["param_groups"], member.schedule_state)
    epochs_left = (job.epochs or 0) - member.epoch
    steps = job.steps - member.step if job.steps else epochs_left * -(-member.usual_batches // job.accumulate)
    for _ in range(min(steps, MOST_STEPS)):
        try:
            schedule.step()
        except Exception:  # it will raise in training too, and end that member there
            return
        _refuse_if_changed(step_state, "its schedule")
    if steps > MOST_STEPS:
        raise Untraceable("its schedule writes to what its step reads, and has too many steps to be tried beforehand")


def _refuse_if_changed(step_state: Watch, cause: str) -> None:
    """Raise Untraceable if the watched state has changed."""
    for path in step_state.changes().values():
        raise Untraceable(f"{cause} changes what its step reads ({path_text(path)})")


def _can_write(function: Any) -> bool:
    """Return whether users' code that a function, or functions in a dict, can reach changes anything but local
    variables."""
    walk = Walk({"function": function})
    functions = [held for held in walk.visited if isinstance(held, types.FunctionType)]
    return any(_writes(f.__code__) for f in functions if not is_library_function(f))


def _writes(code: types.CodeType) -> bool:
    names = set(code.co_names)
    if names & _WRITING or any(name.endswith("_") and not name.startswith("_") for name in names):
        return True
    if any(instruction.opname in _WRITES for instruction in dis.get_instructions(code)):
        return True
    return any(_writes(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
