"""Events, which report as plain data what happens in a run.

| kind | member | data |
|---|---|---|
| start | | jobs, device, plan (as from Plan.to_json()) |
| join | yes | tier, unit, size; alone_seconds where known |
| turn | | unit, tier, members, batches, seconds, bytes (None where unknown) |
| epoch | yes | the row of its history |
| leave | yes | status, error, steps, seconds |
| preempt | yes | by |
| split | | unit, reason, sizes |
| checkpoint | | members, seconds |
| note | maybe | text |
| end | | statuses, seconds, running (members running on average); resume (how) where an interrupted run was saved |

A turn comes before the epochs and ends that it caused. A member that was preempted, or whose unit was split, joins
again.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from shoal.errors import describe, warn
from shoal.utils.numpy_values import finite

if TYPE_CHECKING:
    from shoal.engine.members.member import Member

KINDS = ("start", "join", "turn", "epoch", "leave", "preempt", "split", "checkpoint", "note", "end")
_KINDS = frozenset(KINDS)

Wire = tuple[str, float, int | None, dict[str, Any]]
"""An event as sent between processes: the member is its index."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened in a run, such as the end of an epoch."""

    kind: str
    time: float = field(default_factory=time.time)
    """Unix time."""
    member: Member | None = None
    data: dict[str, Any] = field(default_factory=dict)
    """Numbers, strings, lists and dicts, as listed above for each kind."""

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ValueError(f"an event's kind is {self.kind!r}; use one of {', '.join(KINDS)}")

    def to_dict(self) -> dict[str, Any]:
        """Return the event as plain data; `member` is the job's index in the list, `name` its name."""
        member = {} if self.member is None else {"member": self.member.index, "name": self.member.name}
        return {"kind": self.kind, "time": self.time, **member, "data": finite(self.data)}

    def to_json(self) -> str:
        """Return `to_dict()` as one line of JSON."""
        return json.dumps(self.to_dict(), allow_nan=False)

    def to_wire(self) -> Wire:
        """Return what to send to another process."""
        return self.kind, self.time, None if self.member is None else self.member.index, self.data

    @classmethod
    def from_wire(cls, wire: Wire, members: Mapping[int, Member]) -> Event:
        """Return the event that another process sent; `members` are those of this process, by index."""
        kind, when, index, data = wire
        return cls(kind, when, None if index is None else members[index], data)


def new_event(kind: str, member: Member | None = None, /, **data: Any) -> Event:
    """Return an event that happens now.

    >>> new_event("checkpoint", members=3, seconds=0.2).data
    {'members': 3, 'seconds': 0.2}
    """
    return Event(kind, time.time(), member, data)


Listener = Callable[[Event], None]
"""A function that is called with every event of a run, in the calling process."""


class Listeners:
    """Calls several listeners. One that raises is dropped with a warning, and training continues."""

    def __init__(self, listeners: Iterable[Listener] = (), given: Listener | None = None) -> None:
        """Create them. `given`: one more listener, which the user gave, and which may change what jobs read."""
        self._listeners, self.given = [*listeners, *([] if given is None else [given])], given

    def __bool__(self) -> bool:
        return bool(self._listeners)

    def __call__(self, event: Event) -> None:
        for listener in self._listeners:
            try:
                listener(event)
            except Exception as error:
                self._drop(listener, event, error)

    def _drop(self, listener: Listener, event: Event, error: Exception) -> None:
        self._listeners = [other for other in self._listeners if other is not listener]
        text = (
            f"{title(listener)} raised {describe(error)} at the event {event.kind!r}; "
            "it gets no more events of this run, which continues"
        )
        warn(text)


def title(thing: object) -> str:
    """Return the name of a function or a callable object, for messages."""
    return str(getattr(thing, "__qualname__", None) or type(thing).__qualname__)


class JsonLines:
    """Writes every event to a stream, as one line of JSON."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __call__(self, event: Event) -> None:
        self._stream.write(event.to_json() + "\n")
        self._stream.flush()


class MembersRunning:
    """Measures how many members ran at the same time on average: their summed time over the time of the run.

    Events of several processes may arrive in any order.
    """

    def __init__(self) -> None:
        self._runners = 0.0
        self._since: dict[int, float] = {}
        self._first, self._last = math.inf, -math.inf

    def __call__(self, event: Event) -> None:
        self._first, self._last = min(self._first, event.time), max(self._last, event.time)
        if event.member is None:
            return
        index = event.member.index
        if event.kind in ("leave", "preempt", "join") and index in self._since:
            self._runners += event.time - self._since.pop(index)
        if event.kind == "join":
            self._since[index] = event.time

    def average(self, now: float | None = None) -> float:
        """Return the average until `now`, by default until the last event."""
        last = self._last if now is None else now
        if not last > self._first:
            return 0.0
        return (self._runners + sum(last - since for since in self._since.values())) / (last - self._first)
