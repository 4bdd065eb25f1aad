"""Two methods in which every worker has the whole network: local SGD and data parallel."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from types import MappingProxyType
from typing import Any, Literal

from torch import nn

from shoal.engine.members.member import Member
from shoal.errors import SplitError
from shoal.jobs.job import Job
from shoal.split.core.checks import check_choice, check_count, prepare_job
from shoal.split.core.method import Method, Worker
from shoal.split.core.parts import Part, Slice
from shoal.split.core.reading import Reading, mixed
from shoal.split.core.state import tensors_of


@dataclass(slots=True)
class LocalSGDSettings:
    """The settings of `shoal.split.local_sgd`."""

    workers: int = 4
    local_steps: int = 20
    _: KW_ONLY
    moments: Literal["travel", "fresh"] = "travel"

    def __post_init__(self) -> None:
        check_choice("moments", self.moments, ("travel", "fresh"))


@dataclass(slots=True)
class DataParallelSettings:
    """The settings of `shoal.split.data_parallel`."""

    workers: int = 4


class WholeNetwork(Method):
    """A method in which every part is the whole network, trained on rows of its own.

    Every worker goes `job.epochs` times through its shard, or takes `job.steps` steps, `local_steps` of them in each
    round.
    """

    def __init__(self, job: Job | Member, workers: int, local_steps: int) -> None:
        self.member = prepare_job(job)
        job, rows = self.member.job, len(self.data)
        check_count("workers", workers)
        check_count("local_steps", local_steps)
        if rows < workers:
            raise SplitError(f"workers is {workers} and data has {rows} rows; use at most one worker a row")
        smallest = Reading(job, rows, (workers - 1, workers))
        if not smallest.num_batches:
            raise SplitError(
                f"batch_size is {job.batch_size} and a shard has {len(smallest)} rows: drop_last leaves no batch; "
                f"use at most {len(smallest)}, or fewer workers"
            )
        self.shards = self.num_workers = workers
        self.local_steps = local_steps
        self.rounds = -(-max(self.length((number, workers)) for number in range(workers)) // local_steps)
        self._slices = {name: Slice(name) for name in tensors_of(self.model)}

    def length(self, shard: tuple[int, int]) -> int:
        """Return how many local steps a shard takes in all."""
        job = self.member.job
        if job.steps is not None:
            return job.steps
        assert job.epochs is not None
        return job.epochs * Reading(job, len(self.data), shard).steps

    def shards_of(self, workers: Sequence[Worker]) -> list[tuple[int, int]]:
        """Return the shard that each worker reads.

        A worker that holds a shard reads that one. Others read the shard of their number, or a free one if it is taken.
        """
        count = max(self.num_workers, len(workers))
        used_shards = {worker.shard for worker in workers if worker.shard is not None}
        shards: list[int] = []
        for worker in workers:
            wanted = worker.shard if worker.shard is not None else worker.number % count
            if worker.shard is None and wanted in used_shards:
                wanted = next(shard for shard in range(count) if shard not in used_shards)
            used_shards.add(wanted)
            shards.append(wanted)
        return [(shard, count) for shard in shards]

    def parts(self, number: int, workers: Sequence[Worker]) -> list[Part]:
        job, first = self.member.job, number * self.local_steps
        return [
            Part(
                number=index,
                shard=shard,
                start=Reading(job, len(self.data), shard).first_batch(first),
                steps=max(0, min(self.local_steps, self.length(shard) - first)),
                seed=mixed(job.seed, number, worker.number),
            )
            for index, (worker, shard) in enumerate(zip(workers, self.shards_of(workers), strict=True))
        ]

    def network(self, part: Part) -> nn.Module:
        return copy.deepcopy(self.model)

    def slices(self, part: Part) -> Mapping[str, Slice]:
        return self._slices


class LocalSGD(WholeNetwork):
    """Every worker trains the whole network for `local_steps`; then the weights are averaged."""

    name = "local_sgd"
    options = LocalSGDSettings

    def __init__(self, job: Job | Member, *args: Any, **kwargs: Any) -> None:
        settings = LocalSGDSettings(*args, **kwargs)
        self.moments = settings.moments
        super().__init__(job, settings.workers, settings.local_steps)
        self.settings = MappingProxyType({"method": self.name, **asdict(settings)})


class DataParallel(WholeNetwork):
    """Every worker computes the gradient of its own batch; the job's optimizer takes one step with their mean."""

    name = "data_parallel"
    merge = "gradients"
    options = DataParallelSettings

    def __init__(self, job: Job | Member, *args: Any, **kwargs: Any) -> None:
        settings = DataParallelSettings(*args, **kwargs)
        super().__init__(job, settings.workers, local_steps=1)
        self.settings = MappingProxyType({"method": self.name, **asdict(settings)})
