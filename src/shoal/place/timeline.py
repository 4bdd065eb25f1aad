"""Simulate one step of all workers: their compute, the link up, the server's compute, and the link down.

Each micro-batch passes through them in order, so that they overlap if there are several:

    worker forward -> up: tensors at the cut -> server: its layers, forward and backward -> down: gradients at the cut
    -> worker backward -> gradients of the replicated layers, each as soon as it is made -> updates -> parameters
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.place.placement import Sync


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSync:
    """How long the links are busy with one layer's gradients."""

    way: Sync
    up: float
    """Seconds; for a way among workers, those of the busier direction."""
    hops: float = 0.0
    """Its messages that wait for one another; a fraction if several layers are sent together."""
    overhead: float = 0.0
    """Seconds of a worker to start it and to read the result."""
    compute: float = 0.0
    """Seconds of a worker after it has arrived: to multiply factors."""


def in_buckets(
    syncs: Sequence[LayerSync | None], num_bytes: Sequence[int], bucket_bytes: int
) -> tuple[LayerSync | None, ...]:
    """Return when gradients are sent that wait for those of other layers in their bucket: with the first such layer,
    which the backward pass computes last.

    >>> small = LayerSync(way="server", up=1.0)
    >>> [sync and sync.up for sync in in_buckets([small, small, small], [4, 4, 4], bucket_bytes=8)]
    [1.0, 2.0, None]
    """
    result = list(syncs)
    for way in ("server", "allreduce"):
        bucket: int | None = None
        size = 0
        for i in reversed(range(len(syncs))):
            sync = syncs[i]
            if sync is None or sync.way != way:
                continue
            waiting = result[bucket] if bucket is not None and size + num_bytes[i] <= bucket_bytes else None
            if bucket is not None and waiting is not None:
                result[i], result[bucket] = _together(waiting, sync), None
                size += num_bytes[i]
            else:
                size = num_bytes[i]
            bucket = i
    return tuple(result)


def _together(one: LayerSync, other: LayerSync) -> LayerSync:
    return LayerSync(
        way=one.way, up=one.up + other.up, hops=one.hops + other.hops, overhead=one.overhead + other.overhead,
        compute=one.compute + other.compute,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """The parts of a step, in seconds. A worker's are those of the slowest."""

    micro_batches: int
    forward: float
    """One micro-batch on a worker."""
    backward: tuple[float, ...]
    """One micro-batch on a worker, for each layer there."""
    syncs: tuple[LayerSync | None, ...]
    """For each layer on the workers; None: it has nothing to train."""
    server: float | None = None
    """One micro-batch of all workers at the server; None: all layers are on the workers."""
    cut_up: float = 0.0
    """The tensors of one micro-batch at the cut."""
    cut_down: float = 0.0
    statistics: tuple[float, ...] = ()
    """Exchanges of batch norm layers, one after another, with the delay of their messages."""
    worker_update: float = 0.0
    server_update: float = 0.0
    """The update of the server's own layers, during which workers run their backward pass."""
    late_update: float = 0.0
    """The server's update of the workers' layers, after all gradients have arrived."""
    parameters_down: float = 0.0
    half_trip: float = 0.0
    """One-way seconds of an empty message."""
    shares_cores: bool = False
    """Whether the workers need all cores of the machine, so that the server computes only while they do not."""


@dataclass(slots=True)
class Busy:
    """When a step ends, and how long each resource was busy in it."""

    seconds: float = 0.0
    worker: float = 0.0
    server: float = 0.0
    up: float = 0.0
    down: float = 0.0


@dataclass(slots=True)
class _Clock:
    """When each resource is free again."""

    shares_cores: bool = False
    busy: Busy = field(default_factory=Busy)
    worker: float = 0.0
    server: float = 0.0
    up: float = 0.0
    down: float = 0.0

    def compute(self, seconds: float) -> None:
        self.worker = max(self.worker, self.server if self.shares_cores else 0.0) + seconds
        self.busy.worker += seconds

    def serve(self, moment: float, seconds: float) -> None:
        self.server = max(self.server, moment, self.worker if self.shares_cores else 0.0) + seconds
        self.busy.server += seconds

    def send_up(self, moment: float, seconds: float) -> None:
        self.up = max(self.up, moment) + seconds
        self.busy.up += seconds

    def send_down(self, moment: float, seconds: float) -> None:
        self.down = max(self.down, moment) + seconds
        self.busy.down += seconds

    def exchange(self, seconds: float, delay: float) -> None:
        """Exchange among workers: both directions are busy, and messages that wait for one another add a delay."""
        self.up = self.down = max(self.worker, self.up, self.down) + seconds + delay
        self.busy.up += seconds
        self.busy.down += seconds

    def wait_for_peers(self) -> None:
        self.worker = max(self.worker, self.up, self.down)


def follow(step: StepTimes) -> Busy:
    """Return when a step ends that starts with every resource free, and how busy each was."""
    clock = _Clock(step.shares_cores)
    _cross(step, clock)
    _synchronise(step, clock)
    clock.compute(step.worker_update)
    through_server = any(sync is not None and sync.way == "server" for sync in step.syncs)
    pushed = max(clock.worker, clock.up if through_server else 0.0) + step.half_trip
    clock.serve(pushed, step.late_update)
    clock.send_down(clock.server, step.parameters_down)
    clock.busy.seconds = clock.down + step.half_trip
    return clock.busy


def _cross(step: StepTimes, clock: _Clock) -> None:
    """Simulate all forward passes, the server's layers, and all backward passes but the last."""
    forward_done = []
    for _ in range(step.micro_batches):
        clock.compute(step.forward)
        forward_done.append(clock.worker)
    for seconds in step.statistics:
        clock.exchange(seconds, 0.0)
        clock.wait_for_peers()
        forward_done[-1] = clock.worker
    if step.server is None:
        return
    gradients_arrived = []
    for moment in forward_done:
        clock.send_up(moment, step.cut_up)
        clock.serve(clock.up + step.half_trip, step.server)
        clock.send_down(clock.server, step.cut_down)
        gradients_arrived.append(clock.down + step.half_trip)
    for number, moment in enumerate(gradients_arrived, 1):
        clock.worker = max(clock.worker, moment)
        if number < step.micro_batches:
            clock.compute(sum(step.backward))
    clock.serve(0.0, step.server_update)


def _synchronise(step: StepTimes, clock: _Clock) -> None:
    """Simulate the last backward pass, and the gradients that are sent while it runs or at its end."""
    late = []
    for seconds, sync in zip(reversed(step.backward), reversed(step.syncs), strict=True):
        clock.compute(seconds)
        if sync is None:
            continue
        clock.compute(sync.overhead)
        if sync.way == "server":
            clock.send_up(clock.worker, sync.up)
        elif sync.way == "allreduce":
            clock.exchange(sync.up, sync.hops * step.half_trip)
        else:
            late.append(sync)
    for sync in late:
        clock.exchange(sync.up, sync.hops * step.half_trip)
        clock.wait_for_peers()
        clock.compute(sync.compute)
    if any(sync is not None and sync.way == "allreduce" for sync in step.syncs):
        clock.wait_for_peers()
