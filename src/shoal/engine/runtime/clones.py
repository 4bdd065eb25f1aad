"""Members that are added to a run in progress: new jobs, warm starts, and clones of jobs with changes."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shoal.data import Pool
from shoal.engine.members.changing import (
    BATCHES,
    FRESH,
    READING,
    SCHEDULE,
    change_optimizer,
    change_rows,
    count_batches,
)
from shoal.engine.members.hooks import lost_in_a_copy
from shoal.engine.members.member import Member
from shoal.engine.members.optimizers import trying
from shoal.engine.python_state.module_modes import note_trainable_as
from shoal.engine.python_state.private_copy import PrivateCopies
from shoal.engine.python_state.saved_state import share
from shoal.errors import JobError, warn
from shoal.jobs.averaging import EMA, SWA, counts_epochs
from shoal.jobs.early_stopping import Monitor
from shoal.jobs.job import EarlyStop, Job
from shoal.jobs.loaders import loader_defaults
from shoal.preparation.checks import prepare
from shoal.storage.lost_state import watch_state

if TYPE_CHECKING:
    from shoal.engine.runtime.run import Run

CHANGEABLE = (
    "hparams", "epochs", "steps", "batch_size", "accumulate", "drop_last", "optimizer", "params", "schedule",
    "schedule_every", "clip_norm", "clip_value", "loss", "step", "precision", "seed", "data", "collate", "data_seed",
    "shuffle", "average", "val", "metrics", "val_every", "val_every_steps", "stop", "keep", "config", "owner",
    "priority",
)  # fmt: skip
"""Fields of a job that a clone may change: all but the network."""
WATCHED = {"loss", "step", "average", "val", "metrics", "stop", "keep"}
"""If one of these changes, the best value so far is forgotten."""


def new_member(run: Run, job: Job, instead: Member | None = None) -> Member:
    """Build a member for a job that was not in the run's list. `instead`: it gets the index of this member."""
    index = 1 + max(member.index for member in run.all_members)
    if instead is not None:
        index = instead.index
    elif run.folder is not None:
        index = run.folder.place_of(job.name)
    named = job if job.name else dataclasses.replace(job, name=f"job-{index}")
    if any(member.name == named.name for member in run.all_members if member is not instead):
        raise JobError(f"job {named.name!r}: the run has a job of this name; give it another")
    views = [view for other in run.all_members for view in (other.data, other.val) if view is not None]
    pool = Pool(run.planning.device, list(dict.fromkeys(view.source for view in views)))
    member = prepare([named], run.planning.device, pool)[0]
    member.index = index
    return member


def add_to(run: Run, member: Member) -> None:
    """Add a member to a live run and its folder. If the folder has it from an earlier run, it continues from there."""
    if run.folder is not None:
        run.folder.join(member)
        run.checkpointing.know(member)
    if member.status == "running":
        run.add(member)
        watch_state([member], run.planning.recipes)
    else:  # it ended in the earlier run
        run.all_members.append(member)
        run.report_leave(member)


def warm(member: Member, source: Member) -> None:
    """Load the weights of `source` into `member`."""
    try:
        member.model.load_state_dict(source.model.state_dict())
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        why = lines[1] if len(lines) > 1 else lines[0]
        raise JobError(
            f"job {member.name!r}: the weights of {source.name!r} do not fit it ({why.rstrip(' .')}); "
            "warm start from a job with the same network"
        ) from None


def clone_of(
    run: Run, source: Member, name: str, changes: Mapping[str, Any], *, instead: Member | None = None
) -> Member:
    """Return a member that continues from another one's current state, with some of the job's fields changed.

    Args:
        instead: The clone gets the index of this member, by `run.replace`.
    """
    fixed = changes.keys() - set(CHANGEABLE)
    resumes = run.folder is not None and instead is None and not fixed and run.folder.has_state(name)
    if not resumes:
        _check_can_clone(source, changes)
    changed = _changed(source.job, changes)
    fields = {**loader_defaults(source.job, changed), **changed, "hparams": _hparams(source.job, changed)}
    job = dataclasses.replace(source.job, name=name, **fields)
    with trying(job, step=True):  # a factory may write to what the cloned job reads
        member = new_member(run, job, instead)
    member.data = member.data if changed.keys() & {"data", "collate"} else source.data
    member.val = member.val if changed.keys() & {"val", "collate"} else source.val
    if resumes:  # it began in an earlier run, and its state is in the folder
        if source.saved_state.job is not None:
            _copy_private_state(member, source, None, changed)
        return member
    state = copy.deepcopy(run.written(source).state())
    _check_driver(source, state["python"], changed)
    if source.saved_state.job is not None:
        state["python"] = _copy_private_state(member, source, state["python"], changed)
        share([other.saved_state for other in (*run.all_members, member) if other.status == "running"])
        _warn_of_shared(source, member)
    if changed.keys() & FRESH:
        state["python"] = {part: saved for part, saved in (state["python"] or {}).items() if part != "driver"} or None
    if "average" in changed:
        state["average"] = None
    change_rows(state, source, job, changed)
    member.load_state({**state, "status": "running", "error": None, "seconds": 0.0})
    if "average" in changed:
        _check_average(member)
    if changed.keys() & WATCHED or ("data" in changed and job.val is None):
        member.monitor, member.best = Monitor.of(job), None
    if member.finished():
        raise JobError(
            f"clone: {source.name!r} has had {member.epoch} epochs and {member.step} steps, and the clone's length "
            "counts from its beginning; give it more epochs= or steps="
        )
    if changed.keys() & (READING | BATCHES | {"seed", "epochs", "steps"}):
        count_batches(member)
    if member.optimizer_state:
        change_optimizer(member, source.job, changed)
    return member


