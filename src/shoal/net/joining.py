"""How workers join a run: which of them the coordinator or server admits, and how they rejoin after a lost link."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from shoal.errors import ShoalError
from shoal.net.links import Address, Link, LinkLost, Listener, connect, send_answer
from shoal.net.messages import WireError
from shoal.utils.tables import Log

T = TypeVar("T")
"""What a run stores for a worker that has joined."""


class Admission(Generic[T]):
    """Listens for workers, checks that they have the same job, and holds them until the run takes them.

    Each worker is answered in a separate thread, while the run computes.
    """

    def __init__(
        self,
        leader: str,
        differs: Callable[[Mapping[str, Any]], str | None],
        make: Callable[[Link, Mapping[str, Any]], T],
        *,
        expected: int,
        advice: Callable[[Address], str],
        address: Address | None = None,
        offer: Mapping[str, Any] | None = None,
        start_seconds: float = 60.0,
        patience: float = 60.0,
        log: Log | None = None,
    ) -> None:
        """Start listening.

        Args:
            leader: What this side is called in messages.
            differs: Returns how a worker's request differs from this run, or None if the worker may join.
            make: Returns what the run stores for a worker that has joined.
            expected: How many workers the run waits for at first.
            advice: Returns what to do if no worker comes.
            offer: What workers may read before they join.
            start_seconds: How long the run waits for the first workers.
            patience: How long a run without any worker waits for one.
        """
        self.log: Log = log if log is not None else lambda line: None
        self._leader, self._differs, self._make, self._advice = leader, differs, make, advice
        self._expected, self._start_seconds, self._patience = expected, start_seconds, patience
        self._offer, self._started = dict(offer or {}), False
        self._changed = threading.Condition()
        self._waiting: list[T] = []
        self._refused: list[str] = []
        self._joined = 0
        self._listener = Listener(address if address is not None else Address("127.0.0.1", 0), self._answer)
        self.address = self._listener.address

    def _answer(self, link: Link, request: dict[str, Any]) -> bool:
        """Answer a process that has connected: with the run's settings, or whether it may join."""
        if request.get("want") == "offer":
            send_answer(link, offer=self._offer)
            return False
        other = self._differs(request)
        if other is not None:
            name, fix = request.get("name", "?"), "start both with the same file and code"
            line = f"worker {name} has another job than the {self._leader}: {other}; {fix}"
            self.log(line)
            send_answer(link, no=line)
            with self._changed:
                self._refused.append(line)
                self._changed.notify_all()
            return False
        send_answer(link, yes=True)
        link.forget_traffic()
        with self._changed:
            self._waiting.append(self._make(link, request))
            self._joined += 1
            self._changed.notify_all()
        return True

    def arrivals(self, *, needed: bool) -> list[T]:
        """Return workers that have joined since the last call; the first call waits for the expected ones.

        Args:
            needed: The run has no worker, so it waits for one. The list is empty if none comes.
        """
        if not self._started:
            self._wait_for_first()
            self._started = True
        if needed and self._joined and not self._waiting:
            self.log(f"no worker is left; waiting {self._patience:g} s for one to join at {self.address}")
            with self._changed:
                self._changed.wait_for(lambda: self._waiting, timeout=self._patience)
        return self.take()

    @property
    def num_waiting(self) -> int:
        """The number of workers that have joined and were not taken yet."""
        return len(self._waiting)

    def take(self) -> list[T]:
        """Return workers that have joined since the last call, without waiting."""
        with self._changed:
            arrived, self._waiting = self._waiting, []
        return arrived

    def _wait_for_first(self) -> None:
        """Wait until as many as expected have joined or been refused, and at least one has joined."""
        count, seconds = self._expected, self._start_seconds
        with self._changed:
            self._changed.wait_for(lambda: self._joined and self._joined + len(self._refused) >= count, timeout=seconds)
            if 0 < self._joined < count:
                self.log(
                    f"{self._joined} of {count} workers have joined after {seconds:g} s; starting without the others"
                )

    def why_no_worker(self) -> str:
        """Return why there is no worker, and what to do."""
        if self._refused and not self._joined:
            return f"no worker could join in {self._start_seconds:g} s: {self._refused[-1]}"
        seconds = self._patience if self._joined else self._start_seconds
        return f"no worker came to {self.address} in {seconds:g} s; {self._advice(self.address)}"

    def close(self) -> list[T]:
        """Stop listening, and return those workers that have joined and were not taken."""
        self._listener.close()
        return self.take()


def join_and_serve(
    where: Address,
    request: dict[str, Any],
    serve: Callable[[Link], None],
    *,
    leader: str,
    patience: float,
    error: type[ShoalError],
    log: Log | None = None,
) -> None:
    """Join the run at `where` and serve it to its end; join again if the link is lost.

    Args:
        patience: How long to look for a `leader` that cannot be reached, at the beginning or after it was lost.
        error: The type of the error that is raised then.
    """
    joined = False
    while True:
        try:
            link = connect(where, request, patience)
        except LinkLost as reason:
            lost = f"lost the {leader} at {where} and did not find it again in {patience:g} s"
            line = f"{lost}; start it again, its run resumes from its checkpoint" if joined else str(reason)
            raise error(line) from None
        joined = True
        try:
            serve(link)
            return
        except (LinkLost, WireError) as reason:
            if log is not None:
                log(f"lost the {leader} at {where} ({reason}); joining again, for {patience:g} s")
            time.sleep(0.05)
        finally:
            link.close()
