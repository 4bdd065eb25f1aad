"""The machines on which a network is placed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.errors import PlaceError
from shoal.place.links import Link

BUCKET_BYTES = 1 << 20
"""Gradients are sent in buckets of about this size, while the backward pass computes the next ones."""


@dataclass(frozen=True, slots=True)
class Device:
    """The device of one machine."""

    speed: float = 1.0
    """Relative to the profiled device: 0.5 takes twice as long."""
    memory: int | None = None
    """The bytes that may be used; None: enough."""

    def __post_init__(self) -> None:
        if not isinstance(self.speed, int | float) or not self.speed > 0:
            raise PlaceError(f"speed is {self.speed!r}; it is a factor above 0, 1 for a device like the profiled one")
        if self.memory is not None and self.memory <= 0:
            raise PlaceError(f"memory is {self.memory!r}; give bytes, or a size such as 8GB")


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Seconds of overhead in a process besides layers and bytes. The defaults are those of the training's own code."""

    message: float = 1.5e-4
    """To create or to read a message."""
    exchange: float = 2e-3
    """For an exchange among workers."""
    step: float = 2e-3
    """For each step: rows, updates, random numbers."""
    parameter: float = 2e-5
    """For each parameter whose gradient is sent, summed or applied, whatever its size."""
    both_ways: float = 1.15
    """How many times longer data takes over a link that carries data in both directions: acknowledgements wait behind
    it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The server, its workers, and the links between them."""

    workers: tuple[Device, ...]
    server: Device
    link: Link
    """The link of each worker."""
    server_link: Link
    """The link of the server, which everything that workers send to it passes. `up` is from the workers."""
    overhead: Overhead = Overhead()
    cores: int | None = None
    """If all of these are processes of one machine, the cores that they share; None: separate machines."""

    def __post_init__(self) -> None:
        if not self.workers:
            raise PlaceError("workers is 0; use 1 or more")
        if self.cores is not None and (not isinstance(self.cores, int) or self.cores < 1):
            raise PlaceError(f"cores is {self.cores!r}; use 1 or more, or None if each process has its own machine")

    @property
    def size(self) -> int:
        return len(self.workers)

    @property
    def crowding(self) -> float:
        """How many times longer a worker takes while all of them compute."""
        return max(1.0, self.size / self.cores) if self.cores is not None else 1.0


def rows_for(total: int, cluster: Cluster) -> tuple[int, ...]:
    """Return each worker's rows of the joined batch, in proportion to its speed."""
    return tuple(max(1, rows) for rows in divide(total, [device.speed for device in cluster.workers]))


def divide(total: int, shares: Sequence[float]) -> list[int]:
    """Divide rows among workers in proportion to their shares.

    >>> divide(10, [1, 1, 1]), divide(7, [1, 2])
    ([4, 3, 3], [2, 5])
    """
    exact = [total * share / sum(shares) for share in shares]
    rows = [int(x) for x in exact]
    by_remainder = sorted(range(len(shares)), key=lambda i: (rows[i] - exact[i], i))
    for i in by_remainder[: total - sum(rows)]:
        rows[i] += 1
    return rows
