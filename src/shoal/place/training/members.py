"""The workers of a server: those that join, answer, or are lost."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from shoal.errors import PlaceError, ShoalError
from shoal.net.channel import Arrived, Channel
from shoal.net.deadline import Deadline
from shoal.net.handshake import difference
from shoal.net.joining import Admission
from shoal.net.link_speed import PROBE_SECONDS, measure_speed
from shoal.net.links import Address, Link, LinkLost, Traffic
from shoal.net.messages import END, text_message
from shoal.place.links import Link as LinkRates
from shoal.utils.tables import Log, duration

QUIET_SECONDS = 5.0
"""A worker whose link was idle for so many seconds is asked whether it is alive."""
PING_SECONDS = 3.0
"""How many seconds a process may take to answer while it computes."""
MOST_EXTENSIONS = 4
"""How often a deadline is extended for workers that answer."""
SLOW_BYTES, SLOW_SECONDS, SLOW_TIMES = 1 << 16, 0.5, 10
"""A link is too slow if a round trip of `SLOW_BYTES` takes more than `SLOW_SECONDS`, and more than `SLOW_TIMES` times
the usual time."""
END_SECONDS = 2.0


class WorkerLost(ShoalError):
    """Raised if a worker is lost: the others compute the step again."""

    def __init__(self, worker: Connected, why: str, *, may_return: bool = False) -> None:
        """`may_return`: the worker may take part again when its link is faster."""
        self.worker, self.may_return = worker, may_return
        super().__init__(why)


@dataclass(slots=True, eq=False)
class Connected:
    """A worker that has joined."""

    channel: Channel
    name: str
    gpu: str = ""
    """Which GPU it has, see `gpu_of`; empty: none."""
    share: float = 1.0
    needs_state: bool = True
    """Whether the server must send it the whole state."""
    needs_update: bool = False
    """Whether the server must still send it the last update."""
    own_update: dict[str, Any] = field(default_factory=dict)
    """The numbers of an asynchronous update with its own gradients that the server must still send it."""
    group_bytes: int = 0
    """Bytes that it has sent to other workers."""


@dataclass(slots=True)
class Lost:
    """A worker that was lost, and how long it took to notice."""

    step: int
    name: str
    why: str
    waited: float


@dataclass(slots=True)
class Wait:
    """How long a step may take. It is extended a few times while workers answer."""

    until: float
    extensions: int = 0


def _connected(link: Link, request: Mapping[str, Any]) -> Connected:
    return Connected(Channel(link), str(request.get("name", "?")), str(request.get("gpu", "")))


class Workers:
    """All workers of a run. Nothing waits for a worker longer than the deadline."""

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
        log: Log | None = None,
    ) -> None:
        """Start to admit workers.

        Args:
            plan: What a worker must agree with.
            expected: How many workers the first step waits for, `start_seconds` at most.
            patience: How long a run without any worker waits for one.
            offer: What workers may read before they join.
        """
        self.live: list[Connected] = []
        self.paused: list[Connected] = []
        """Workers whose links were too slow and may be faster again."""
        self.lost: list[Lost] = []
        self.deadline = Deadline(fixed=deadline, first=300.0)
        self.state_deadline = Deadline(fixed=deadline, first=300.0)
        """The deadline for a worker's whole state, which may be far more than what a step sends."""
        self._ended_traffic, self._ended_group_bytes = Traffic(), 0
        self.ending = ""
        """What workers are sent at the end if there is no error."""
        self._admission = Admission(
            "server", lambda request: difference(dict(plan), request.get("job") or {}), _connected, expected=expected,
            address=address, offer=offer, start_seconds=start_seconds, patience=patience, log=log,
            advice=lambda address: "start the workers, then run this again to resume",
        )  # fmt: skip
        self.address = self._admission.address

    # --- connected workers --------------------------------------------------------------------------------------------

    @property
    def log(self) -> Log:
        """Called with a line about each event."""
        return self._admission.log

    @log.setter
    def log(self, log: Log) -> None:
        self._admission.log = log

    def check_links(self) -> None:
        """Raise WorkerLost if a link has ended."""
        for worker in self.live:
            if worker.channel.lost is not None:
                raise WorkerLost(worker, str(worker.channel.lost))

    def gather(self) -> None:
        """Add workers that have joined. If there are none, use those with slow links, or wait for one.

        Raises a PlaceError if no worker comes.
        """
        if not self.live:
            self._take_back(self.paused)
        self.live += self._admission.arrivals(needed=not self.live)
        if not self.live:
            raise PlaceError(self._admission.why_no_worker())

    def drop(self, error: WorkerLost, step: int, waited: float) -> None:
        """Continue without a worker."""
        worker = error.worker
        if worker not in self.live:
            return
        self.live.remove(worker)
        self.lost.append(Lost(step, worker.name, str(error), waited))
        left = f"{len(self.live)} workers are left" if len(self.live) != 1 else "1 worker is left"
        self.log(f"step {step}: lost worker {worker.name} after {waited:.1f} s ({error}); {left}, the step is repeated")
        if error.may_return:
            self.paused.append(worker)
        else:
            self._end(worker)

    def _end(self, worker: Connected) -> None:
        self._ended_traffic += worker.channel.link.traffic
        self._ended_group_bytes += worker.group_bytes
        worker.channel.close()

    def _take_back(self, workers: Sequence[Connected]) -> None:
        """Let workers whose links were too slow take part again, from the server's state."""
        for worker in list(workers):
            self.paused.remove(worker)
            worker.needs_state, worker.needs_update, worker.own_update = True, False, {}
            self.live.append(worker)
            self.log(f"worker {worker.name} takes part again")

    def drop_dead(self, step: int) -> None:
        """Continue without all workers whose links have ended."""
        for worker in list(self.live):
            if worker.channel.lost is not None:
                self.drop(WorkerLost(worker, str(worker.channel.lost)), step, 0.0)

    # --- waiting for one ----------------------------------------------------------------------------------------------

    def expect(self, worker: Connected, attempt: int, kinds: Sequence[str], wait: Wait) -> Arrived:
        """Return a worker's next message of these kinds that belongs to this attempt. Raises WorkerLost if none
        arrives."""
        while True:
            try:
                arrived = worker.channel.receive(min(QUIET_SECONDS / 5, max(wait.until - time.monotonic(), 0.01)))
            except LinkLost:
                self.check(worker, wait)
                continue
            except ShoalError as error:
                raise WorkerLost(worker, str(error)) from error
            if arrived.attempt != attempt:
                continue  # it belongs to an abandoned attempt
            if arrived.what == "broken":
                raise GroupBroken(str(arrived.numbers.get("why")))
            if arrived.what == "raised":
                raise WorkerRaised(f"worker {worker.name} raised {arrived.numbers.get('why')}")
            if arrived.what in kinds:
                return arrived

    def check(self, worker: Connected, wait: Wait) -> None:
        """Raise WorkerLost if this worker, from which nothing has arrived yet, or another one is gone or too slow.

        Workers with idle links are asked whether they are alive; one that does not answer is lost. One that answers may
        exceed the deadline, but only a few times.
        """
        self.check_links()
        self._check_quiet()
        if time.monotonic() < wait.until:
            return
        self.check_slow()
        if wait.extensions == MOST_EXTENSIONS:
            self.deadline.missed("step")
            raise WorkerLost(worker, "it answers, but does not finish")
        wait.extensions += 1
        wait.until = time.monotonic() + 2.0**wait.extensions * PING_SECONDS

    def _check_quiet(self) -> None:
        """Ask workers with idle links whether they are alive. Raises WorkerLost for the first one that is not."""
        quiet = [worker for worker in self.live if worker.channel.quiet_for() > QUIET_SECONDS]
        for worker, seconds in _ask(quiet, 0):
            if seconds is None and worker.channel.quiet_for() > PING_SECONDS:
                raise WorkerLost(worker, f"it did not answer for {worker.channel.quiet_for():.0f} s")

    def check_slow(self) -> None:
        """Raise WorkerLost if one worker's link is far slower than those of the others."""
        seconds_of = {
            worker: math.inf if seconds is None else seconds for worker, seconds in _ask(self.live, SLOW_BYTES)
        }
        if len(seconds_of) < 2:
            return
        slowest = max(seconds_of, key=lambda worker: seconds_of[worker])
        usual = median(seconds for worker, seconds in seconds_of.items() if worker is not slowest)
        if seconds_of[slowest] > max(SLOW_SECONDS, SLOW_TIMES * usual):
            why = f"its link is too slow: {SLOW_BYTES:,} bytes there and back take {_seconds(seconds_of[slowest])}"
            raise WorkerLost(slowest, f"{why}, with others {_seconds(usual)}", may_return=True)

    def check_paused(self) -> None:
        """Take back workers whose links are fast enough again."""
        for worker in [worker for worker in self.paused if worker.channel.lost is not None]:
            self.paused.remove(worker)
            self._end(worker)
        answers = _ask(self.paused, SLOW_BYTES)
        self._take_back([worker for worker, seconds in answers if seconds is not None and seconds <= SLOW_SECONDS])

    # --- what it cost, and the end ------------------------------------------------------------------------------------

    @property
    def traffic(self) -> Traffic:
        """Bytes at the sockets of all links with workers so far, counted here."""
        return sum((worker.channel.link.traffic for worker in (*self.live, *self.paused)), self._ended_traffic)

    @property
    def group_bytes(self) -> int:
        """Bytes that workers have sent to each other."""
        return sum(worker.group_bytes for worker in (*self.live, *self.paused)) + self._ended_group_bytes

    def probe(self) -> LinkRates:
        """Measure the speed of the slowest link; only between two steps."""
        rates = [_probe(worker) for worker in self.live]
        return min(rates, key=lambda rate: rate.up)

    def close(self, why: str = "") -> None:
        """End the run for the workers. `why` is the error, if there was one."""
        self.live += [*self.paused, *self._admission.close()]
        self.paused = []
        for worker in self.live:
            worker.channel.send_message(text_message(END, why))
        until = time.monotonic() + END_SECONDS
        for worker in self.live:
            with suppress(ShoalError):
                worker.channel.flush(until - time.monotonic())
                while True:
                    # until the worker closes the link, which confirms the end
                    worker.channel.receive(until - time.monotonic())
        for worker in self.live:
            self._end(worker)
        self.live = []


