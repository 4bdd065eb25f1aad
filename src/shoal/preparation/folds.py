"""k-fold cross-validation: one job becomes k, which share its data."""

from __future__ import annotations

from dataclasses import replace

import torch

from shoal.data import Pool, Rows
from shoal.engine.members.member import open_data
from shoal.errors import JobError
from shoal.jobs.job import Job
from shoal.jobs.loaders import refuse_batches
from shoal.utils.numpy_values import plain_int


def folds(job: Job, k: int = 5, *, shuffle: bool = True, seed: int = 0) -> list[Job]:
    """k jobs, each validated on its own k-th of the rows and trained on the others. The data is not copied.

    The split depends on `seed` alone, so that jobs which differ in hyper-parameters get the same folds.
    """
    k, seed = plain_int(k), plain_int(seed)
    label = f"job {job.name!r}" if job.name else "job"
    if job.val is not None:
        raise JobError(f"{label}: it has val= already, which folds would replace; remove it")
    refuse_batches(job, "folds")
    n = len(open_data(Pool(torch.device("cpu")), job, "data"))
    if isinstance(k, bool) or not isinstance(k, int) or not 2 <= k <= n:
        raise JobError(f"{label}: k is {k!r}; use a whole number from 2 to the number of rows, {n}")
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed)) if shuffle else torch.arange(n)
    parts = [part.sort().values for part in order.tensor_split(k)]
    jobs = []
    for fold, part in enumerate(parts):
        others = torch.cat([p for i, p in enumerate(parts) if i != fold]).sort().values
        name = f"{job.name} fold={fold + 1}/{k}" if job.name else f"fold={fold + 1}/{k}"
        jobs.append(replace(job, data=Rows(job.data, others), val=Rows(job.data, part), name=name))
    return jobs
