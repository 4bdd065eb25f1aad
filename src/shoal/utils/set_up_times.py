"""Where the time goes that is not training: seconds by what was done, as `results.plan.set_up` shows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import perf_counter


@dataclass(slots=True)
class Span:
    """Something that takes time."""

    seconds: float = 0.0


@dataclass(slots=True)
class Times:
    """Seconds by what was done; what was done inside something else counts once, for what is inside."""

    seconds: dict[str, float] = field(default_factory=dict)
    _inside: list[float] = field(default_factory=list)

    def add(self, more: Mapping[str, float]) -> None:
        for name, value in more.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + value


_times: ContextVar[Times | None] = ContextVar("times", default=None)


@contextmanager
def collected() -> Iterator[Times]:
    """Inside: what is `timed` is added up here."""
    token = _times.set(times := Times())
    try:
        yield times
    finally:
        _times.reset(token)


def current() -> Times:
    """Those of the run that is under way."""
    return _times.get() or Times()


@contextmanager
def timed(name: str) -> Iterator[Span]:
    """Inside is time that goes to this name; the span it yields has all of it afterwards."""
    times, span, start = current(), Span(), perf_counter()
    times._inside.append(0.0)
    try:
        yield span
    finally:
        span.seconds = perf_counter() - start
        times.add({name: span.seconds - times._inside.pop()})
        if times._inside:
            times._inside[-1] += span.seconds
