"""Adapt a member's saved state to a job with changed settings, for clones."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from shoal.engine.members.member import Member, draws
from shoal.engine.members.optimizers import make_optimizer, make_schedule, trying
from shoal.engine.members.stretches import Stretch
from shoal.engine.optim.hparams import all_flags, rule_for, split_hparams
from shoal.engine.optim.schedules import jump_to
from shoal.engine.optim.state import in_torch_form, load_optimizer
from shoal.errors import JobError, describe
from shoal.jobs.job import Job

READING = frozenset({"data", "collate", "data_seed", "shuffle"})
"""If one of these changes, an epoch that was begun starts again, since its remaining rows are not defined."""
BATCHES = frozenset({"batch_size", "drop_last", "accumulate"})
"""If one of these changes, the remaining rows of an epoch come in other batches."""
FRESH = frozenset({"optimizer", "params"})
"""If one of these changes, the optimizer's state is dropped."""
SCHEDULE = frozenset({"schedule", "schedule_every"})


def change_rows(state: dict[str, Any], source: Member, job: Job, changed: Collection[str]) -> None:
    """Adapt rows and random numbers of a member's state to a changed job."""
    if job.seed != source.job.seed:
        state["rng"] = torch.Generator().manual_seed(job.seed).get_state()
    reordered = job.order_seed != source.job.order_seed
    if reordered:
        state["orders"] = torch.Generator().manual_seed(job.order_seed).get_state()
    if not (reordered or READING & set(changed) or BATCHES & set(changed)):
        return
    earlier = list(state.get("earlier", ()))
    if reordered or READING & set(changed):
        earlier = []
    elif source.place:
        whole, size = source.place == source.num_batches, source.job.batch_size
        rows = source.num_rows if whole else source.place * size
        earlier.append(Stretch(rows, size, source.losses, source.logs).state())
    nothing = torch.empty(0, dtype=torch.float64)
    state |= {"earlier": earlier, "place": 0, "losses": nothing, "logs": {}, "first_step": state["step"]}


def count_batches(member: Member) -> None:
    """Set `batch_shift` of a member whose batch size has changed."""
    if member.job.steps is not None:
        had = member.step * member.job.accumulate
    else:
        had = (member.epoch + 1) * member.usual_batches - member.num_batches + member.place
    member.batch_shift = had - member.batches


def change_optimizer(member: Member, before: Job, changed: Collection[str]) -> None:
    """Adapt the optimizer and schedule state of a member that has trained to its changed job."""
    fresh, scheduled = bool(FRESH & set(changed)), bool((FRESH | SCHEDULE) & set(changed))
    if "hparams" in changed and not fresh:
        _change_hparams(member, before, without={"lr"} if scheduled else set())
    if scheduled:
        _schedule_anew(member, before, fresh=fresh)
    if "precision" in changed:
        member.scaler_state = None


def _change_hparams(member: Member, before: Job, without: Collection[str]) -> None:
    """Change the hyper-parameters in the optimizer's state that differ between the old and the new job.

    The groups with which the optimizer would be built before and now are compared, so that what a group has from
    `params`, and what a schedule has changed, stays unless it was changed.
    """
    with draws(member, keep=False):
        fresh = make_optimizer(member.job, member.model)
        old, new = make_optimizer(before, member.model).param_groups, fresh.param_groups
    with _saved_groups(member) as groups:
        for place, group in enumerate(groups):
            for key in new[place].keys() - {"params", *without}:
                was, now = old[place].get(key), new[place][key]
                if _same(was, now):
                    continue
                if key == "lr" and member.job.schedule is not None:
                    _scale(member, group, place, was, now)
                else:
                    group[key] = now
            _fit_state(member, type(fresh), group, new[place]["params"])


@contextmanager
def _saved_groups(member: Member) -> Iterator[list[dict[str, Any]]]:
    """Give the param groups in the member's optimizer state, to be changed.

    Where the state is in a form of the optimizer's own, an optimizer is loaded with it, and asked for it afterwards.
    """
    if in_torch_form(member.optimizer_state):
        yield member.optimizer_state["param_groups"]
        return
    with draws(member, keep=False), trying(member.job):
        optimizer = make_optimizer(member.job, member.model)
        if member.optimizer_state:
            load_optimizer(optimizer, member.optimizer_state)
        yield optimizer.param_groups
        member.optimizer_state = copy.deepcopy(optimizer.state_dict())