def _changed(before: Job, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes that differ from the job's fields."""
    return {field: value for field, value in changes.items() if not _is_unchanged(getattr(before, field), value)}


def _is_unchanged(before: Any, now: Any) -> bool:
    """Return whether a given field is unchanged."""
    plain = isinstance(now, int | float | str | EarlyStop | EMA | SWA | None) and type(before) is type(now)
    return before is now or (plain and bool(before == now))


def _hparams(before: Job, given: Mapping[str, Any]) -> dict[str, Any]:
    hparams = given.get("hparams", {})
    if not isinstance(hparams, Mapping):
        raise JobError(f"clone: hparams is {hparams!r}; pass a dict")
    if "optimizer" in given and "hparams" not in given:
        raise JobError(
            f"clone: optimizer changes, and hparams {dict(before.hparams)} are those of the one before; "
            "give all of its own as hparams="
        )
    return dict(hparams) if "optimizer" in given else {**before.hparams, **hparams}


def _check_driver(source: Member, saved: Any, given: Mapping[str, Any]) -> None:
    if saved and saved.get("driver") and given.keys() & SCHEDULE and not given.keys() & FRESH:
        raise JobError(
            f"clone: schedule cannot be changed: the optimizer or schedule of {source.name!r} has state outside its "
            "state_dict(), made by both; change the optimizer= too, or add(job, warm_start=...) starts anew"
        )


COPIED = ("model", "collate", "loss", "step", "optimizer", "params", "schedule", "metrics")
"""Fields of a job that may hold state."""


def _copy_private_state(member: Member, source: Member, saved: Any, changed: Mapping[str, Any]) -> Any:
    """Give a clone its own copies of functions, objects and network, and return the Python state that its optimizer has
    to load."""
    copies = PrivateCopies()
    fields = {name: copies.of(getattr(source.job, name)) for name in COPIED if name not in changed}
    member.job, member.model = dataclasses.replace(member.job, **fields), copies.of(source.model)
    note_trainable_as(member.model, source.model)
    member.saved_state.wanted, member.saved_state.watched = True, source.saved_state.watched
    member.saved_state.begin(member.job, member.model)
    assert source.saved_state.job is not None and member.saved_state.job is not None
    carried = [] if changed.keys() & FRESH else ["optimizer", *([] if changed.keys() & SCHEDULE else ["scheduler"])]
    copied_drivers = {name: copies.known(source.saved_state.job.at((name,))) for name in carried}
    member.saved_state.stand_ins = {name: value for name, value in copied_drivers.items() if value is not None}
    for value in copies.shared:
        member.saved_state.job.problems[f"{type(value).__name__} objects"] = "both read from the same one"
    return {"driver": saved["driver"]} if saved and "driver" in saved else None


def _warn_of_shared(source: Member, member: Member) -> None:
    """Warn about state that a clone and its source both change, since it could not be copied."""
    source_state, clone_state = source.saved_state.job, member.saved_state.job
    assert source_state is not None and clone_state is not None
    changed = source_state.changed_in(clone_state.handles())
    lost = {**clone_state.problems, **changed}
    if lost:
        where, why = next(iter(lost.items()))
        more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
        warn(
            f"clone {member.name!r}: {source.name!r} changes {where}{more}, which the clone shares "
            f"({why}); each job sees the other's changes, and both end with other weights than alone; keep such "
            "state in the model or in the step's closure, in numbers, tensors, lists or dicts"
        )


def _check_can_clone(source: Member, changes: Mapping[str, Any]) -> None:
    """Raise a JobError if the source cannot be cloned with these changes."""
    fixed = sorted(changes.keys() - set(CHANGEABLE))
    if fixed:
        raise JobError(
            f"clone: {', '.join(fixed)} cannot be changed in a clone; it takes {', '.join(CHANGEABLE)}; "
            "for another network use add(job)"
        )
    why = None
    if source.status in ("diverged", "failed"):
        why = f"it has {source.status}"
    elif source.status == "done" and source.place:
        why = "it ended within an epoch, which is closed"
    elif not source.at_step_boundary:
        why = "it is between two optimizer steps"
    elif (hooks := lost_in_a_copy(source.model)) is not None:
        why = f"it has {hooks}, and a copy would not train as it does"
    elif _changed(source.job, changes).keys() & (READING | BATCHES) or _begins_again(source, changes):
        why = _why_not_in_other_batches(source)
    if why is not None:
        raise JobError(
            f"clone: {source.name!r} cannot continue ({why}); add(job, warm_start={source.name!r}) starts anew"
        )


def _check_average(member: Member) -> None:
    """Raise a JobError if the new average counts epochs and the epochs so far had other numbers of steps."""
    average, per_epoch = member.job.average, member.steps_per_epoch
    if average is not None and counts_epochs(average) and member.first_step != member.epoch * per_epoch:
        raise JobError(
            f"clone: average is {average}, which counts epochs of {per_epoch} steps, and earlier epochs had other "
            "numbers of steps; use one that counts steps, such as every=10"
        )


def _begins_again(source: Member, changes: Mapping[str, Any]) -> bool:
    """Return whether another seed changes the order of rows of the current epoch, so that it starts again."""
    job = source.job
    return (
        bool(source.place) and dataclasses.replace(job, seed=changes.get("seed", job.seed)).order_seed != job.order_seed
    )


def _why_not_in_other_batches(source: Member) -> str | None:
    if source.batched and source.place:
        return "it is within an epoch of a DataLoader, which has no rest in other batches"
    average = source.job.average
    if average is not None and counts_epochs(average):
        return "its average counts epochs, which would have another number of steps"
    return None
