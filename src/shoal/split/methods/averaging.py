"""Two ways in which every worker has the whole network: local SGD, and data parallel."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from shoal.data import Pool
from shoal.engine.members.member import open_data, seeded
from shoal.engine.members.ownership import build_model
from shoal.errors import SplitError
from shoal.jobs.job import Job
from shoal.split.core.method import Method, Worker
from shoal.split.core.parts import Part, Slice
from shoal.split.core.reading import Reading, mixed
from shoal.split.core.state import tensors_of


class Plan:
    """How long a job is under a split, and who reads what when: pure numbers.

    Every worker goes `job.epochs` times through its shard, or takes `job.steps` steps, `local_steps` in each round.
    """

    def __init__(self, job: Job, rows: int, workers: int, local_steps: int) -> None:
        check_count("workers", workers)
        check_count("local_steps", local_steps)
        if rows < workers:
            raise SplitError(f"workers is {workers} and data has {rows} rows; use at most one worker a row")
        self.job, self.rows, self.workers, self.local_steps = job, rows, workers, local_steps
        empty = Reading(job, rows, (workers - 1, workers))
        if not empty.num_batches:
            raise SplitError(
                f"batch_size is {job.batch_size} and a shard has {len(empty)} rows: drop_last leaves no batch; "
                f"use at most {len(empty)}, or fewer workers"
            )
        self.steps = max(self.length((number, workers)) for number in range(workers))
        """Local steps of the worker that has the most."""
        self.rounds = -(-self.steps // local_steps)

    def length(self, shard: tuple[int, int]) -> int:
        """Local steps of a shard."""
        if self.job.steps is not None:
            return self.job.steps
        assert self.job.epochs is not None
        return self.job.epochs * Reading(self.job, self.rows, shard).steps

    def shards(self, executor: Sequence[Worker]) -> list[tuple[int, int]]:
        """Who reads which shard: those who hold one read that; others the one of their number, or else a free one."""
        count = max(self.workers, len(executor))
        taken = {worker.shard for worker in executor if worker.shard is not None}
        found: list[int] = []
        for worker in executor:
            wanted = worker.shard if worker.shard is not None else worker.number % count
            if worker.shard is None and wanted in taken:
                wanted = next(shard for shard in range(count) if shard not in taken)
            taken.add(wanted)
            found.append(wanted)
        return [(shard, count) for shard in found]

    def parts(self, number: int, executor: Sequence[Worker], seed: int) -> list[Part]:
        """The round's parts, of the whole network each."""
        first = number * self.local_steps
        parts = []
        for place, (worker, shard) in enumerate(zip(executor, self.shards(executor), strict=True)):
            parts.append(
                Part(
                    number=place,
                    shard=shard,
                    start=Reading(self.job, self.rows, shard).first_batch(first),
                    steps=max(0, min(self.local_steps, self.length(shard) - first)),
                    seed=mixed(seed, number, worker.number),
                )
            )
        return parts


class WholeNetwork(Method):
    """Every part is the whole network, on rows of its own."""

    def __init__(
        self, job: Job, workers: int, local_steps: int, settings: Mapping[str, Any], rows: int | None = None
    ) -> None:
        self._job = job
        self.plan = Plan(job, num_rows(job) if rows is None else rows, workers, local_steps)
        self.rounds, self.local_steps, self.shards = self.plan.rounds, local_steps, workers
        with seeded(job.seed, torch.device("cpu")):
            self.model = build_model(job)
        self._slices = {name: Slice(name) for name in tensors_of(self.model)}
        self.settings = MappingProxyType({"method": self.name, "workers": workers, **settings})

    def parts(self, number: int, executor: Sequence[Worker]) -> list[Part]:
        return self.plan.parts(number, executor, self._job.seed)

    def network(self, part: Part) -> nn.Module:
        return copy.deepcopy(self.model)

    def slices(self, part: Part) -> Mapping[str, Slice]:
        return self._slices


class LocalSGD(WholeNetwork):
    """Every worker trains the whole network for `local_steps`, then the weights are averaged."""

    name = "local_sgd"

    def __init__(
        self, job: Job, workers: int = 4, local_steps: int = 20, *, moments: str = "travel", rows: int | None = None
    ) -> None:
        self.moments = check_moments(moments)
        super().__init__(job, workers, local_steps, {"local_steps": local_steps, "moments": moments}, rows)


class DataParallel(WholeNetwork):
    """Every worker finds the gradient of its own batch; their mean is followed once, by the job's optimizer."""

    name = "data_parallel"
    merge = "gradients"

    def __init__(self, job: Job, workers: int = 4, *, rows: int | None = None) -> None:
        super().__init__(job, workers, 1, {}, rows)


def num_rows(job: Job) -> int:
    """Rows of the job's data."""
    return len(open_data(Pool(torch.device("cpu")), job, "data"))


def check_count(name: str, value: Any, least: int = 1) -> None:
    """A whole number, or a clear line."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SplitError(f"{name} is {value!r}; use a whole number, {least} or more")


def check_moments(value: Any) -> Any:
    """Whether optimizer state travels."""
    if value not in ("travel", "fresh"):
        raise SplitError(f"moments is {value!r}; use 'travel' or 'fresh'")
    return value
