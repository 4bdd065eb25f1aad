"""Find the mistakes that show before the first step, and report them all in one JobError before anything runs."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from shoal.data import Pool, View
from shoal.data.loader import LoaderSource
from shoal.data.source import TensorSource
from shoal.engine.members.building import build_member, give_own_networks, names
from shoal.engine.members.member import Member, draws
from shoal.engine.members.optimizers import drawn_by_optimizer, make_optimizer, make_schedule, trying
from shoal.engine.members.step import number
from shoal.engine.optim.kinds import has_modes, needs_closure
from shoal.engine.tiers.evaluate import metric_columns
from shoal.errors import JobError, describe, warn
from shoal.jobs.averaging import counts_epochs, first_update
from shoal.jobs.early_stopping import watched
from shoal.jobs.job import Job
from shoal.jobs.loop_variables import lost_values
from shoal.preparation.dry_run import dry_run_noting_rates, stop_problems
from shoal.preparation.likeness import likeness, rates
from shoal.utils.caches import import_tracer
from shoal.utils.random_state import restored
from shoal.utils.torch_flags import start_autograd

DRY_ROWS = 4
"""Rows of the dry step where another device will train: a whole batch of a large network takes long on a CPU."""


def prepare(
    jobs: Sequence[Job], device: torch.device, pool: Pool | None = None, *, dry_rows: int | None = None
) -> list[Member]:
    """Build and check all jobs, and raise a JobError with a line for each mistake if there is any.

    Args:
        pool: The data of other jobs, which these jobs may share.
        dry_rows: The most rows of the dry step, where another device will train; None: those of a batch.
    """
    lines = list_problems(jobs)
    if lines:
        raise JobError(*lines)
    start_autograd()
    import_tracer()
    pool = pool or Pool(device)
    job_names = names(jobs)
    warn_of_loop_variables(jobs, job_names)
    members: list[Member] = []
    with restored():
        for index, job in enumerate(jobs):
            problems = [*job.problems(), *field_problems(job)]
            if not problems:
                try:
                    members.append(build_member(job, index, job_names[index], pool))
                except JobError as error:
                    problems = list(error.lines)
            lines += [f"job {job_names[index]!r}: {line}" for line in problems]
        network_problems = give_own_networks(members)
    lines += network_problems or member_problems(members, dry_rows)
    if lines:
        raise JobError(*dict.fromkeys(lines))
    warn_of_data(members)
    warn_of_averages(members)
    return members


def list_problems(jobs: Any) -> list[str]:
    """Return a line for each mistake in the list itself."""
    if isinstance(jobs, Job):
        return ["jobs is a single Job; pass a list: shoal.train([job])"]
    if not isinstance(jobs, Sequence):
        return [f"jobs is a {type(jobs).__name__}; pass a list of shoal.Job"]
    if not jobs:
        return ["jobs is empty; pass at least one shoal.Job"]
    lines = [
        f"jobs[{i}] is a {type(job).__name__}; pass a shoal.Job"
        for i, job in enumerate(jobs)
        if not isinstance(job, Job)
    ]
    if lines:
        return lines
    indices_of: dict[str, list[int]] = {}
    for index, name in enumerate(names(jobs)):
        indices_of.setdefault(name, []).append(index)
    return [
        f"job {name!r}: {len(indices)} jobs have this name (at {', '.join(map(str, indices))}); give each its own name"
        for name, indices in indices_of.items()
        if len(indices) > 1
    ]


def field_problems(job: Job) -> list[str]:
    """Return a line for each combination of fields that is invalid or has no effect."""
    lines = []
    if job.val is None:
        if job.metrics:
            lines.append(f"metrics are set ({', '.join(job.metrics)}) but val is not; set val=, or remove them")
        if job.val_every_steps is not None:
            lines.append(f"val_every_steps is {job.val_every_steps} but there is no val; set val=, or leave it out")
        if job.val_every != 1:
            lines.append(f"val_every is {job.val_every} but there is no val; set val=, or leave val_every at 1")
        if job.keep == "best" and job.stop is None:
            lines.append(
                "keep is 'best' but there is no val to judge by; set val=, stop=EarlyStop('loss') or keep='last'"
            )
    if job.stop is not None and job.step is None:
        columns = ["loss", *(["val_loss", *metric_columns(job)] if job.val is not None else [])]
        if job.stop.metric not in columns:
            without = ", or set val=" if job.val is None else ""
            lines.append(
                f"stop watches {job.stop.metric!r}, which it does not have; use one of {', '.join(columns)}{without}"
            )
    if job.schedule is None and job.schedule_every != "step":
        lines.append(
            f"schedule_every is {job.schedule_every!r} but there is no schedule; set schedule=, or leave it at 'step'"
        )
    rate = job.hparams.get("lr")
    if rate is not None and not _is_valid_rate(rate):
        rule = "a number, not text" if isinstance(rate, str) else "0 or more and finite"
        lines.append(f"lr is {rate!r}; a learning rate must be {rule}: change hparams['lr']")
    return lines


def _is_valid_rate(rate: Any) -> bool:
    try:
        return not isinstance(rate, str) and 0 <= number(rate) < math.inf
    except (TypeError, ValueError):
        return False


def member_problems(members: list[Member], dry_rows: int | None = None) -> list[str]:
    """Return the mistakes that building and one dry step on a copy show. Jobs that look alike share the dry step."""
    lines: list[str] = []
    dry_runs: dict[Any, tuple[list[str], set[str]]] = {}
    reads_rates = set[Any]()
    """Looks of jobs whose code reads the rates of dropout layers, so that only those with equal rates are alike."""
    uses_random: dict[Any, bool] = {}
    random_optimizers: dict[int, bool] = {}
    """By optimizer class, whether it draws from `random` or `numpy.random`."""
    for member in members:
        with trying(member.job):
            problems = [*batch_problems(member), *optimizer_problems(member), *average_problems(member)]
            looks = likeness(member)
            key = (looks, rates(member) if looks in reads_rates else None)
            if key not in dry_runs:
                tried, reads = dry_run_noting_rates(member, dry_rows) if not problems else (([], set[str]()), False)
                if reads:
                    reads_rates.add(looks)
                    key = (looks, rates(member))
                dry_runs[key] = tried
            used = uses_random.setdefault(key, member.modules.used)
            optimizer_id = id(member.job.optimizer)
            if optimizer_id not in random_optimizers and not problems:
                random_optimizers[optimizer_id] = drawn_by_optimizer(member.job, member.model)[1]
            member.modules.used = used or random_optimizers.get(optimizer_id, False)
        mistakes, columns = dry_runs[key]
        problems += [*mistakes, *(stop_problems(member, columns) if member.job.step is not None else [])]
        lines += [f"job {member.name!r}: {line}" for line in problems]
    return lines


def batch_problems(member: Member) -> list[str]:
    """Return a line for each reason why there is nothing to train on."""
    job, n = member.job, len(member.data)
    if member.batched:
        return []  # the first batch will show them
    if member.num_batches == 0:
        return [f"batch_size is {job.batch_size} and data has {n} rows: drop_last leaves no batch; use at most {n}"]
    if job.loss is not None:
        return [line for which in ("data", "val") for line in _pair_problems(which, getattr(member, which))]
    if job.metrics and member.val is not None:
        return _pair_problems("val", member.val, "metrics take (outputs, targets)")
    return []


def _pair_problems(
    which: str, view: View | None, why: str = "the loss takes model(*batch[:-1]) and batch[-1]"
) -> list[str]:
    """Return a line if the data is not a pair of inputs and targets, which `why` needs."""
    if view is None or not isinstance(view.source, TensorSource):
        return []
    content = view.source.whole()
    if isinstance(content, (tuple, list, dict)) and len(content) >= 2:
        return []
    return [
        f"{which} is a {type(content).__name__}, but {why}; pass (inputs, targets), or set step=(model, batch) -> loss"
    ]


def optimizer_problems(member: Member) -> list[str]:
    """Build the job's optimizer and schedule, and return a line for each mistake."""
    job = member.job
    with draws(member, keep=False):
        try:
            optimizer = make_optimizer(job, member.model)
        except Exception as error:
            what = describe(error) if not isinstance(error, JobError) else error.lines[0]
            return [f"building the optimizer with {_settings(job)} raised {what}; {_optimizer_fix(job)}"]
        lines = [
            f"parameter group {i} has lr {group['lr']!r}; a learning rate must be 0 or more and finite: change params"
            for i, group in enumerate(optimizer.param_groups)
            if group.get("lr") is not None and not _is_valid_rate(group["lr"])
        ]
        if needs_closure(optimizer) and (job.accumulate > 1 or job.precision == "fp16"):
            lines.append(f"{type(optimizer).__name__} evaluates the loss itself; use accumulate=1 and no 'fp16'")
        optimized = [p for group in optimizer.param_groups for p in group["params"]]
        if job.precision == "fp16" and any(p.requires_grad and p.dtype == torch.float16 for p in optimized):
            lines.append(
                "precision is 'fp16', and weights are float16: their gradients cannot be unscaled; build the "
                "network in float32"
            )
        if has_modes(optimizer) and job.average is not None:
            lines.append(f"{type(optimizer).__name__} averages the weights itself; leave average= out")
        params = {id(p) for p in member.model.parameters()}
        if any(id(p) not in params for group in optimizer.param_groups for p in group["params"]):
            lines.append(
                "its optimizer has parameters that are not the model's; take them from the model that params= is given"
            )
        try:
            schedule = make_schedule(job, optimizer)
        except Exception as error:
            return [*lines, error.lines[0] if isinstance(error, JobError) else f"schedule raised {describe(error)}"]
    if isinstance(schedule, ReduceLROnPlateau):
        if job.schedule_every != "epoch":
            lines.append("its schedule is ReduceLROnPlateau, which goes by epochs; set schedule_every='epoch'")
        if watched(job).metric == "val_loss" and job.val is None:
            lines.append("its schedule is ReduceLROnPlateau, which needs a watched value; set val= or stop=")
    return lines


