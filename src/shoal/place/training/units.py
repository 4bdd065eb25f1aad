"""A placed job as a unit of the engine: turns, validation, early stopping and checkpoints work as for any other job.

In synchronous training (`PlacedUnit`) all workers compute a share of each batch. In asynchronous training workers do
not wait for each other, so results depend on timing: every worker computes whole batches of the job. As soon as its
gradients arrive, the server takes a step with them and gives it the next batch, with the current parameters. No worker
is more than `staleness` batches ahead of the slowest one. Replicated layers are synchronised through the server, and
batch norm uses each worker's own rows.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shoal.engine.members.member import Member, draws
from shoal.engine.tiers.serial import SerialUnit
from shoal.errors import MemberError
from shoal.net.channel import Arrived
from shoal.net.links import LinkLost
from shoal.place.training.joined_batch import JoinedDraws
from shoal.place.training.members import Connected, Wait, WorkerLost, WorkerRaised
from shoal.place.training.server import Batch, Server

IDLE = 0.0005
"""Seconds between two checks of the links."""


class PlacedUnit(SerialUnit):
    """One member, whose batches are computed by a server, which is this process, and its workers."""

    tier = "placed"

    def __init__(self, member: Member, server: Server) -> None:
        super().__init__(member)
        self.server = server
        self._factor: float | None = None
        """The factor by which the gradients of the last step were clipped."""
        server.optimizer, server.scaler = self.optimizer, self.scaler

    def _step(self, feed: Iterator[Any]) -> tuple[float, dict[str, Any]]:
        """Compute one batch with all workers, and run the optimizer at the end of its group."""
        member, job = self.member, self.job
        place, k = member.place, job.accumulate
        group_start = place - place % k
        group = min(k, member.num_batches - group_start)
        batch = next(feed)
        if place == group_start:
            self._clear()
        assert member.order is not None
        rows = member.order[place * job.batch_size : (place + 1) * job.batch_size]
        result = self.server.compute(Batch(batch, rows.cpu(), member.epoch, 1.0 / group))
        if result.loss - result.loss != 0.0:
            return result.loss, result.logs
        apply = place + 1 == group_start + group
        options = [_plain(parameters) for parameters in self.optimizer.param_groups] if apply else []
        self._factor = None
        if apply:
            self._apply()
        self.server.committed(apply=apply, clip=self._factor, options=options)
        if apply and self.schedule is not None and job.schedule_every == "step":
            self._rate = self._current_rate()
            self._advance_schedule()
        return result.loss, result.logs

    def _clip(self) -> None:
        """Scale all gradients, including those of the workers, to the job's largest norm, and clip values."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if self.job.clip_norm is not None:
            squares = sum(float(gradient.double().square().sum()) for gradient in gradients) + self.server.squares
            self._factor = float(min(1.0, self.job.clip_norm / (squares**0.5 + 1e-6)))
            for gradient in gradients:
                gradient.mul_(self._factor)
        if self.job.clip_value is not None:
            for gradient in gradients:
                gradient.clamp_(-self.job.clip_value, self.job.clip_value)

    def write_back(self, slots: list[int] | None = None) -> None:
        self.server.pull()
        super().write_back(slots)


@dataclass(slots=True)
class _Flight:
    """A batch that a worker is computing."""

    batch: Batch
    worker: Connected
    attempt: int
    began: float
    wait: Wait
    loss: float = float("nan")
    logs: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Gradients of the server's layers, and those that the worker has pushed."""


