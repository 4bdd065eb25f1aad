"""`shoal.split.local_sgd` and its like: a job in, a result with the whole network out."""

from __future__ import annotations

import os
import sys
from typing import Any, Literal

import torch

from shoal.errors import SplitError
from shoal.jobs.job import Job
from shoal.results import Result
from shoal.split.core.checks import checked
from shoal.split.core.method import Method
from shoal.split.executors.executors import Serial
from shoal.split.executors.packed import Packed
from shoal.split.methods.averaging import DataParallel, LocalSGD
from shoal.split.methods.ist import IST, Shares
from shoal.split.subnets.deal import WHOLE_LAYER, Layers
from shoal.split.trainer import train_split
from shoal.training import pick_device

Tier = Literal["auto", "serial", "packed"]


def ist(
    job: Job,
    workers: int = 4,
    local_steps: int = 50,
    *,
    shares: Shares = None,
    overlap: float = 0.0,
    scale: bool = True,
    renormalise: bool = True,
    backward_only: bool = False,
    recovery: int | None = None,
    blocks: bool | Literal["auto"] = "auto",
    streams: bool | Literal["auto"] = "auto",
    layers: Layers = "auto",
    moments: Literal["travel", "fresh"] = "travel",
    device: str | torch.device = "auto",
    tier: Tier = "auto",
    out: str | os.PathLike[str] | None = None,
    progress: bool = False,
    val_every: int | None = None,
    checkpoint_every: float | str = "60s",
) -> Result:
    """Independent subnet training: each round the hidden units are dealt to the workers, who train narrow networks.

    Args:
        job: What to train. `epochs`: every row is read so often in all; `steps`: local steps of each worker.
        workers: How many narrow networks.
        local_steps: Steps of each of them before they are merged and dealt anew.
        shares: A worker's share of the units, one number each; "speed": by its measured speed; None: equal shares.
        overlap: The fraction of the units that every worker has, besides its own.
        scale: Multiply what a layer reads of cut units by size / kept, so that sums keep their size.
        renormalise: Estimate the running statistics of batch norms again before the whole network is evaluated.
        backward_only: Every worker runs the whole network, and trains only its own slices of it.
        recovery: How many of the last rounds train the whole network, as local SGD; None: one, where there are five
            rounds or more and weights lie between two dealt layers.
        blocks: Deal whole residual blocks; "auto": where the network has nothing else to deal.
        streams: Deal the width of residual streams too; "auto": they stay whole where most weights are cut without.
        layers: "all": every hidden layer is dealt; "alternate": every other one, so that no weight lies between two
            dealt layers; "auto": "alternate" where there are convolutions, unless overlap or backward_only is given.
        moments: Whether optimizer state travels with its weights, or starts anew in every round.
        device: Where to train: "auto", "cpu", "cuda", "cuda:1".
        tier: "serial": part after part, the reference; "packed": as one pack; "auto": packed on a GPU.
        out: A run folder: the same command in it goes on where it was.
        progress: Print a line for each row of the history.
        val_every: Rounds between two rows of the history; None: about `job.val_every` epochs.
        checkpoint_every: Seconds between checkpoints, where there is `out`.
    """
    member = checked(job)
    method = IST(
        job, workers, local_steps, shares=shares, overlap=overlap, scale=scale, renormalise=renormalise,
        backward_only=backward_only, recovery=recovery, blocks=blocks, streams=streams, layers=layers, moments=moments,
        rows=len(member.data), device=pick_device(device),
    )  # fmt: skip
    result = run_here(job, method, workers, device, tier, progress, member=member, out=out, val_every=val_every,
                      checkpoint_every=checkpoint_every)  # fmt: skip
    add_notes(result, method)
    return result


def add_notes(result: Result, method: Method) -> None:
    """Say in the report which layers were dealt where that was a choice, and what to do about losses that were not
    finite."""
    report = result.split
    if report is None or not isinstance(method, IST):
        return
    if WHOLE_LAYER in method.units.whole.values() and method.plan.workers > 1:
        report.notes.append(
            f"layers   every other one is dealt ({', '.join(method.units.groups)}), so that every weight is trained in "
            "every round; layers='all' deals all of them"
        )
    if not method.scale or method.backward_only:
        return
    bad = result.status == "diverged" or (report.tier != "distributed" and report.lost > 0)
    if bad and method.plan.workers > 1:
        report.notes.append(
            f"advice   losses were not finite: scale=True makes a narrow network's steps about {method.plan.workers} "
            f"times as large; use a learning rate {method.plan.workers} times smaller, or scale=False"
        )


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
    together = tier == "packed" or (tier == "auto" and found.type == "cuda")
    executor = (Packed if together else Serial)(job, method, workers, found)
    return train_split(job, method, executor, device=found, tell=_line if progress else None, **settings)


def _line(text: str) -> None:
    print(f"shoal: {text}", file=sys.stderr, flush=True)
