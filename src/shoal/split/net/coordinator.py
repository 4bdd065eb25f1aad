"""The coordinator's side: a crew of workers elsewhere. Nobody is waited for longer than the deadline."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import mean
from types import TracebackType
from typing import Any, Self

from shoal.errors import ShoalError, SplitError, describe
from shoal.jobs.job import Job
from shoal.split.core.method import Method, Worker
from shoal.split.core.parts import Outcome, Task
from shoal.split.net._blocks import Blocks
from shoal.split.net._codec import codec_named
from shoal.split.net._deadline import Deadline
from shoal.split.net._handshake import describe_job, difference
from shoal.split.net._probe import LinkSpeed, probe_link
from shoal.split.net._sockets import Traffic
from shoal.split.net._wire import END, OUTCOME, RAISED, Message, Wire, text_message
from shoal.split.net.links import Address, Link, LinkLost, Listener

END_SECONDS = 2.0
"""For a worker to hear that it is over."""
Tell = Callable[[str], None]


class WorkerRaised(ShoalError):
    """The job's own code raised on a worker."""


@dataclass(slots=True, eq=False)
class Member:
    """A worker that is there."""

    link: Link
    wire: Wire
    name: str
    """Its own, also after it was away."""
    shard: int | None
    number: int = -1
    rate: float = 0.0
    """Weights times steps in a second, whatever the size of its part; 0: not known yet."""


@dataclass(slots=True)
class Lost:
    """A part that did not come back."""

    round: int
    worker: int
    why: str
    waited: float
    """Seconds from the beginning of the round."""
    allowed: float
    """What the deadline was."""


@dataclass(slots=True, eq=False)
class _Turn:
    """A task on its way."""

    task: Task
    member: Member
    limit: float
    outcome: Outcome | None = None
    error: ShoalError | None = None
    seconds: float = 0.0

    @property
    def over(self) -> bool:
        return self.outcome is not None or self.error is not None


_Came = tuple[_Turn, Outcome | ShoalError, float]
"""What a turn's thread has to say: whose it is, what came of it, and after how many seconds."""