def _settings(job: Job) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in job.hparams.items()) or "its defaults"


def _optimizer_fix(job: Job) -> str:
    """Return what to change if the optimizer cannot be built: the names that it takes if hparams has another one."""
    try:
        parameters = list(inspect.signature(job.optimizer).parameters.values())[1:]
    except (TypeError, ValueError):  # no signature is known
        return "change hparams or params"
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if any(p.kind is p.VAR_KEYWORD for p in parameters) or all(name in names for name in job.hparams):
        return "change hparams or params"
    return f"change hparams, which takes {', '.join(names)}"


def average_problems(member: Member) -> list[str]:
    """Return a line if an average counts epochs whose length is unknown."""
    average = member.job.average
    if average is None or member.steps_per_epoch or not counts_epochs(average):
        return []
    return [
        f"average is {average}, which counts epochs, and the loader does not say how many batches an epoch has; "
        "count optimizer steps: SWA(every=100) or EMA(every=1)"
    ]


def warn_of_loop_variables(jobs: Sequence[Job], job_names: Sequence[str]) -> None:
    """Warn of functions that read a variable of the loop that made the jobs, and so would all see its last value."""
    for line in lost_values((name, job, job.functions()) for name, job in zip(job_names, jobs, strict=True)):
        warn(line)


def warn_of_averages(members: list[Member]) -> None:
    """Warn of averages that begin after the job's end; no error, since the job may be made longer later."""
    for member in members:
        job, per_epoch = member.job, member.steps_per_epoch
        if job.steps is None and not per_epoch:
            continue  # the job's length is unknown
        steps = job.steps if job.steps is not None else (job.epochs or 0) * per_epoch
        first = 0 if job.average is None else first_update(job.average, per_epoch)
        if steps < first:
            warn(
                f"job {member.name!r}: the first update of {job.average} comes after step {first}, and the job has "
                f"{steps} steps; its result has the weights without averaging"
            )


