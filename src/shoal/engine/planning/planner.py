"""The planner: who rides, together with whom, and what it should cost; pure, on plain data.

    plan(requests, riding, device) -> Plan

No model, no device, no clock: costs come in as curves over the number of rows. A job's tier is its own affair (the
request says what is known about it) and never that of its companions; who rides now and who waits is decided here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

LEAST = 2
"""Rows of the smallest stack: a member alone is padded, so that its bits are those it has in any company."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A cost over the number of rows: straight lines between known points, and beyond them.

    >>> Curve.line(1.0, 2.0).at(8), Curve(((2, 4.0), (8, 10.0))).at(32)
    (17.0, 34.0)
    """

    points: tuple[tuple[int, float], ...]

    @classmethod
    def line(cls, fixed: float, each: float) -> Curve:
        """a + b * M."""
        return cls(((0, fixed), (1, fixed + each)))

    @classmethod
    def of(cls, points: Iterable[tuple[int, float]]) -> Curve | None:
        """Through these points, of which there may be none."""
        found = tuple(sorted(dict(points).items()))
        return cls(found) if found else None

    def at(self, rows: int) -> float:
        """The cost of so many rows. One point alone is taken to be all per row; a cost never falls with rows."""
        if len(self.points) == 1:
            known, value = self.points[0]
            return value * rows / known if known else value
        for (x, a), (y, b) in zip(self.points, self.points[1:], strict=False):
            if rows <= y or y == self.points[-1][0]:
                slope = max(0.0, (b - a) / (y - x))
                return max(a + slope * (rows - x), 0.0) if rows >= x else max(a - slope * (x - rows), 0.0)
        raise AssertionError("a curve has points")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A job that wants to ride, as numbers."""

    index: int
    name: str
    key: str = ""
    """What may be stacked together has the same key; empty: nothing is known to be alike."""
    kind: str = ""
    """What costs the same has the same kind: members of one stack may have different optimizers."""
    reason: str = ""
    """Why it runs as it does: what it is one computation with, or why it cannot be stacked."""
    tier: str = "stacked"
    """stacked, streams or serial: settled by the job itself, or remembered from the run that is resumed."""
    steps: int = 0
    """Steps left."""
    alone: float | None = None
    """Seconds of a step of this job alone."""
    seconds: Curve | None = None
    """Seconds of a step of so many rows stacked."""
    state: Curve = Curve(((1, 0.0),))
    """Bytes held as long as it rides."""
    working: Curve = Curve(((1, 0.0),))
    """Bytes that a step needs besides."""
    most_rows: int | None = None
    """Rows of its largest stack; None: any number."""
    compile_seconds: float | None = None
    compiled: Curve | None = None
    """Seconds of a compiled step."""


@dataclass(frozen=True, slots=True)
class Device:
    """Where it runs."""

    name: str
    budget: int | None = None
    """Bytes that may be used; None: no limit."""
    together: bool = False
    """Whether all parts step at the same time (a GPU); else each needs its working memory only in its turn."""
    taken: int = 0
    """Bytes that are in use whoever rides: the data."""


@dataclass(slots=True)
class Part:
    """Members that advance together."""

    tier: str
    members: list[int]
    """Places in the user's list."""
    names: list[str]
    reason: str
    """Why this tier, in one line."""
    predicted: dict[str, float] = field(default_factory=dict)
    measured: dict[str, float] = field(default_factory=dict)
    key: str = ""
    """What may be stacked with it."""

    def note(self, seconds: float, steps: int, bytes: int | None = None) -> None:
        """Take in what so many steps of this part did cost; the peak is the highest seen."""
        total = self.measured.get("seconds", 0.0) + seconds
        count = self.measured.get("steps", 0.0) + steps
        self.measured |= {"seconds": total, "steps": count}
        if count:
            self.measured["step_seconds"] = total / count
        if bytes is not None:
            self.measured["memory_bytes"] = max(float(bytes), self.measured.get("memory_bytes", 0.0))


@dataclass(slots=True)
class Waiting:
    """A job that does not ride now."""

    index: int
    name: str
    reason: str
    never: bool = False
    """Whether it would not fit on an empty device either."""
    bytes: float = 0.0
    """What it would take by itself."""