@dataclass(slots=True)
class _Lobby:
    """Who has come in and waits for the next round; shared with the thread at the door."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    waiting: list[Member] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    came: int = 0


class Distributed:
    """A crew of processes on this or other machines, each at the other end of its own link.

    A worker that dies, stalls or is too late loses its part of that round, and nobody waits for it longer than the
    deadline. Workers may come at any time: they are in the next round's roll.
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
        speeds: bool = False,
        tell: Tell | None = None,
    ) -> None:
        """`workers`: how many the first round waits for, `start_seconds` at most. `patience`: how long a run without
        any worker waits for one. `speeds`: measure them, so that shares can
        follow. `offer`: settings that workers read before they ask."""
        if workers < 1:
            raise SplitError(f"workers is {workers!r}; use a whole number, 1 or more")
        self.codec = codec_named(codec)
        self.deadline = Deadline(fixed=deadline)
        self.lost: list[Lost] = []
        self._job, self._method, self._expected = job, method, workers
        self._start_seconds, self._patience, self._speeds = start_seconds, patience, speeds
        self._tell = tell if tell is not None else lambda line: None
        self._plan = describe_job(job, method)
        self._blocks = Blocks(job, method, self.codec)
        self._members: list[Member] = []
        self._gone = Traffic()
        self._started = False
        self._hall = _Lobby()
        self._door = Listener(address if address is not None else Address("127.0.0.1", 0), offer)
        self.address = self._door.address
        self._porter = threading.Thread(target=self._receive, name="shoal-door", daemon=True)
        self._porter.start()

    # --- who is there -----------------------------------------------------------------------------------------------

    def roll(self, number: int) -> Sequence[Worker]:
        """Who is there for this round; waits for the first ones, and where there is nobody."""
        if not self._started:
            self._wait_for(self._expected, self._start_seconds)
            self._started = True
        self._take_in()
        if not self._members and self._hall.came:
            self._tell(f"no worker is left; waiting {self._patience:g} s for one to join at {self.address}")
            with self._hall.changed:
                self._hall.changed.wait_for(lambda: self._hall.waiting, timeout=self._patience)
            self._take_in()
        if not self._members:
            raise SplitError(self._nobody())
        return [Worker(m.number, self._speed(m), m.shard) for m in self._members]

    def _wait_for(self, count: int, seconds: float) -> None:
        """Until so many have come or been refused since the beginning, and one of them could stay."""
        lobby = self._hall
        with lobby.changed:
            lobby.changed.wait_for(lambda: lobby.came and lobby.came + len(lobby.refused) >= count, timeout=seconds)
            if lobby.came and lobby.came < count and not self._started:
                self._tell(
                    f"{lobby.came} of {count} workers are there after {seconds:g} s; beginning without the others"
                )

    def _take_in(self) -> None:
        with self._hall.changed:
            arrived, self._hall.waiting = self._hall.waiting, []
        for member in arrived:
            taken = {m.number for m in self._members}
            member.number = next(n for n in range(len(taken) + 1) if n not in taken)
            self._members.append(member)
            self._members.sort(key=lambda m: m.number)

    def _nobody(self) -> str:
        if self._hall.refused and not self._hall.came:
            return f"no worker could join in {self._start_seconds:g} s: {self._hall.refused[-1]}"
        seconds = self._patience if self._hall.came else self._start_seconds
        join = f"shoal split FILE --join {self.address}"
        return f"no worker came to {self.address} in {seconds:g} s; start one with `{join}`"

    def _receive(self) -> None:
        """The thread at the door: asks every newcomer what it means to train, and pairs with it."""
        while (ask := self._door.next()) is not None:
            try:
                self._greet(ask)
            except Exception as error:
                self._tell(f"a worker from {ask.get('name', '?')} could not join ({describe(error)})")

    def _greet(self, ask: dict[str, Any]) -> None:
        name = str(ask.get("name", "?"))
        other = difference(self._plan, ask.get("job") or {})
        if other is not None or ask.get("codec") not in (None, self.codec.name):
            other = other or f"codec is {ask.get('codec')} there and {self.codec.name} here"
            line = (
                f"worker {name} has another job than the coordinator: {other}; start both with the same file and code"
            )
            self._door.refuse(ask, line)
            self._tell(line)
            with self._hall.changed:
                self._hall.refused.append(line)
                self._hall.changed.notify_all()
            return
        shard = ask.get("shard")
        member = Member(self._door.admit(ask), Wire(self.codec), name, shard if isinstance(shard, int) else None)
        with self._hall.changed:
            self._hall.waiting.append(member)
            self._hall.came += 1
            self._hall.changed.notify_all()

    def probe(self) -> LinkSpeed:
        """How fast the slowest link is, measured; between rounds, after a roll."""
        found = []
        for member in list(self._members):
            try:
                found.append(probe_link(member.link))
            except ShoalError as error:
                self._tell(f"lost worker {member.number} ({member.name}) while its link was measured: {error}")
                self._let_go(member)
        if not found:
            raise SplitError("no worker is left to measure the link of; start them again")
        return min(found, key=lambda speed: speed.bits)

    # --- a round ----------------------------------------------------------------------------------------------------

    def run(self, tasks: Sequence[Task]) -> Sequence[Outcome | None]:
        """Send the tasks out and gather what comes back before the deadline; None for what does not."""
        turns = [
            _Turn(task, member, self.deadline.limit(member.name))
            for task, member in zip(tasks, self._members[: len(tasks)], strict=True)
        ]
        came: queue.Queue[_Came] = queue.Queue()
        began = time.monotonic()
        for turn in turns:
            threading.Thread(target=self._exchange, args=(turn, began, came), daemon=True).start()
        self._gather(turns, came, began)
        self._judge(turns)
        return [turn.outcome for turn in turns]

    def _exchange(self, turn: _Turn, began: float, came: queue.Queue[_Came]) -> None:
        """One worker's round, in a thread of its own."""
        member, task = turn.member, turn.task
        until = began + max(turn.limit, self.deadline.first)  # shortened by cutting the link
        found: Outcome | ShoalError
        try:
            member.link.send(member.wire.task(task), until - time.monotonic())
            found = self._read(member.link.receive(until - time.monotonic()), member, task)
        except ShoalError as error:
            found = error
        except Exception as error:
            found = LinkLost(describe(error))
        came.put((turn, found, time.monotonic() - began))

    def _read(self, reply: Message, member: Member, task: Task) -> Outcome:
        if reply.header.kind == RAISED:
            raise WorkerRaised(reply.text)
        expected = (OUTCOME, task.round, task.part.number)
        if (reply.header.kind, reply.header.round, reply.header.number) != expected:
            raise LinkLost("it answered something else than what it was asked")
        outcome = member.wire.read_outcome(reply, self._blocks.outcome_shapes(task.part))
        return self._blocks.received(task, outcome)

    def _gather(self, turns: Sequence[_Turn], came: queue.Queue[_Came], began: float) -> None:
        """Wait for all, and cut off those whose time is up; the time of those who finish limits the others."""
        finished: list[float] = []
        while running := [turn for turn in turns if not turn.over]:
            for turn in running:
                turn.limit = self.deadline.limit(turn.member.name, finished)
            first = min(turn.limit for turn in running)
            try:
                turn, found, seconds = came.get(timeout=max(began + first - time.monotonic(), 0.0))
            except queue.Empty:
                self._cut_off(running, time.monotonic() - began)
                continue
            if turn.over:  # it was cut off
                continue
            turn.seconds = seconds
            if isinstance(found, ShoalError):
                turn.error = found
                continue
            turn.outcome = found
            finished.append(seconds)
            self.deadline.observe(turn.member.name, seconds)
            self._measure(turn)

    def _cut_off(self, running: Sequence[_Turn], now: float) -> None:
        """End the turns whose time is up; their threads end at once."""
        for turn in running:
            if now >= turn.limit:
                turn.member.link.cut()
                turn.seconds, turn.error = now, LinkLost(f"it took more than {turn.limit:.1f} s")
                self.deadline.missed(turn.member.name)

    def _judge(self, turns: Sequence[_Turn]) -> None:
        """Let go of those who were lost; SplitError where the job's own code is what failed."""
        raised = [turn for turn in turns if isinstance(turn.error, WorkerRaised)]
        if raised and len(raised) == len(turns):
            raise SplitError(f"worker {raised[0].member.number} ({raised[0].member.name}): {raised[0].error}")
        for turn in turns:
            if turn.error is None:
                continue
            self.lost.append(Lost(turn.task.round, turn.member.number, str(turn.error), turn.seconds, turn.limit))
            self._let_go(turn.member)
            self._tell(
                f"round {turn.task.round}: lost worker {turn.member.number} ({turn.member.name}): {turn.error}; "
                "its part keeps its last value"
            )

    def _let_go(self, member: Member) -> None:
        self._gone += member.link.traffic
        member.link.close()
        self._members.remove(member)

    def _measure(self, turn: _Turn) -> None:
        """Weights times steps in a second: what a worker does, whatever the size of its part."""
        outcome = turn.outcome
        if outcome is not None and outcome.seconds > 0:
            weights = sum(t.numel() for t in turn.task.tensors.values())
            rate = weights * turn.task.part.steps / outcome.seconds
            turn.member.rate = 0.5 * (turn.member.rate or rate) + 0.5 * rate

    def _speed(self, member: Member) -> float:
        """Relative to the others; 1 until all of them are known, and where speeds are not asked for."""
        rates = [m.rate for m in self._members]
        return round(member.rate / mean(rates), 2) if self._speeds and all(rates) else 1.0

    # --- what it cost, and the end ----------------------------------------------------------------------------------

    @property
    def traffic(self) -> Traffic:
        """Bytes at the sockets of all links so far, as the kernel counts them here."""
        return sum((member.link.traffic for member in self._members), self._gone)

    @property
    def moved(self) -> int:
        """Both ways together."""
        return self.traffic.both

    def forget_traffic(self) -> None:
        """Count from here on: what went before was not training."""
        self._gone = Traffic() - sum((member.link.traffic for member in self._members), Traffic())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close("" if error is None else f"the coordinator ended: {describe(error)}")

    def close(self, why: str = "") -> None:
        """Tell the workers that it is over, and why if it did not end well."""
        self._door.close()
        self._porter.join()
        self._take_in()
        told = []
        for member in self._members:
            with suppress(LinkLost):
                member.link.send(text_message(END, why), END_SECONDS)
                told.append(member)
        until = time.monotonic() + END_SECONDS
        for member in told:
            with suppress(ShoalError):
                member.link.receive(until - time.monotonic())  # it hangs up: then it has heard
        for member in list(self._members):
            self._let_go(member)
        self._door.end()
