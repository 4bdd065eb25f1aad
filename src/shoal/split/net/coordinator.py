"""Train parts on workers in other processes. The coordinator waits for no worker longer than the deadline."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from statistics import mean
from types import TracebackType
from typing import Any, Self

from shoal.errors import ShoalError, SplitError, describe
from shoal.jobs.job import Job
from shoal.net.deadline import Deadline
from shoal.net.handshake import difference
from shoal.net.joining import Admission
from shoal.net.link_speed import LinkSpeed, probe_link
from shoal.net.links import Address, Link, LinkLost, Traffic
from shoal.net.messages import END, OUTCOME, RAISED, text_message
from shoal.split.core.method import Method, Worker
from shoal.split.core.parts import Outcome, Task
from shoal.split.net._codec import OutcomeCodec, codec_named
from shoal.split.net._wire import read_outcome, to_message
from shoal.split.net.job_description import describe_job
from shoal.utils.tables import Log

END_SECONDS = 2.0
"""How long it may take to send a worker the end of the run."""


class WorkerRaised(ShoalError):
    """The job's own code raised on a worker."""


@dataclass(slots=True, eq=False)
class Connected:
    """A worker that has joined."""

    link: Link
    name: str
    """The worker's name, which stays the same when it rejoins."""
    shard: int | None
    number: int = -1
    rate: float = 0.0
    """Weights times steps per second, independent of the size of its part; 0 if unknown."""


@dataclass(slots=True)
class Lost:
    """A part that was not returned."""

    round: int
    worker: int
    why: str
    waited: float
    """The seconds since the beginning of the round."""
    allowed: float
    """The deadline in seconds."""


@dataclass(slots=True, eq=False)
class _Turn:
    """A task that a worker trains in this round."""

    task: Task
    worker: Connected
    limit: float
    outcome: Outcome | None = None
    error: ShoalError | None = None
    seconds: float = 0.0


def _connected(link: Link, request: Mapping[str, Any]) -> Connected:
    shard = request.get("shard")
    return Connected(link, str(request.get("name", "?")), shard if isinstance(shard, int) else None)


