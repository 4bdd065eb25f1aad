"""`shoal.split.local_sgd` and its like: a job in, a result with the whole network out."""

from __future__ import annotations

import os
import sys
from typing import Any, Literal

import torch

from shoal.errors import SplitError
from shoal.job import Job
from shoal.results import Result
from shoal.split.averaging import DataParallel, LocalSGD
from shoal.split.checks import checked
from shoal.split.crews import Serial
from shoal.split.method import Method
from shoal.split.rounds import train_split
from shoal.training import pick_device

Tier = Literal["auto", "serial", "packed"]


def local_sgd(
    job: Job,
    workers: int = 4,
    local_steps: int = 20,
    *,
    moments: Literal["travel", "fresh"] = "travel",
    device: str | torch.device = "auto",
    tier: Tier = "auto",
    out: str | os.PathLike[str] | None = None,
    progress: bool = False,
    val_every: int | None = None,
    checkpoint_every: float | str = "60s",
) -> Result:
    """Every worker trains the whole network for `local_steps` on rows of its own; then the weights are averaged."""
    member = checked(job)
    method = LocalSGD(job, workers, local_steps, moments=moments, rows=len(member.data))
    return run_here(job, method, workers, device, tier, progress, member=member, out=out, val_every=val_every,
                    checkpoint_every=checkpoint_every)  # fmt: skip


def data_parallel(
    job: Job,
    workers: int = 4,
    *,
    device: str | torch.device = "auto",
    tier: Tier = "auto",
    out: str | os.PathLike[str] | None = None,
    progress: bool = False,
    val_every: int | None = None,
    checkpoint_every: float | str = "60s",
) -> Result:
    """Every worker finds the gradient of a batch of its own; the job's optimizer follows their mean, step by step."""
    member = checked(job)
    method = DataParallel(job, workers, rows=len(member.data))
    return run_here(job, method, workers, device, tier, progress, member=member, out=out, val_every=val_every,
                    checkpoint_every=checkpoint_every)  # fmt: skip


def run_here(
    job: Job,
    method: Method,
    workers: int,
    device: str | torch.device,
    tier: Tier,
    progress: bool,
    **settings: Any,
) -> Result:
    """Train by this method, on this machine."""
    if tier not in ("auto", "serial", "packed"):
        raise SplitError(f"tier is {tier!r}; use 'auto', 'serial' or 'packed'")
    found = pick_device(device)
    crew = Serial(job, method, workers, found)
    return train_split(job, method, crew, device=found, tell=_line if progress else None, **settings)


def _line(text: str) -> None:
    print(f"shoal: {text}", file=sys.stderr, flush=True)
