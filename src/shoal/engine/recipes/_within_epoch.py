"""Code of the user's that runs during an epoch, beside the step: schedules, and reading data.

A stacked step is recorded once and then runs without its Python, so nothing that runs beside it may change what it
reads. Both are tried before training: a schedule over all steps of the job, reading on the first rows.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from shoal.data.loader import LoaderSource
from shoal.engine.optim.schedules import ScheduleRunner
from shoal.engine.python_state.places import say
from shoal.engine.python_state.preserve import preserved
from shoal.engine.python_state.state_walk import Walk
from shoal.engine.python_state.user_code import is_library_function
from shoal.engine.python_state.watch import Watch
from shoal.engine.tracing.patches import Untraceable

if TYPE_CHECKING:
    from shoal.engine.members.member import Member

MOST_STEPS = 20_000
"""Steps of a schedule that are tried."""
_WRITES = ("STORE_ATTR", "STORE_SUBSCR", "STORE_GLOBAL", "STORE_DEREF", "DELETE_ATTR", "DELETE_SUBSCR", "DELETE_GLOBAL")
_WRITING = frozenset({"add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popleft"})
_WRITING |= {"remove", "set", "setattr", "setdefault", "update"}
"""Methods that change what they are called on; those of tensors end in an underscore."""


def refuse_changes(member: Member, settings: Sequence[Mapping[str, Any]], kind: type[Optimizer]) -> None:
    """See that neither reading data nor the schedule changes what the member's step reads.

    `settings`, `kind`: of its optimizer, group by group.

    Raises:
        Untraceable: when one of them does.
    """
    job = member.job
    streamed = member.data.source.streamed
    stepped = job.schedule is not None and job.schedule_every == "step" and _can_write(job.schedule)
    if not streamed and not stepped:
        return
    read = Watch()
    read.add(member.index, {"step": job.step, "loss": job.loss}, member.model)
    source = member.data.source
    if isinstance(source, LoaderSource):
        if read.shared_with(Walk({"data": source.loader.parts})):
            source.try_reading()
            _refuse(read, "reading its data")
    elif streamed:
        member.data.take(0, min(2, member.shape_rows))
        _refuse(read, "reading its data")
    if stepped and read.shared_with(Walk({"schedule": job.schedule})):
        with preserved({"schedule": job.schedule}):
            _try_schedule(member, ScheduleRunner(settings, kind, job.schedule), read)


def _try_schedule(member: Member, schedule: ScheduleRunner, read: Watch) -> None:
    job = member.job
    if member.optimizer_state:
        schedule.resume(member.optimizer_state["param_groups"], member.schedule_state)
    epochs_left = (job.epochs or 0) - member.epoch
    steps = job.steps - member.step if job.steps else epochs_left * -(-member.usual_batches // job.accumulate)
    for _ in range(min(steps, MOST_STEPS)):
        try:
            schedule.step()
        except Exception:  # it will raise in training too, and end its own member there
            return
        _refuse(read, "its schedule")
    if steps > MOST_STEPS:
        raise Untraceable("its schedule writes to what its step reads, and has too many steps to be tried beforehand")


def _refuse(read: Watch, what: str) -> None:
    for path in read.changes().values():
        raise Untraceable(f"{what} changes what its step reads ({say(path)})")


def _can_write(function: Any) -> bool:
    """Whether code of the user's that can be reached changes anything but its own variables."""
    walk = Walk({"schedule": function})
    functions = [held for held in walk.visited if isinstance(held, types.FunctionType)]
    return any(_writes(f.__code__) for f in functions if not is_library_function(f))


def _writes(code: types.CodeType) -> bool:
    names = set(code.co_names)
    if names & _WRITING or any(name.endswith("_") and not name.startswith("_") for name in names):
        return True
    if any(instruction.opname in _WRITES for instruction in dis.get_instructions(code)):
        return True
    return any(_writes(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
