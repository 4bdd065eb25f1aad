"""The workers that a server has: who joins, who answers, who is lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from shoal.errors import PlaceError, ShoalError
from shoal.place.links import Link as LinkRates
from shoal.place.training.channel import Arrived, Channel
from shoal.split.core.report import Traffic
from shoal.split.net.deadline import Deadline
from shoal.split.net.handshake import difference
from shoal.split.net.joining import Admission, Tell
from shoal.split.net.links import PROBE_SECONDS, Address, Link, LinkLost, measure_speed
from shoal.split.net.messages import END, probe_message, text_message

QUIET_SECONDS = 5.0
"""A worker whose link carried nothing for so long is asked whether it is there."""
PING_SECONDS = 3.0
"""For a process that computes to say that it is."""
MOST_EXTENSIONS = 4
"""How often a deadline is doubled for workers that answer."""
END_SECONDS = 2.0


class WorkerLost(ShoalError):
    """A worker is gone: the step is computed again by the others."""

    def __init__(self, worker: Connected, why: str) -> None:
        self.worker = worker
        super().__init__(why)


@dataclass(slots=True, eq=False)
class Connected:
    """A worker that has joined."""

    channel: Channel
    name: str
    share: float = 1.0
    fresh: bool = True
    """Whether it has to be given the whole state."""
    owed: bool = False
    """Whether it has not been sent the last update yet."""
    news: dict[str, Any] = field(default_factory=dict)
    """Of an asynchronous update with its own gradients, where it has not been sent yet."""
    group_bytes: int = 0
    """What it has sent to other workers."""


@dataclass(slots=True)
class Lost:
    """A worker that was lost, and how long that took to notice."""

    step: int
    name: str
    why: str
    waited: float


def _connected(link: Link, request: Mapping[str, Any]) -> Connected:
    return Connected(Channel(link), str(request.get("name", "?")))


class Workers:
    """All workers of a run. No wait for one is longer than the deadline."""

    def __init__(
        self,
        plan: Mapping[str, Any],
        *,
        expected: int,
        address: Address | None = None,
        deadline: float | None = None,
        start_seconds: float = 60.0,
        patience: float = 60.0,
        offer: Mapping[str, Any] | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        """`plan`: what a worker must agree with. `expected`: how many the first step waits for, `start_seconds` at
        most. `patience`: how long a run without any worker waits for one. `offer`: what workers may read before they
        join."""
        self.live: list[Connected] = []
        self.lost: list[Lost] = []
        self.deadline = Deadline(fixed=deadline, first=300.0)
        self._gone, self._gone_group = Traffic(), 0
        self.ending = ""
        """What workers are sent at the end, where it is no error."""
        self._admission = Admission(
            "server", lambda request: difference(dict(plan), request.get("job") or {}), _connected, expected=expected,
            address=address, offer=offer, start_seconds=start_seconds, patience=patience, tell=tell,
            advice=lambda address: "start the workers, then run this again to resume",
        )  # fmt: skip
        self.address = self._admission.address

    # --- who is there -------------------------------------------------------------------------------------------------

    @property
    def tell(self) -> Tell:
        """Takes a line about something that happened."""
        return self._admission.tell

    @tell.setter
    def tell(self, tell: Tell) -> None:
        self._admission.tell = tell

    def check(self) -> None:
        """WorkerLost where a link has ended."""
        for worker in self.live:
            if worker.channel.lost is not None:
                raise WorkerLost(worker, str(worker.channel.lost))

    def gather(self) -> None:
        """Take in those that have joined, and wait where there is none.

        PlaceError where nobody comes.
        """
        self.live += self._admission.arrivals(needed=not self.live)
        if not self.live:
            raise PlaceError(self._admission.nobody())

    def drop(self, error: WorkerLost, step: int, waited: float) -> None:
        """Continue without a worker."""
        worker = error.worker
        if worker not in self.live:
            return
        self.live.remove(worker)
        self._gone += worker.channel.link.traffic
        self._gone_group += worker.group_bytes
        self.lost.append(Lost(step, worker.name, str(error), waited))
        left = f"{len(self.live)} workers are left" if len(self.live) != 1 else "1 worker is left"
        self.tell(
            f"step {step}: lost worker {worker.name} after {waited:.1f} s ({error}); {left}, the step is repeated"
        )
        worker.channel.close()

    def drop_dead(self, step: int) -> None:
        """Continue without all whose links have ended."""
        for worker in list(self.live):
            if worker.channel.lost is not None:
                self.drop(WorkerLost(worker, str(worker.channel.lost)), step, 0.0)

    # --- waiting for one ----------------------------------------------------------------------------------------------

    def expect(self, worker: Connected, attempt: int, kinds: Sequence[str], until: float) -> Arrived:
        """The next message of these kinds that belongs to an attempt; WorkerLost where it does not come.

        Workers whose links are quiet are asked whether they are there; one that does not answer is lost, whoever is
        waited for. One that answers may take longer than the deadline, though not for ever.
        """
        extensions = 0
        while True:
            try:
                arrived = worker.channel.receive(min(QUIET_SECONDS / 5, max(until - time.monotonic(), 0.01)))
            except LinkLost as error:
                if worker.channel.lost is not None:
                    raise WorkerLost(worker, str(worker.channel.lost)) from error
                self.check_quiet()
                if time.monotonic() > until:
                    if extensions == MOST_EXTENSIONS:
                        raise WorkerLost(worker, "it answers, but does not finish") from error
                    extensions += 1
                    until = time.monotonic() + 2.0**extensions * PING_SECONDS
                continue
            except ShoalError as error:
                raise WorkerLost(worker, str(error)) from error
            if arrived.attempt != attempt:
                continue  # of an attempt that was given up
            if arrived.what == "broken":
                raise GroupBroken(str(arrived.numbers.get("why")))
            if arrived.what == "raised":
                raise WorkerRaised(f"worker {worker.name} raised {arrived.numbers.get('why')}")
            if arrived.what in kinds:
                return arrived

    def check_quiet(self) -> None:
        """Ask workers that have been quiet whether they are there; WorkerLost for the first one that is not."""
        quiet = [worker for worker in self.live if worker.channel.quiet_for() > QUIET_SECONDS]
        for worker in quiet:
            if worker.channel.lost is not None:
                raise WorkerLost(worker, str(worker.channel.lost))
            worker.channel.send_message(probe_message(0))
        until = time.monotonic() + PING_SECONDS
        for worker in quiet:
            if (
                not worker.channel.answered_probe(until - time.monotonic())
                and worker.channel.quiet_for() > PING_SECONDS
            ):
                raise WorkerLost(worker, f"it did not answer for {worker.channel.quiet_for():.0f} s")

    # --- what it cost, and the end ------------------------------------------------------------------------------------

    @property
    def traffic(self) -> Traffic:
        """Bytes at the sockets of all links with workers so far, as they are counted here."""
        return sum((worker.channel.link.traffic for worker in self.live), self._gone)

    @property
    def group_bytes(self) -> int:
        """Bytes that workers have sent to each other."""
        return sum(worker.group_bytes for worker in self.live) + self._gone_group

    def probe(self) -> LinkRates:
        """How fast the slowest link is, measured; between two steps."""
        rates = [_probe(worker) for worker in self.live]
        return min(rates, key=lambda rate: rate.up)

    def close(self, why: str = "") -> None:
        """End the run for the workers; `why`: the error, if there was one."""
        self.live += self._admission.close()
        for worker in self.live:
            worker.channel.send_message(text_message(END, why))
        until = time.monotonic() + END_SECONDS
        for worker in self.live:
            with suppress(ShoalError):
                worker.channel.flush(until - time.monotonic())
                while True:
                    worker.channel.receive(until - time.monotonic())  # it closes the link: then it knows
        for worker in self.live:
            self._gone += worker.channel.link.traffic
            self._gone_group += worker.group_bytes
            worker.channel.close()
        self.live = []


class GroupBroken(ShoalError):
    """A transfer among workers failed: they have to make another group."""


class WorkerRaised(ShoalError):
    """The job's own code raised on a worker."""


def _probe(worker: Connected) -> LinkRates:
    """How fast a worker's link is, by messages that come back."""

    def send(size: int) -> None:
        worker.channel.send_message(probe_message(size))
        if not worker.channel.answered_probe(PROBE_SECONDS):
            raise WorkerLost(worker, f"it does not answer a probe for {PROBE_SECONDS:g} s")

    return LinkRates.parse(measure_speed(send))