class Distributed:
    """Trains parts on processes of this or other machines, each with its own link.

    A worker that dies, stalls or is too late loses its part of that round, and the run waits no longer than the
    deadline. Workers may join at any time, and take part from the next round on.
    """

    tier = "distributed"

    def __init__(
        self,
        job: Job,
        method: Method,
        *,
        workers: int,
        address: Address | None = None,
        offer: Mapping[str, Any] | None = None,
        codec: str = "exact",
        deadline: float | None = None,
        start_seconds: float = 60.0,
        patience: float = 300.0,
        log: Log | None = None,
    ) -> None:
        """Listen for workers.

        Args:
            workers: How many workers the first round waits for.
            offer: Settings that workers read before they join.
            start_seconds: How long the first round waits for workers.
            patience: How long a run without any worker waits for one.
        """
        self.codec = codec_named(codec)
        self.deadline = Deadline(fixed=deadline)
        self.lost: list[Lost] = []
        self._plan = describe_job(job, method)
        self._outcomes = OutcomeCodec(method, self.codec)
        self._workers: list[Connected] = []
        self._ended_traffic = Traffic()
        self._admission = Admission(
            "coordinator", self._differs, _connected, expected=workers, address=address, offer=offer,
            start_seconds=start_seconds, patience=patience, log=log,
            advice=lambda address: f"start one with `shoal split FILE --join {address}`",
        )  # fmt: skip
        self.address, self._log = self._admission.address, self._admission.log

    # --- the workers ------------------------------------------------------------------------------------------------

    def workers_of_round(self, number: int) -> Sequence[Worker]:
        """Return the workers of this round. Waits for the first ones, and whenever there are none."""
        self._add_workers(self._admission.arrivals(needed=not self._workers))
        if not self._workers:
            raise SplitError(self._admission.why_no_worker())
        return [Worker(m.number, self._speed(m), m.shard) for m in self._workers]

    def _add_workers(self, arrived: Sequence[Connected]) -> None:
        """Add workers, and give each the smallest free number."""
        for worker in arrived:
            numbers = {m.number for m in self._workers}
            worker.number = next(n for n in range(len(numbers) + 1) if n not in numbers)
            self._workers.append(worker)
            self._workers.sort(key=lambda m: m.number)

    def _differs(self, request: Mapping[str, Any]) -> str | None:
        other = difference(self._plan, request.get("job") or {})
        if other is None and request.get("codec") not in (None, self.codec.name):
            other = f"codec is {request.get('codec')} there and {self.codec.name} here"
        return other

    def probe(self) -> LinkSpeed:
        """Measure the slowest link; call it between rounds, after `workers_of_round`."""
        speeds = []
        for worker in list(self._workers):
            try:
                speeds.append(probe_link(worker.link))
            except ShoalError as error:
                self._log(f"lost worker {worker.number} ({worker.name}) while its link was measured: {error}")
                self._drop(worker)
        if not speeds:
            raise SplitError("no worker is left to measure the link of; start them again")
        return min(speeds, key=lambda speed: speed.bits)

    # --- a round ----------------------------------------------------------------------------------------------------

    def run(self, tasks: Sequence[Task]) -> Sequence[Outcome | None]:
        """Send the tasks and return the outcomes that come back before the deadline, and None for the others."""
        turns = [
            _Turn(task, worker, self.deadline.limit(worker.name))
            for task, worker in zip(tasks, self._workers[: len(tasks)], strict=True)
        ]
        began = time.monotonic()
        threads = ThreadPoolExecutor(max(1, len(turns)))
        try:
            self._gather({threads.submit(self._exchange, turn, began): turn for turn in turns}, began)
        finally:
            threads.shutdown(wait=False)  # cutting a link ends its thread at once
        self._drop_lost(turns)
        return [turn.outcome for turn in turns]

    def _exchange(self, turn: _Turn, began: float) -> Outcome:
        """Do one worker's round, in its own thread."""
        link, task = turn.worker.link, turn.task
        until = began + max(turn.limit, self.deadline.first)  # cutting the link ends the wait earlier
        link.send(to_message(task, self.codec), until - time.monotonic())
        reply = link.receive(until - time.monotonic())
        if reply.header.kind == RAISED:
            raise WorkerRaised(reply.text)
        expected = (OUTCOME, task.round, task.part.number)
        if (reply.header.kind, reply.header.round, reply.header.number) != expected:
            raise LinkLost("its answer does not belong to the task that it got")
        return self._outcomes.received(task, read_outcome(reply))

    def _gather(self, running: dict[Future[Outcome], _Turn], began: float) -> None:
        """Wait for all workers and cut off those that are late; the times of those that finish limit the others."""
        finished: list[float] = []
        while running:
            for turn in running.values():
                turn.limit = self.deadline.limit(turn.worker.name, finished)
            first = min(turn.limit for turn in running.values())
            done, _ = wait(running, max(began + first - time.monotonic(), 0.0), FIRST_COMPLETED)
            now = time.monotonic() - began
            for future in done:
                turn = running.pop(future)
                turn.seconds, error = now, future.exception()
                if error is not None:
                    turn.error = error if isinstance(error, ShoalError) else LinkLost(describe(error))
                    continue
                turn.outcome = future.result()
                finished.append(now)
                self.deadline.observe(turn.worker.name, now)
                self._measure(turn)
            late = [] if done else [future for future, turn in running.items() if now >= turn.limit]
            for future in late:
                turn = running.pop(future)
                turn.worker.link.cut()
                turn.seconds, turn.error = now, LinkLost(f"it took more than {turn.limit:.1f} s")
                self.deadline.missed(turn.worker.name)

    def _drop_lost(self, turns: Sequence[_Turn]) -> None:
        """Drop the workers that were lost, or raise a SplitError if the job's own code failed."""
        raised = [turn for turn in turns if isinstance(turn.error, WorkerRaised)]
        if raised and len(raised) == len(turns):
            raise SplitError(f"worker {raised[0].worker.number} ({raised[0].worker.name}): {raised[0].error}")
        for turn in turns:
            if turn.error is None:
                continue
            self.lost.append(Lost(turn.task.round, turn.worker.number, str(turn.error), turn.seconds, turn.limit))
            self._drop(turn.worker)
            self._log(
                f"round {turn.task.round}: lost worker {turn.worker.number} ({turn.worker.name}): {turn.error}; "
                "its part keeps its last value"
            )

    def _drop(self, worker: Connected) -> None:
        self._ended_traffic += worker.link.traffic
        worker.link.close()
        self._workers.remove(worker)

    def _measure(self, turn: _Turn) -> None:
        """Update a worker's rate, in weights times steps per second."""
        outcome = turn.outcome
        if outcome is not None and outcome.seconds > 0:
            weights = sum(t.numel() for t in turn.task.tensors.values())
            rate = weights * turn.task.part.steps / outcome.seconds
            turn.worker.rate = 0.5 * (turn.worker.rate or rate) + 0.5 * rate

    def _speed(self, worker: Connected) -> float:
        """Return the worker's speed relative to the others, or 1 until all are known."""
        rates = [m.rate for m in self._workers]
        return round(worker.rate / mean(rates), 2) if all(rates) else 1.0

    # --- what it cost, and the end ----------------------------------------------------------------------------------

    @property
    def traffic(self) -> Traffic:
        """The bytes at the sockets of all links so far, as counted here."""
        return sum((worker.link.traffic for worker in self._workers), self._ended_traffic)

    @property
    def moved(self) -> int:
        """The bytes of both directions together."""
        return self.traffic.both

    def forget_traffic(self) -> None:
        """Restart the count of bytes, since earlier traffic was not training."""
        self._ended_traffic = Traffic()
        for worker in self._workers:
            worker.link.forget_traffic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close("" if error is None else f"the coordinator ended: {describe(error)}")

    def close(self, why: str = "") -> None:
        """End the run for the workers; `why` is the error, if there was one."""
        self._add_workers(self._admission.close())
        informed = []
        for worker in self._workers:
            with suppress(LinkLost):
                worker.link.send(text_message(END, why), END_SECONDS)
                informed.append(worker)
        until = time.monotonic() + END_SECONDS
        for worker in informed:
            with suppress(ShoalError):
                worker.link.receive(until - time.monotonic())  # fails when the worker has closed the link
        for worker in list(self._workers):
            self._drop(worker)