def _fit_state(member: Member, kind: type[Optimizer], group: Mapping[str, Any], params: Sequence[Tensor]) -> None:
    """Add the state that changed settings need (amsgrad's maximum), as torch has it before the first step, and drop
    what they do not use (the buffer of momentum 0)."""
    parts = split_hparams(kind, group)
    if parts is None:  # a class without a rule: its own step uses or misses this state
        return
    wanted, every = (set(rule_for(kind, flags).buffers()) for flags in (parts[0], all_flags(kind)))
    entries = member.optimizer_state["state"]
    for index, param in zip(group["params"], params, strict=True):
        entry = {name: value for name, value in entries.pop(index, {}).items() if name not in every - wanted}
        if entry and kind is not torch.optim.SGD:  # SGD's buffer begins with a gradient
            entry = {**{name: torch.zeros_like(param) for name in wanted}, **entry}
        if entry:
            entries[index] = entry


def _schedule_anew(member: Member, before: Job, *, fresh: bool) -> None:
    """Set the job's schedule to the state that it would have if it had been used from the beginning; `fresh`: the
    optimizer too."""
    with draws(member, keep=False), trying(member.job), trying(before):
        plain, now, schedule = _groups(member, member.job, moved=True)
        if fresh:
            member.optimizer_state = copy.deepcopy(now.state_dict())
        else:
            old_plain, old, _ = _groups(member, before)
            pairs = [(old_plain, _settings(old)), (plain, _settings(now))]
            with _saved_groups(member) as groups:
                for place, group in enumerate(groups):
                    wanted = pairs[1][1][place]
                    for key in {"lr", *(key for a, b in pairs for key in _differing(a[place], b[place]))}:
                        if key in wanted:
                            group[key] = wanted[key]
                        else:
                            group.pop(key, None)
    member.schedule_state = schedule


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return a copy of the settings of an optimizer's groups."""
    return [{k: copy.deepcopy(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def _groups(member: Member, job: Job, moved: bool = False) -> tuple[list[dict[str, Any]], Optimizer, Any]:
    """Return the settings of a job's new optimizer, the optimizer with its schedule, and the schedule's state.

    Args:
        moved: Advance the schedule to the member's current step or epoch.
    """
    optimizer = make_optimizer(job, member.model)
    plain = _settings(optimizer)
    schedule = make_schedule(job, optimizer)
    optimizer._opt_called = True  # type: ignore[attr-defined]  # it never steps; torch would warn
    if schedule is not None and moved:
        try:
            _move(schedule, member)
        except Exception as error:
            raise JobError(
                f"clone: schedule raised {describe(error)} when put at step {member.step}, epoch {member.epoch}, where "
                "the clone continues; use a longer one"
            ) from error
    state = None if schedule is None else copy.deepcopy(schedule.state_dict())
    return plain, optimizer, state


def _move(schedule: Any, member: Member) -> None:
    """Advance a new schedule as if it had been used from the member's beginning."""
    if isinstance(schedule, ReduceLROnPlateau):
        for value in (member.monitor.value(row) for row in member.history):
            if value is not None:
                schedule.step(value)
        return
    count = member.step if member.job.schedule_every == "step" else member.epoch
    if isinstance(schedule, LambdaLR) and count:
        jump_to(schedule, count)
        return
    for _ in range(count):
        schedule.step()


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> set[str]:
    return {key for key in a.keys() | b.keys() if key not in a or key not in b or not _same(a[key], b[key])}


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)
    return bool(a == b)


def _scale(member: Member, group: dict[str, Any], place: int, was: Any, now: Any) -> None:
    """Scale a learning rate under a schedule, with everything that the schedule derives it from."""
    if not float(was):
        raise JobError("clone: lr was 0 under a schedule, so a new lr cannot scale it; add a new job instead")
    if "max_lr" in group or any("max_lrs" in state for state in _states(member.schedule_state)):
        raise JobError(
            "clone: its schedule sets the rates by itself (max_lr), so that lr would do nothing; change schedule= too"
        )
    factor = float(now) / float(was)
    for key in ("lr", "initial_lr"):
        if key in group:
            group[key] = now if _same(group[key], was) else group[key] * factor
    for state in _states(member.schedule_state):
        for key in ("base_lrs", "_last_lr"):
            if key in state:
                state[key] = [
                    rate if i != place else now if _same(rate, was) else rate * factor
                    for i, rate in enumerate(state[key])
                ]


def _states(state: Any) -> Iterator[dict[str, Any]]:
    """Yield the states of a schedule and of the schedules that it contains."""
    if isinstance(state, dict):
        yield state
        for inner in state.get("_schedulers", ()):
            yield from _states(inner)
