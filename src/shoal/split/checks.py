"""Mistakes that can be seen before the first round: a JobError with a line for each, and nothing runs."""

from __future__ import annotations

import torch

from shoal.checks import prepare
from shoal.errors import JobError
from shoal.job import Job
from shoal.pack.members import Member, draws, make_optimizer, names, needs_closure


def checked(job: Job) -> Member:
    """The job, built on the CPU. JobError unless it can be trained, and trained in parts."""
    (member,) = prepare([job], torch.device("cpu"))
    lines = split_problems(job, member)
    if lines:
        raise JobError(*(f"job {names([job])[0]!r}: {line}" for line in lines))
    return member


def split_problems(job: Job, member: Member) -> list[str]:
    """What a job may ask for, but not under a split."""
    lines = []
    if job.schedule is not None and not _is_factor(job):
        lines.append("its schedule is a torch scheduler, which counts its own steps; under a split use step -> factor")
    if job.precision == "fp16":
        lines.append("precision is 'fp16', whose loss scale has no place to travel with; under a split use 'bf16'")
    with draws(member, keep=False):
        optimizer = make_optimizer(job, member.model)
    if needs_closure(optimizer):
        kind = type(optimizer).__name__
        lines.append(f"{kind} evaluates the loss itself and cannot be split; use SGD, Adam or another optimizer")
    return lines


def _is_factor(job: Job) -> bool:
    assert job.schedule is not None
    try:
        float(job.schedule(0))
    except Exception:  # a maker of schedulers fails on a number in any way it likes
        return False
    return True