@dataclass(slots=True)
class Plan:
    """What rides together and what does not. Made before the first step; what it did cost is filled in afterwards."""

    device: str
    parts: list[Part]
    waiting: list[Waiting] = field(default_factory=list)
    budget: int | None = None
    set_up: dict[str, float] = field(default_factory=dict)
    """Seconds that went into getting ready, by what was done."""

    def to_json(self) -> dict[str, Any]:
        """The plan as numbers and strings."""
        names = ("tier", "members", "names", "reason", "predicted", "measured")
        waiting = [{name: getattr(w, name) for name in ("index", "name", "reason", "bytes")} for w in self.waiting]
        return {
            "device": self.device,
            "budget_bytes": self.budget,
            "parts": [{name: getattr(p, name) for name in names} for p in self.parts],
            "waiting": waiting,
            "set_up_seconds": dict(self.set_up),
        }

    def part_of(self, index: int) -> Part | None:
        """The part a member rides in."""
        return next((part for part in self.parts if index in part.members), None)

    def tiers(self) -> dict[int, str]:
        """Each riding member's tier: what a resumed run is told."""
        return {index: part.tier for part in self.parts for index in part.members}


def plan(requests: Sequence[Request], running: Sequence[Part], device: Device) -> Plan:
    """Give every request a place, in their order, or the reason why it waits.

    Those who ride keep their places. A newcomer joins a part of its own kind, or opens one, if everything together
    then stays within the budget; one that does not fit is passed over, and the next is looked at.
    """
    table = _Table(device, running)
    waiting = []
    for request in requests:
        if not table.place(request):
            waiting.append(table.refused(request))
    return Plan(device.name, table.parts(), waiting, device.budget)


class _Table:
    """Parts as they fill up."""

    def __init__(self, device: Device, running: Sequence[Part]) -> None:
        self.device = device
        self.rows: list[_Seats] = [_Seats(replace_lists(part)) for part in running]

    def place(self, request: Request) -> bool:
        own = next((seats for seats in self.rows if seats.takes(request)), None)
        if not self._fits(request, own):
            return False  # a second part beside one with room would only be two slower ones
        if own is not None:
            own.add(request)
            return True
        self.rows.append(_Seats(Part(request.tier, [], [], request.reason, key=request.key)))
        self.rows[-1].add(request)
        return True

    def refused(self, request: Request) -> Waiting:
        state, working = cost(request, 1)
        needed, budget = state + working, self.device.budget or 0
        if self.device.taken + needed > budget:
            return Waiting(request.index, request.name, _never(needed, self.device), True, needed)
        own = next((seats for seats in self.rows if seats.takes(request)), None)
        over = self._bytes(request, own) - budget
        return Waiting(request.index, request.name, f"waits for {_size(over)} of memory", False, needed)

    def parts(self) -> list[Part]:
        return [seats.finished() for seats in self.rows]

    def _fits(self, request: Request, seats: _Seats | None) -> bool:
        return self.device.budget is None or self._bytes(request, seats) <= self.device.budget

    def _bytes(self, request: Request, joined: _Seats | None) -> float:
        """All bytes once this request rides as well."""
        found = [s.bytes(request if s is joined else None) for s in self.rows]
        if joined is None:
            found.append(cost(request, 1))
        working = [w for _, w in found]
        step = sum(working) if self.device.together else max(working, default=0.0)
        return self.device.taken + sum(s for s, _ in found) + step


