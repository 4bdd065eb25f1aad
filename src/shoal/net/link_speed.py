"""How fast a link is: as text, and measured."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from shoal.errors import SplitError
from shoal.net.links import Link
from shoal.net.messages import probe_message

PROBE_SECONDS = 30.0
"""How long a probe may take to come back."""
SMALL_TRIES, LONG_ENOUGH, MOST_BYTES = 5, 0.1, 1 << 25
"""The latency is the median of `SMALL_TRIES` empty messages. Then messages grow until one takes `LONG_ENOUGH` seconds,
or has `MOST_BYTES`."""
_SPEED = re.compile(r"\s*([0-9.]+)\s*([kMGT]?)(?:bit|bps)(?:/s)?(?:[\s,/]+([0-9.]+)\s*(us|ms|s))?\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """The speed of a worker's link, each way.

    >>> LinkSpeed.parse("100Mbit, 5ms")
    LinkSpeed(bits=100000000.0, latency=0.005)
    >>> LinkSpeed.parse("1Gbit").seconds(125_000_000)
    1.0
    """

    bits: float
    """Bits per second."""
    latency: float = 0.0
    """Seconds that an empty message takes there and back."""

    @staticmethod
    def parse(text: str) -> LinkSpeed:
        match = _SPEED.fullmatch(text)
        try:
            assert match is not None
            bits = float(match[1]) * {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}[match[2].upper()]
            latency = float(match[3] or 0) * {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 0.0}[(match[4] or "").lower()]
            assert bits > 0
        except (AssertionError, ValueError):
            raise SplitError(f"link is {text!r}; give its speed, such as 100Mbit, 1Gbit or '100Mbit 5ms'") from None
        return LinkSpeed(bits, latency)

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds for `num_bytes` one way."""
        return 8 * num_bytes / self.bits

    def __str__(self) -> str:
        value, unit = next(
            (self.bits / f, u) for f, u in ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1, "")) if self.bits >= f or f == 1
        )
        return f"{value:.3g} {unit}bit/s, {1000 * self.latency:.2g} ms there and back"


def probe_link(link: Link) -> LinkSpeed:
    """Measure a link whose worker is waiting for a task; the worker sends back what it gets."""

    def send(size: int) -> None:
        link.send(probe_message(size), PROBE_SECONDS)
        link.receive(PROBE_SECONDS)

    return measure_speed(send)


def measure_speed(send: Callable[[int], None]) -> LinkSpeed:
    """Time `send`, which sends a number of bytes and waits until they have come back.

    Messages grow until one takes long enough to be timed.
    """

    def seconds(size: int) -> float:
        began = time.perf_counter()
        send(size)
        return time.perf_counter() - began

    latency = median(seconds(0) for _ in range(SMALL_TRIES))
    size = 1 << 16
    while (took := seconds(size) - latency) < LONG_ENOUGH and size < MOST_BYTES:
        size *= 4
    return LinkSpeed(8 * 2 * size / max(took, 1e-6), latency)
