"""The planner: which jobs advance together, and what that should cost. Pure, on plain data.

    plan(requests)                 -> parts: which jobs are stacked together, what that should cost
    total_bytes(costs, together)   -> what all of it takes at once

No model, no device, no clock: costs come in as curves over the number of rows. A job's tier depends on that job alone
(its request says which), never on the jobs beside it. Which jobs run now is decided by `queue.admit`, which asks
`total_bytes` whether they fit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

LEAST = 2
"""The number of rows of the smallest stack. A single member is padded to it, so that its bits are the same with any
other members."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A cost as a function of the number of rows: straight lines between known points, extended beyond them.

    >>> Curve.line(1.0, 2.0).at(8), Curve(((2, 4.0), (8, 10.0))).at(32)
    (17.0, 34.0)
    """

    points: tuple[tuple[int, float], ...]

    @classmethod
    def line(cls, fixed: float, each: float) -> Curve:
        """Return the line `fixed + each * rows`."""
        return cls(((0, fixed), (1, fixed + each)))

    @classmethod
    def of(cls, points: Iterable[tuple[int, float]]) -> Curve | None:
        """Return the curve through these points; None if there are none."""
        ordered = tuple(sorted(dict(points).items()))
        return cls(ordered) if ordered else None

    def at(self, rows: int) -> float:
        """Return the cost of so many rows. A single point is scaled in proportion to the rows; a cost never falls with
        rows."""
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
    """A job to be planned, as plain numbers."""

    index: int
    name: str
    key: str = ""
    """Jobs that may be stacked together have the same key."""
    kind: str = ""
    """Jobs that cost the same have the same kind: members of one stack may have different optimizers."""
    reason: str = ""
    """Why it runs in its tier: what it is stacked with, or why it cannot be stacked."""
    tier: str = "stacked"
    """"stacked", "streams" or "serial". It depends only on the job, or is that of the run that is resumed."""
    loses: bool = False
    """Whether a trial showed that stacking it is slower."""
    steps: int = 0
    """Optimizer steps left."""
    alone: float | None = None
    """Seconds of a step of this job alone."""
    seconds: Curve | None = None
    """Seconds of a stacked step as a function of the rows."""
    state: Curve = Curve(((1, 0.0),))
    """Bytes held as long as it runs."""
    working: Curve = Curve(((1, 0.0),))
    """Bytes that a step needs in addition."""
    most_rows: int | None = None
    """The most rows of its stack; None: any number."""
    compile_seconds: float | None = None
    compiled: Curve | None = None
    """Seconds of a compiled step as a function of the rows."""


@dataclass(slots=True)
class Part:
    """Members that advance together, with predicted and measured costs."""

    tier: str
    members: list[int]
    """Indices in the user's list of jobs."""
    names: list[str]
    reason: str
    """Why they run in this tier, in one line."""
    predicted: dict[str, float] = field(default_factory=dict)
    measured: dict[str, float] = field(default_factory=dict)
    loses: bool = False
    """Whether a trial showed that stacking these is slower."""

    def note(self, seconds: float, steps: int, bytes: int | None = None) -> None:
        """Add the measured cost of so many steps. Of bytes, the highest value stays."""
        total = self.measured.get("seconds", 0.0) + seconds
        count = self.measured.get("steps", 0.0) + steps
        self.measured |= {"seconds": total, "steps": count}
        if count:
            self.measured["step_seconds"] = total / count
        if bytes is not None:
            self.measured["memory_bytes"] = max(float(bytes), self.measured.get("memory_bytes", 0.0))


@dataclass(slots=True)
class Waiting:
    """A job that does not run now."""

    index: int
    name: str
    reason: str
    never: bool = False
    """Whether it would not fit on an empty device either."""
    bytes: float = 0.0
    """The bytes that it would take by itself, including its data."""


@dataclass(slots=True)
class Plan:
    """Which jobs advance together and which wait. It is made before the first step; measurements are added
    afterwards."""

    device: str
    parts: list[Part]
    waiting: list[Waiting] = field(default_factory=list)
    budget: int | None = None
    memory_bytes: float = 0.0
    """The bytes that all parts take together, including the data and the device's libraries."""
    set_up: dict[str, float] = field(default_factory=dict)
    """Seconds spent on set-up, by what was done."""

    def to_json(self) -> dict[str, Any]:
        """Return the plan as numbers and strings."""
        names = ("tier", "members", "names", "reason", "predicted", "measured")
        waiting = [{name: getattr(w, name) for name in ("index", "name", "reason", "bytes")} for w in self.waiting]
        return {
            "device": self.device,
            "budget_bytes": self.budget,
            "parts": [{name: getattr(p, name) for name in names} for p in self.parts],
            "waiting": waiting,
            "set_up_seconds": dict(self.set_up),
        }


