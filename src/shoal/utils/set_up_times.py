"""Measure set-up time: seconds by activity, as `results.plan.set_up` shows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import perf_counter


@dataclass(slots=True)
class Span:
    """The seconds of one timed block."""

    seconds: float = 0.0


@dataclass(slots=True)
class Times:
    """Seconds by activity; the time in a nested block counts only for the inner one."""

    seconds: dict[str, float] = field(default_factory=dict)
    _inside: list[float] = field(default_factory=list)

    def add(self, more: Mapping[str, float]) -> None:
        for name, value in more.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + value


_times: ContextVar[Times | None] = ContextVar("times", default=None)


@contextmanager
def collected() -> Iterator[Times]:
    """Collect the times of all `timed` blocks inside this context."""
    token = _times.set(times := Times())
    try:
        yield times
    finally:
        _times.reset(token)


def current() -> Times:
    """Return the times of the current run."""
    return _times.get() or Times()


@contextmanager
def timed(name: str) -> Iterator[Span]:
    """Count the time inside this context under a name; afterwards the yielded span has its seconds."""
    times, span, start = current(), Span(), perf_counter()
    times._inside.append(0.0)
    try:
        yield span
    finally:
        span.seconds = perf_counter() - start
        times.add({name: span.seconds - times._inside.pop()})
        if times._inside:
            times._inside[-1] += span.seconds