class AsynchronousUnit(PlacedUnit):
    """One member, whose batches are computed by workers that do not wait for each other."""

    def __init__(self, member: Member, server: Server) -> None:
        super().__init__(member, server)
        self._counts: dict[str, int] = {}
        """Batches of each worker so far."""

    def run(self, batches: int) -> None:
        """Run so many batches, in the order in which they are finished; it returns when all are."""
        member, server = self.member, self.server
        feed, flights = self._batches(batches), dict[int, _Flight]()
        to_repeat: list[Batch] = []
        left = batches
        with draws(member):
            while left:
                server.admit()
                self._send_batches(feed, to_repeat, flights)
                finished = self._wait(flights, to_repeat)
                if finished is None:
                    continue
                left -= 1
                member.batches += 1
                member.place += 1
                member.losses.append(finished.loss)
                if finished.logs or member.logs:
                    member.log(1, {name: [value] for name, value in finished.logs.items()})
                if finished.loss - finished.loss != 0.0:
                    member.losses += [float("nan")] * (left)
                    member.place += left
                    break
        self._stream.note_position(member)

    def _batches(self, count: int) -> Iterator[Batch]:
        member, size = self.member, self.job.batch_size
        assert member.order is not None
        feed, order, first = self._stream.at(member), member.order, member.place
        for position in range(first, first + count):
            yield Batch(next(feed), order[position * size : (position + 1) * size].cpu(), member.epoch, 1.0)

    def _send_batches(self, feed: Iterator[Batch], to_repeat: list[Batch], flights: dict[int, _Flight]) -> None:
        """Give a batch to every worker that has none and is not too far ahead."""
        server = self.server
        live, busy = server.workers.live, {flight.worker.name for flight in flights.values()}
        slowest = min((self._counts.setdefault(worker.name, self._slowest()) for worker in live), default=0)
        limit = server.built.roles.staleness
        for worker in live:
            ahead = self._counts[worker.name] - slowest
            if worker.name in busy or (limit is not None and ahead > limit):
                continue
            batch = to_repeat.pop() if to_repeat else next(feed, None)
            if batch is None:
                return
            server.begin_alone(worker, batch)
            began = time.monotonic()
            wait = Wait(began + server.workers.deadline.limit("step") + server.setup_seconds)
            flights[server.attempt] = _Flight(batch, worker, server.attempt, began, wait)

    def _slowest(self) -> int:
        return min(self._counts.values(), default=0)

    def _wait(self, flights: dict[int, _Flight], to_repeat: list[Batch]) -> _Flight | None:
        """Return the next finished batch, applied; None if a worker was lost."""
        while True:
            for flight in list(flights.values()):
                try:
                    finished = self._look(flight)
                except WorkerLost as error:
                    for lost in [other for other in flights.values() if other.worker is error.worker]:
                        to_repeat.append(flights.pop(lost.attempt).batch)
                    self.server.lose(error, time.monotonic() - flight.began)
                    return None
                if finished:
                    del flights[flight.attempt]
                    self.server.setup_seconds = 0.0
                    self.server.workers.deadline.observe("step", time.monotonic() - flight.began)
                    self._counts[flight.worker.name] += 1
                    return flight
            time.sleep(IDLE)

    def _look(self, flight: _Flight) -> bool:
        """Process what has arrived from one worker, and return whether its batch is done."""
        channel = flight.worker.channel
        try:
            arrived = channel.receive(0.0)
        except LinkLost:
            if channel.lost is not None or channel.quiet_for() > 1.0 or time.monotonic() > flight.wait.until:
                self.server.workers.check(flight.worker, flight.wait)
            return False
        if arrived.attempt != flight.attempt:
            return False
        if arrived.what == "raised":
            error = WorkerRaised(f"worker {flight.worker.name} raised {arrived.numbers.get('why')}")
            raise MemberError(0, error) from None
        if arrived.what == "cut":
            return self._cross(flight, arrived)
        if arrived.what == "pushed":
            flight.gradients |= arrived.tensors
        if arrived.what == "done":
            self._take(flight, arrived)
            return True
        return False

    def _cross(self, flight: _Flight, arrived: Arrived) -> bool:
        """Compute the server's layers for one worker's batch. A loss that is not finite ends the training here."""
        back, rows = self.server.back, torch.arange(len(flight.batch.rows))
        tensors = back.join([[arrived.tensors[str(i)] for i in range(len(back.batched))]])
        self._clear()
        computed = back.compute(tensors, flight.batch.content, JoinedDraws(len(rows)), rows, 1.0, None)
        flight.loss, flight.logs = computed.loss, computed.logs
        if computed.loss - computed.loss != 0.0:
            return True
        flight.gradients |= {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        gradients: dict[str, Any] = {str(i): g for i, g in enumerate(computed.gradients) if g is not None}
        flight.worker.channel.send("gradients", flight.attempt, gradients, chunk=0)
        return False

    def _take(self, flight: _Flight, end: Arrived) -> None:
        """Take a step with one worker's gradients, on the current parameters."""
        if "loss" in end.numbers:
            flight.loss, flight.logs = float(end.numbers["loss"]), dict(end.numbers["logs"])
            if flight.loss - flight.loss != 0.0:
                return
        self._clear()
        for name, parameter in self.model.named_parameters():
            parameter.grad = flight.gradients.get(name)
        self._clip()
        self.optimizer.step()
        self.server.committed_alone(flight.worker, flight.attempt)
        if self.schedule is not None and self.job.schedule_every == "step":
            self._rate = self._current_rate()
            self._advance_schedule()


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group that can be sent: numbers, flags and tuples of them."""
    plain: dict[str, Any] = {}
    for name, value in group.items():
        if isinstance(value, Tensor) and value.numel() == 1:
            plain[name] = float(value)
        elif isinstance(value, (bool, int, float)) or (
            isinstance(value, tuple) and all(isinstance(x, (int, float)) for x in value)
        ):
            plain[name] = value
    return plain
