"""What a part reads: the rows of its shard, in an order that is a pure function of (seed, shard, epoch).

Nothing is drawn along the way, so that (shard, start, steps) give the same batches everywhere: in this process, on
another machine, or in a run that resumes after a kill.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from shoal.jobs.job import Job


def mixed(*numbers: int) -> int:
    """One seed from several numbers; another one of any of them gives an unrelated seed.

    >>> mixed(0, 1) != mixed(1, 0), 0 <= mixed(-3) < 2**63
    (True, True)
    """
    text = ",".join(str(number) for number in numbers).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


@lru_cache(maxsize=8)
def shuffled(count: int, *seed: int) -> Tensor:
    """A permutation that depends on the seed alone. It is cached: it must not be written to."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(mixed(*seed)))


@dataclass(frozen=True, slots=True)
class Reading:
    """The endless batches of one shard. An epoch of it has `num_batches`, the short last one included.

    >>> model, rows = torch.nn.Linear(1, 1), torch.zeros(5, 1)
    >>> job = Job(model=model, data=(rows, rows), loss=torch.nn.functional.mse_loss, batch_size=2, steps=1)
    >>> halves = [Reading(job, 5, (s, 2)) for s in (0, 1)]
    >>> [len(half) for half in halves], [half.num_batches for half in halves]
    ([3, 2], [2, 1])
    """

    job: Job
    total: int
    """Rows of the data."""
    shard: tuple[int, int] = (0, 1)
    """Which of how many shards."""
    private: bool = False
    """Whether the data is this shard and nothing else, because rows never leave their worker."""

    def __len__(self) -> int:
        """Rows in the shard."""
        number, shards = self.shard
        return self.total if self.private else len(range(number, self.total, shards))

    @property
    def num_batches(self) -> int:
        """Batches in one epoch of the shard."""
        size, rows = self.job.batch_size, len(self)
        return rows // size if self.job.drop_last else -(-rows // size)

    @property
    def steps(self) -> int:
        """Optimizer steps in one epoch of the shard: groups of `accumulate` batches, the last one of what is left."""
        return -(-self.num_batches // self.job.accumulate)

    def first_batch(self, step: int) -> int:
        """Where an optimizer step begins in the sequence of batches."""
        epoch, place = divmod(step, self.steps)
        return epoch * self.num_batches + place * self.job.accumulate

    def step_at(self, batch: int) -> int:
        """Which optimizer step a batch belongs to."""
        epoch, place = divmod(batch, self.num_batches)
        return epoch * self.steps + place // self.job.accumulate

    def rows(self) -> Tensor:
        """The shard's rows of the data."""
        number, shards = self.shard
        if self.private:
            return torch.arange(self.total)
        whole = shuffled(self.total, self.job.order_seed) if self.job.shuffle else torch.arange(self.total)
        return whole[number::shards]

    def order(self, epoch: int) -> Tensor:
        """The rows of the data that an epoch reads, in its order."""
        rows = self.rows()
        if not self.job.shuffle:
            return rows
        return rows[shuffled(len(rows), self.job.order_seed, self.shard[0], epoch)]

    def groups(self, start: int, steps: int) -> Iterator[tuple[int, list[Tensor]]]:
        """For each optimizer step from a first batch on: its epoch, and the rows of each of its batches."""
        order, known = torch.empty(0), -1
        size, k = self.job.batch_size, self.job.accumulate
        for _ in range(steps):
            epoch, place = divmod(start, self.num_batches)
            if epoch != known:
                order, known = self.order(epoch), epoch
            end = min(place - place % k + k, self.num_batches)
            yield epoch, [order[b * size : (b + 1) * size] for b in range(place, end)]
            start += end - place
