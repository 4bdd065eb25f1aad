"""A link whose messages are sent and received by separate threads, so that traffic and compute overlap."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from shoal.errors import ShoalError
from shoal.net.links import Link, LinkLost
from shoal.net.messages import END, PROBE, TENSORS, Message, probe_message, read_tensors, tensor_message

DAY = 86400.0
"""The limit for a message to arrive or to be sent. Those who wait for it have shorter limits, and cut the link."""

URGENT = ("setup", "group", "end")
"""Messages that cancel everything that was asked for before."""


@dataclass(slots=True)
class Arrived:
    """A received message: what it is about, and its tensors."""

    what: str
    attempt: int
    """The step's attempt that it belongs to; messages of earlier attempts are out of date."""
    numbers: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)


class Channel:
    """One side of a link between server and worker.

    Pings are answered by the receiving thread, so that a process that computes is not considered dead.
    """

    def __init__(self, link: Link, *, echo: bool = False) -> None:
        """Start the threads. `echo`: send probes back, as a worker does."""
        self.link, self._echo = link, echo
        self._out: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._in: queue.SimpleQueue[Arrived | ShoalError] = queue.SimpleQueue()
        self._probes: queue.SimpleQueue[float] = queue.SimpleQueue()
        """When each probe came back."""
        self._back: list[Arrived] = []
        self._urgent_in = self._urgent_out = 0
        self.lost: ShoalError | None = None
        self._seen = (time.monotonic(), 0)
        self._asked = self._unanswered = 0
        self._threads = [
            threading.Thread(target=target, name=f"shoal-{target.__name__}", daemon=True)
            for target in (self._send_all, self._receive_all)
        ]
        for thread in self._threads:
            thread.start()

    # --- sending ------------------------------------------------------------------------------------------------------

    def send(self, what: str, attempt: int = 0, tensors: Mapping[str, Tensor] | None = None, /, **numbers: Any) -> None:
        """Queue a message to be sent, and return at once. The tensors are copied."""
        self._out.put(tensor_message({"what": what, **numbers}, tensors or {}, round=attempt))

    def send_message(self, message: Message) -> None:
        """Queue a message of another kind."""
        self._out.put(message)

    def probe(self, num_bytes: int) -> bool:
        """Queue so many bytes that the other side sends back; returns False if earlier ones have not come back."""
        while self._unanswered and self.answered_probe(0.0) is not None:
            pass
        if self._unanswered:
            return False
        message = probe_message(num_bytes)
        self._asked += message.num_bytes
        self._unanswered += 1
        self._out.put(message)
        return True

    def _send_all(self) -> None:
        try:
            while (message := self._out.get()) is not None:
                self.link.send(message, DAY)
        except ShoalError as error:
            self._fail(error)

    def flush(self, seconds: float) -> None:
        """Wait until everything has been sent. Raises LinkLost if it takes longer."""
        self._out.put(None)
        self._threads[0].join(seconds)
        if self._threads[0].is_alive():
            raise LinkLost("it did not take what was sent in time")

    # --- receiving ----------------------------------------------------------------------------------------------------

    def receive(self, seconds: float) -> Arrived:
        """Return the next message. Raises LinkLost if none arrives in so many seconds."""
        if self._back:
            return self._back.pop()
        try:
            arrived = self._in.get(timeout=max(seconds, 0.0)) if seconds > 0 else self._in.get_nowait()
        except queue.Empty:
            raise LinkLost("it did not answer in time") from None
        if isinstance(arrived, ShoalError):
            self._in.put(arrived)  # for the next call
            raise arrived
        self._urgent_out += arrived.what in URGENT
        return arrived

    def put_back(self, arrived: Arrived) -> None:
        """Make `receive` return this message again."""
        self._back.append(arrived)

    @property
    def interrupted(self) -> bool:
        """Whether a message waits that makes the current work pointless, or the link has ended."""
        return self.lost is not None or self._urgent_in > self._urgent_out

    def _receive_all(self) -> None:
        try:
            while True:
                message = self.link.receive(DAY)
                if message.header.kind == PROBE:
                    self._probe(message)
                elif message.header.kind == END:
                    self._deliver(Arrived("end", 0, {"why": message.text}))
                elif message.header.kind == TENSORS:
                    numbers, tensors = read_tensors(message)
                    self._deliver(Arrived(str(numbers.pop("what", "")), message.header.round, numbers, tensors))
                else:
                    raise LinkLost(f"it sent a message of kind {message.header.kind}")
        except ShoalError as error:
            self._fail(error)

    def _deliver(self, arrived: Arrived) -> None:
        self._urgent_in += arrived.what in URGENT
        self._in.put(arrived)

    def _probe(self, message: Message) -> None:
        if self._echo:
            self._out.put(message)
        else:
            self._probes.put(time.monotonic())

    def quiet_for(self) -> float:
        """Return the seconds since bytes have moved in either direction, as seen by calls of this method."""
        now, moved = time.monotonic(), self.link.traffic.both - self._asked  # own probes do not count
        if moved != self._seen[1]:
            self._seen = (now, moved)
        return now - self._seen[0]

    def answered_probe(self, seconds: float) -> float | None:
        """Return when the probe came back; None if it does not in so many seconds."""
        try:
            arrived = self._probes.get(timeout=max(seconds, 0.001))
        except queue.Empty:
            return None
        self._unanswered -= 1
        return arrived

    # --- the end ------------------------------------------------------------------------------------------------------

    def _fail(self, error: ShoalError) -> None:
        if self.lost is None:
            self.lost = error
            self._in.put(error)
        self.link.cut()

    def close(self) -> None:
        """End the link and its threads."""
        self._out.put(None)
        self.link.cut()
        for thread in self._threads:
            thread.join(5.0)
        self.link.close()
