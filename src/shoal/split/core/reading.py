"""The rows that a part reads: those of its shard, in an order that depends only on (seed, shard, epoch).

No generator is carried along, so (shard, start, steps) give the same batches everywhere: in this process, on another
machine, or in a run that resumes after a kill.
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
    """Make one seed from several numbers. If any of them changes, the seed is unrelated.

    >>> mixed(0, 1) != mixed(1, 0), 0 <= mixed(-3) < 2**63
    (True, True)
    """
    text = ",".join(str(number) for number in numbers).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


@lru_cache(maxsize=8)
def shuffled(count: int, *seed: int) -> Tensor:
    """Return a permutation that depends on the seed alone. It is cached, so do not write to it."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(mixed(*seed)))


@dataclass(frozen=True, slots=True)
class Reading:
    """The endless batches of one shard. An epoch has `num_batches` batches, including the short last one.

    >>> model, rows = torch.nn.Linear(1, 1), torch.zeros(5, 1)
    >>> job = Job(model=model, data=(rows, rows), loss=torch.nn.functional.mse_loss, batch_size=2, steps=1)
    >>> halves = [Reading(job, 5, (s, 2)) for s in (0, 1)]
    >>> [len(half) for half in halves], [half.num_batches for half in halves]
    ([3, 2], [2, 1])
    """

    job: Job
    total: int
    """Number of rows of the data."""
    shard: tuple[int, int] = (0, 1)
    """(i, n): this is shard i of n shards."""
    private: bool = False
    """Whether the data holds this shard only, because rows never leave their worker."""

    def __len__(self) -> int:
        """Return the number of rows in the shard."""
        number, shards = self.shard
        return self.total if self.private else len(range(number, self.total, shards))

    @property
    def num_batches(self) -> int:
        """Number of batches in one epoch of the shard."""
        size, rows = self.job.batch_size, len(self)
        return rows // size if self.job.drop_last else -(-rows // size)

    @property
    def steps(self) -> int:
        """Number of optimizer steps in one epoch of the shard. Each takes `accumulate` batches; the last one takes the
        rest."""
        return -(-self.num_batches // self.job.accumulate)

    def first_batch(self, step: int) -> int:
        """Return the number of the batch at which an optimizer step begins."""
        epoch, step_in_epoch = divmod(step, self.steps)
        return epoch * self.num_batches + step_in_epoch * self.job.accumulate

    def step_at(self, batch: int) -> int:
        """Return the optimizer step that a batch belongs to."""
        epoch, batch_in_epoch = divmod(batch, self.num_batches)
        return epoch * self.steps + batch_in_epoch // self.job.accumulate

    def rows(self) -> Tensor:
        """Return the shard's rows of the data."""
        number, shards = self.shard
        if self.private:
            return torch.arange(self.total)
        all_rows = shuffled(self.total, self.job.order_seed) if self.job.shuffle else torch.arange(self.total)
        return all_rows[number::shards]

    def order(self, epoch: int) -> Tensor:
        """Return the rows that an epoch reads, in its order."""
        rows = self.rows()
        if not self.job.shuffle:
            return rows
        return rows[shuffled(len(rows), self.job.order_seed, self.shard[0], epoch)]

    def groups(self, start: int, steps: int) -> Iterator[tuple[int, list[Tensor]]]:
        """Yield each optimizer step from the batch `start` on: its epoch, and the rows of each of its batches."""
        order, current_epoch = torch.empty(0), -1
        size, k = self.job.batch_size, self.job.accumulate
        for _ in range(steps):
            epoch, first = divmod(start, self.num_batches)
            if epoch != current_epoch:
                order, current_epoch = self.order(epoch), epoch
            end = min(first - first % k + k, self.num_batches)
            yield epoch, [order[b * size : (b + 1) * size] for b in range(first, end)]
            start += end - first
