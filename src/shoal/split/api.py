"""`shoal.split.ist` and the other split functions, which take a job and return a result with the whole network."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

import torch

from shoal.jobs.job import Job
from shoal.results import Result
from shoal.settings import pick_device
from shoal.split.core.checks import check_choice
from shoal.split.core.method import Method
from shoal.split.executors.local import Serial
from shoal.split.executors.packed import Packed
from shoal.split.methods.averaging import DataParallel, LocalSGD
from shoal.split.methods.ist import IST
from shoal.split.subnets.assignment import WHOLE_LAYER
from shoal.split.trainer import train_split
from shoal.utils.tables import say

Function = TypeVar("Function", bound=Callable[..., Result])


@dataclass(kw_only=True, slots=True)
class RunSettings:
    """Where and how a split runs on this machine, whatever its method."""

    device: str | torch.device = "auto"
    tier: Literal["auto", "serial", "packed"] = "auto"
    out: str | os.PathLike[str] | None = None
    progress: bool = False
    val_every: int | None = None
    checkpoint_every: float | str = "60s"

    def __post_init__(self) -> None:
        check_choice("tier", self.tier, ("auto", "serial", "packed"))


def takes_settings_of(kind: Any) -> Callable[[Function], Function]:
    """Show the settings of the method and of the run in the signature of a function that passes them on."""

    def decorate(function: Function) -> Function:
        job = inspect.Parameter("job", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Job)
        parameters = [p for owner in (kind.options, RunSettings) for p in inspect.signature(owner).parameters.values()]
        function.__signature__ = inspect.Signature([job, *parameters], return_annotation=Result)  # type: ignore[attr-defined]
        return function

    return decorate


def train_by(kind: Any, job: Job, args: tuple[Any, ...], options: Mapping[str, Any]) -> tuple[Result, Any]:
    """Train a job on this machine by a method of this class, and return the result and the method.

    Args:
        options: Settings of the method and of the run.
    """
    names = {f.name for f in fields(RunSettings)}
    run = RunSettings(**{name: value for name, value in options.items() if name in names})
    method = kind(job, *args, **{name: value for name, value in options.items() if name not in names})
    device = pick_device(run.device)
    packed = run.tier == "packed" or (run.tier == "auto" and device.type == "cuda")
    executor = (Packed if packed else Serial)(job, method, method.num_workers, device)
    result = train_split(
        job, method, executor, device=device, out=run.out, log=say if run.progress else None,
        val_every=run.val_every, checkpoint_every=run.checkpoint_every,
    )  # fmt: skip
    return result, method


@takes_settings_of(IST)
def ist(job: Job, *args: Any, **options: Any) -> Result:
    """Train by independent subnet training: each round distributes the hidden units to workers, which train narrow
    networks.

    Args:
        job: The job to train. With `epochs`, every row is read that often in total; `steps` are local steps of each
            worker.

    Keyword Args:
        workers: The number of narrow networks.
        local_steps: Steps of each of them before they are merged and the units are distributed again.
        shares: A worker's share of the units, one number each; "speed" uses its measured speed; None means equal
            shares.
        overlap: The fraction of the units that every worker has, besides its own.
        scale: Multiply a layer's inputs from divided units by (all units / the worker's), so that sums keep their size.
        renormalise: Estimate the running statistics of batch norms again before the whole network is evaluated.
        backward_only: Every worker runs the whole network, and trains only its own slices of it.
        recovery: How many of the last rounds train the whole network, as local SGD; None means one, if there are five
            rounds or more and weights lie between two distributed layers.
        blocks: Distribute whole residual blocks; "auto" does so if the network has nothing else to distribute.
        streams: Distribute the width of residual streams too; "auto" keeps them whole if most weights are cut without
            them.
        layers: "all" distributes every hidden layer; "alternate" every other one, so that no weight lies between two
            distributed layers; "auto" means "alternate" if there are convolutions, unless overlap or backward_only is
            given.
        moments: Whether optimizer state is sent with its weights ("travel"), or starts again in every round ("fresh").
        device: Where to train: "auto", "cpu", "cuda", "cuda:1".
        tier: "serial" trains part after part and is the reference; "packed" trains them as one pack; "auto" means
            packed on a GPU.
        out: A run folder; run the same command again to resume.
        progress: Print a line for each row of the history.
        val_every: Rounds between two rows of the history; None means about `job.val_every` epochs.
        checkpoint_every: Seconds between checkpoints, if `out` is given.
    """
    result, method = train_by(IST, job, args, options)
    add_notes(result, method)
    return result


def add_notes(result: Result, method: Method) -> None:
    """Add notes to the report: which layers were distributed if that was a choice, and advice if losses were not
    finite."""
    report = result.split
    if report is None or not isinstance(method, IST):
        return
    if WHOLE_LAYER in method.units.whole.values() and method.num_workers > 1:
        report.notes.append(
            f"layers   every other one is distributed ({', '.join(method.units.groups)}), so that every weight is "
            "trained in every round; layers='all' distributes all of them"
        )
    if not method.given.scale or method.given.backward_only:
        return
    bad = result.status == "diverged" or (report.tier != "distributed" and report.lost > 0)
    if bad and method.num_workers > 1:
        report.notes.append(
            f"advice   losses were not finite: scale=True makes a narrow network's steps about {method.num_workers} "
            f"times as large; use a learning rate {method.num_workers} times smaller, or scale=False"
        )


@takes_settings_of(LocalSGD)
def local_sgd(job: Job, *args: Any, **options: Any) -> Result:
    """Train the whole network on every worker for `local_steps` steps on its own rows, then average the weights.

    Takes `workers` (4), `local_steps` (20), `moments`, and device, tier, out, progress, val_every, checkpoint_every as
    in `shoal.split.ist`.
    """
    return train_by(LocalSGD, job, args, options)[0]


@takes_settings_of(DataParallel)
def data_parallel(job: Job, *args: Any, **options: Any) -> Result:
    """Compute the gradient of a batch on every worker, and take the job's optimizer step with their mean.

    Takes `workers` (4), and device, tier, out, progress, val_every, checkpoint_every as in `shoal.split.ist`.
    """
    return train_by(DataParallel, job, args, options)[0]