def plan(requests: Iterable[Request]) -> list[Part]:
    """Return the parts in which these jobs run, if all of them run at once."""
    return [
        Part(
            stack[0].tier,
            [request.index for request in stack],
            [request.name for request in stack],
            stack[0].reason,
            predict(stack),
            loses=stack[0].loses,
        )
        for stack in stacks(requests)
    ]


def stacks(requests: Iterable[Request]) -> list[list[Request]]:
    """Group the jobs that advance together: those of one key and tier, in stacks of at most the rows they allow."""
    by_key: dict[object, list[Request]] = {}
    for request in requests:
        by_key.setdefault(request.index if request.tier == "serial" else (request.key, request.tier), []).append(
            request
        )
    result = []
    for group in by_key.values():
        most = min((request.most_rows for request in group if request.most_rows), default=len(group))
        result += [group[start : start + most] for start in range(0, len(group), most)]
    return result


def total_bytes(costs: Sequence[tuple[float, float]], *, together: bool) -> float:
    """Return the bytes of stacks with these (state, working) bytes.

    Args:
        together: Whether all of them step at the same time, as on a GPU; otherwise one steps at a time.
    """
    working = [stack_working for _, stack_working in costs]
    return sum(state for state, _ in costs) + (sum(working) if together else max(working, default=0.0))


def stack_bytes(stack: Sequence[Request]) -> tuple[float, float]:
    """Return (state, working) bytes of one stack: the state of all members, and the working bytes of the kind that
    needs most."""
    costs = [(cost(request, len(stack)), share) for request, share in _kinds(stack)]
    return sum(state * share for (state, _), share in costs), max(working for (_, working), _ in costs)


def predict(stack: Sequence[Request]) -> dict[str, float]:
    """Predict the cost of one stack. A value is left out unless it is known for all members.

    Seconds are averaged over the kinds of members, since forward and backward are shared and only the updates differ.
    """
    state, working = stack_bytes(stack)
    predicted = {"state_bytes": state, "memory_bytes": state + working}
    by_kind = [(predictions(request, len(stack)), share) for request, share in _kinds(stack)]
    for name in ("step_seconds", "alone_seconds", "compile_seconds", "compile_pays_after_steps"):
        if all(name in kind for kind, _ in by_kind):
            predicted[name] = sum(kind[name] * share for kind, share in by_kind)
    return predicted | gain(predicted)


def gain(predicted: dict[str, float]) -> dict[str, float]:
    """Return how many times faster the stack is than its members one after another, if both are known."""
    step, alone = predicted.get("step_seconds"), predicted.get("alone_seconds")
    return {"gain": alone / step} if step and alone is not None else {}


def _kinds(stack: Sequence[Request]) -> list[tuple[Request, float]]:
    """Return one request of each kind, and the kind's share of the members."""
    counts = Counter(request.kind for request in stack)
    first = {request.kind: request for request in reversed(stack)}
    return [(first[kind], count / len(stack)) for kind, count in counts.items()]


def cost(request: Request, members: int) -> tuple[float, float]:
    """Return (state, working) bytes of so many members of this kind."""
    rows = max(members, LEAST) if request.tier == "stacked" else members
    return request.state.at(rows), request.working.at(rows)


def predictions(request: Request, members: int) -> dict[str, float]:
    """Return predicted seconds of a step of so many members of this kind, and of compiling it, as far as known."""
    result: dict[str, float] = {}
    rows = max(members, LEAST)
    if request.tier != "serial" and request.seconds is not None:
        result["step_seconds"] = request.seconds.at(rows)
    elif request.tier == "serial" and request.alone is not None:
        result["step_seconds"] = request.alone * members
    if request.alone is not None:
        result["alone_seconds"] = request.alone * members
    if request.compile_seconds is not None and request.compiled is not None and "step_seconds" in result:
        result["compile_seconds"] = request.compile_seconds
        pays = pays_after(request.compile_seconds, result["step_seconds"], request.compiled.at(rows))
        if pays is not None:
            result["compile_pays_after_steps"] = float(pays)
    return result


def pays_after(compile_seconds: float, plain: float, compiled: float) -> int | None:
    """Return the steps after which compiling has paid for itself; None: never.

    >>> pays_after(10.0, 0.003, 0.001), pays_after(10.0, 0.001, 0.001)
    (5000, None)
    """
    return math.ceil(round(compile_seconds / (plain - compiled), 6)) if compiled < plain else None
