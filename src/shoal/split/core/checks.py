"""Checks that run before the first round. All mistakes are raised together, as one JobError with a line for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shoal.engine.members.building import names
from shoal.engine.members.member import Member, draws
from shoal.engine.members.optimizers import make_optimizer
from shoal.engine.optim.kinds import has_modes, needs_closure
from shoal.engine.python_state.preserve import preserved
from shoal.errors import JobError, SplitError
from shoal.jobs.job import Job
from shoal.jobs.loaders import refuse_batches
from shoal.preparation.checks import prepare
from shoal.preparation.dry_run import step_problems


def prepare_job(job: Job | Member) -> Member:
    """Build the job's network, open its data on the CPU, and check that the job can be trained in parts.

    A member that is prepared already is returned as it is. Raises a JobError if the job cannot be split.
    """
    if isinstance(job, Member):
        return job
    refuse_batches(job, "a split")
    (member,) = prepare([job], torch.device("cpu"))
    lines = split_problems(job, member)
    if lines:
        raise JobError(*(f"job {names([job])[0]!r}: {line}" for line in lines))
    return member


def split_problems(job: Job, member: Member) -> list[str]:
    """List the settings of a job that a split does not support, one line for each."""
    lines = []
    if job.schedule is not None and not _is_factor(job):
        lines.append("its schedule is a torch scheduler, which counts its own steps; under a split use step -> factor")
    if job.precision == "fp16":
        lines.append("precision is 'fp16', whose loss scale has no place to travel with; under a split use 'bf16'")
    if job.val_every_steps is not None:
        lines.append("val_every_steps is set, and a split validates between rounds; give the split's own val_every=")
    if job.average is not None:
        lines.append("average is set, and a split's parts meet between rounds alone; leave it out under a split")
    with draws(member, keep=False):
        optimizer = make_optimizer(job, member.model)
    if needs_closure(optimizer):
        kind = type(optimizer).__name__
        lines.append(f"{kind} evaluates the loss itself and cannot be split; use SGD, Adam or another optimizer")
    if has_modes(optimizer):
        kind = type(optimizer).__name__
        lines.append(f"{kind} has a train and an eval mode, which merging does not know; use SGD, Adam or another")
    return lines


def shard_problems(member: Member, workers: int) -> None:
    """Raise a JobError if an epoch of some shard ends in a batch of one row that the network cannot train on."""
    job, rows = member.job, len(member.data)
    ends = [len(range(shard, rows, workers)) % job.batch_size for shard in range(workers)]
    if 1 not in ends or job.drop_last or job.batch_size == 1:
        return
    roots = {"step": job.step, "loss": job.loss, "model": member.model}
    with draws(member, keep=False), preserved(roots, skip=member.model):
        if not step_problems(member, 1, short=True):
            return
    raise JobError(
        f"job {member.name!r}: the last batch of an epoch has 1 row (a shard of {workers} has "
        f"{len(range(ends.index(1), rows, workers))}, batch_size is {job.batch_size}), and the network cannot train "
        "on one row; set drop_last=True, another batch_size, or another number of workers"
    )


def _is_factor(job: Job) -> bool:
    assert job.schedule is not None
    try:
        float(job.schedule(0))
    except Exception:  # a function that makes a scheduler may raise anything for a number
        return False
    return True


def check_count(name: str, value: Any, least: int = 1, hint: str = "") -> None:
    """Raise a SplitError unless `value` is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SplitError(f"{name} is {value!r}; use a whole number, {least} or more{hint}")


def check_choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    """Raise a SplitError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise SplitError(f"{name} is {value!r}; use {' or '.join(repr(a) for a in allowed)}")