class GroupBroken(ShoalError):
    """Raised if a transfer among workers failed, so that they must form another group."""


class WorkerRaised(ShoalError):
    """Raised if the job's own code raised on a worker."""


def _probe(worker: Connected) -> LinkRates:
    """Measure the speed of a worker's link with messages that it sends back."""

    def send(size: int) -> None:
        if not worker.channel.probe(size) or worker.channel.answered_probe(PROBE_SECONDS) is None:
            raise WorkerLost(worker, f"it does not answer a probe for {PROBE_SECONDS:g} s")

    return LinkRates.parse(measure_speed(send))


def _ask(workers: Sequence[Connected], size: int) -> list[tuple[Connected, float | None]]:
    """Send so many bytes to workers, which send them back, and return the seconds; None: more than PING_SECONDS.

    A worker that still owes an earlier answer is not asked again, since its link is busy.
    """
    began = time.monotonic()
    probed = [worker for worker in workers if worker.channel.probe(size)]
    answered_at = {
        id(worker): worker.channel.answered_probe(began + PING_SECONDS - time.monotonic()) for worker in probed
    }
    return [(worker, None if (at := answered_at.get(id(worker))) is None else at - began) for worker in workers]


def _seconds(seconds: float) -> str:
    return f"more than {PING_SECONDS:g} s" if seconds == math.inf else duration(seconds)