class _Seats:
    """One part and the requests in it."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.before = len(part.members)
        """Members that rode already; they are taken to be like the first that came."""
        self.kinds = Kinds()

    def takes(self, request: Request) -> bool:
        part = self.part
        if part.tier == "serial" or request.tier != part.tier or not part.key or request.key != part.key:
            return False
        limits = [own.most_rows for own in (request, *self.kinds.first.values()) if own.most_rows is not None]
        return not limits or len(part.members) < min(limits)

    def add(self, request: Request) -> None:
        self.kinds.add(request, 1 + self.before)
        self.before = 0
        self.part.members.append(request.index)
        self.part.names.append(request.name)

    def bytes(self, more: Request | None = None) -> tuple[float, float]:
        """Of those in it, and of one more."""
        if not self.kinds.first and more is None:
            known = self.part.predicted
            state = known.get("state_bytes", 0.0)
            return state, max(0.0, known.get("memory_bytes", 0.0) - state)
        return self.kinds.cost(more, 1 + self.before)

    def finished(self) -> Part:
        if self.kinds.first:
            self.part.predicted |= self.kinds.predictions()
        return self.part


class Kinds:
    """Requests of one stack, counted by what they cost.

    State is the sum of everybody's own; a step's bytes are those of the neediest, its seconds those of everybody in
    proportion, since forward and backward are shared and only the updates differ.
    """

    def __init__(self, requests: Iterable[Request] = ()) -> None:
        self.first: dict[str, Request] = {}
        self.counts: dict[str, int] = {}
        for request in requests:
            self.add(request)

    def add(self, request: Request, count: int = 1) -> None:
        """So many more like this one."""
        self.first.setdefault(request.kind, request)
        self.counts[request.kind] = self.counts.get(request.kind, 0) + count

    def cost(self, more: Request | None = None, count: int = 1) -> tuple[float, float]:
        """(state, working) bytes, with so many more like that one."""
        counts = [(self.first[kind], number) for kind, number in self.counts.items()]
        if more is not None:
            counts.append((more, count))
        members = sum(number for _, number in counts)
        found = [(cost(request, members), number / members) for request, number in counts]
        return sum(state * share for (state, _), share in found), max(working for (_, working), _ in found)

    def predictions(self) -> dict[str, float]:
        """What all of them together should cost, as far as it is known of everybody."""
        members = sum(self.counts.values())
        state, working = self.cost()
        found = {"state_bytes": state, "memory_bytes": state + working}
        each = [(predictions(request, members), self.counts[kind] / members) for kind, request in self.first.items()]
        for name in ("step_seconds", "alone_seconds", "compile_seconds", "compile_pays_after_steps"):
            if all(name in own for own, _ in each):
                found[name] = sum(own[name] * share for own, share in each)
        if found.get("step_seconds") and "alone_seconds" in found:
            found["gain"] = found["alone_seconds"] / found["step_seconds"]
        return found


def replace_lists(part: Part) -> Part:
    """A copy whose members can be added to."""
    return replace(part, members=list(part.members), names=list(part.names), predicted=dict(part.predicted))


def cost(request: Request, members: int) -> tuple[float, float]:
    """(state, working) bytes of so many members of this kind."""
    rows = max(members, LEAST) if request.tier == "stacked" else members
    return request.state.at(rows), request.working.at(rows)


def predictions(request: Request, members: int) -> dict[str, float]:
    """What a part of so many members like this one should cost."""
    state, working = cost(request, members)
    found = {"state_bytes": state, "memory_bytes": state + working}
    step = None
    if request.tier != "serial" and request.seconds is not None:
        step = request.seconds.at(max(members, LEAST))
    elif request.tier == "serial" and request.alone is not None:
        step = request.alone * members
    if step is not None:
        found["step_seconds"] = step
    if request.alone is not None:
        found["alone_seconds"] = request.alone * members
        if step:
            found["gain"] = found["alone_seconds"] / step
    if request.compile_seconds is not None and request.compiled is not None and step is not None:
        found["compile_seconds"] = request.compile_seconds
        pays = pays_after(request.compile_seconds, step, request.compiled.at(max(members, LEAST)))
        if pays is not None:
            found["compile_pays_after_steps"] = float(pays)
    return found


def pays_after(compile_seconds: float, plain: float, compiled: float) -> int | None:
    """Steps after which compiling has paid for itself; None: never.

    >>> pays_after(10.0, 0.003, 0.001), pays_after(10.0, 0.001, 0.001)
    (5000, None)
    """
    return math.ceil(round(compile_seconds / (plain - compiled), 6)) if compiled < plain else None


def rows_within(request: Request, budget: float) -> int:
    """How many members of this kind fit into so many bytes, by themselves; 0: not even one."""
    if sum(cost(request, 1)) > budget:
        return 0
    low, high = 1, 2
    while high <= 1 << 20 and sum(cost(request, high)) <= budget:
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if sum(cost(request, middle)) <= budget else (low, middle)
    return low if request.most_rows is None else min(low, request.most_rows)


def _never(needed: float, device: Device) -> str:
    data = f" beside {_size(device.taken)} of data" if device.taken else ""
    return f"needs {_size(needed)}{data}, and the budget is {_size(device.budget or 0)}"


def _size(count: float) -> str:
    from shoal.utils.tables import size

    return size(max(0.0, count))