def warn_of_data(members: list[Member]) -> None:
    """Warn of data that may be a mistake, once for each data set, naming the first job that has it."""
    warn_of_loaders(members)
    seen: set[int] = set()
    for member in members:
        for which, view in (("data", member.data), ("val", member.val)):
            if view is None or id(view.source) in seen:
                continue
            seen.add(id(view.source))
            count = view.source.num_nan()
            if count:
                warn(f"job {member.name!r}: {which} has {count} NaN values")
            if not view.source.steady:
                what = "another item when a row is" if not view.source.batched else "other batches when it is"
                warn(
                    f"job {member.name!r}: {which} gives {what} read again, because it uses random numbers or state "
                    "that Shoal cannot seed, so results depend on what else is read; draw from torch's, numpy's or "
                    "python's random functions, or from a generator that is an attribute of the Dataset"
                )


def warn_of_loaders(members: list[Member]) -> None:
    """Warn of DataLoaders whose workers behave differently than their user may expect."""
    readers_of: dict[LoaderSource, dict[int, Member]] = {}
    for member in members:
        if isinstance(member.data.source, LoaderSource):
            readers_of.setdefault(member.data.source, {}).setdefault(member.job.order_seed, member)
    for source, readers in readers_of.items():
        member, workers = next(iter(readers.values())), source.loader.loader.num_workers
        if source.loader.loader.persistent_workers:
            warn(
                f"job {member.name!r}: data has persistent_workers=True, but its workers are started for each epoch, "
                "so that a resumed run reads the same batches; set persistent_workers=False"
            )
        if len(readers) > 1 and len(readers) * workers > 2 * (os.cpu_count() or 1):
            warn(
                f"job {member.name!r} and others read one DataLoader in {len(readers)} orders, each with {workers} "
                "workers; give them the same data_seed to read it once for all"
            )
