"""How fast a link is: measured through the pair itself, or told by the user."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from statistics import median

from shoal.errors import SplitError
from shoal.split.net._wire import probe_message
from shoal.split.net.links import Link

SMALL_TRIES, LONG_ENOUGH, MOST_BYTES, PROBE_SECONDS = 5, 0.1, 1 << 25, 30.0
_LINK = re.compile(r"\s*([0-9.]+)\s*([kMGT]?)(?:bit|bps)(?:/s)?(?:[\s,/]+([0-9.]+)\s*(us|ms|s))?\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """What a worker's link can do, each way.

    >>> LinkSpeed.parse("100Mbit, 5ms")
    LinkSpeed(bits=100000000.0, latency=0.005)
    >>> LinkSpeed.parse("1Gbit").seconds(125_000_000)
    1.0
    """

    bits: float
    """In a second."""
    latency: float = 0.0
    """Seconds there and back of a message without content."""

    @staticmethod
    def parse(text: str) -> LinkSpeed:
        found = _LINK.fullmatch(text)
        try:
            assert found is not None
            bits = float(found[1]) * {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}[found[2].upper()]
            latency = float(found[3] or 0) * {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 0.0}[(found[4] or "").lower()]
            assert bits > 0
        except (AssertionError, ValueError):
            raise SplitError(f"link is {text!r}; give its speed, such as 100Mbit, 1Gbit or '100Mbit 5ms'") from None
        return LinkSpeed(bits, latency)

    def seconds(self, num_bytes: float) -> float:
        """For so many bytes one way."""
        return 8 * num_bytes / self.bits

    def __str__(self) -> str:
        value, unit = next(
            (self.bits / f, u) for f, u in ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1, "")) if self.bits >= f or f == 1
        )
        return f"{value:.3g} {unit}bit/s, {1000 * self.latency:.2g} ms there and back"


def probe_link(link: Link) -> LinkSpeed:
    """Measure a link whose worker waits for a task: it sends back what it gets.

    Messages grow until one takes long enough to be timed.
    """
    latency = median(_trip(link, 0) for _ in range(SMALL_TRIES))
    size = 1 << 16
    while (seconds := _trip(link, size) - latency) < LONG_ENOUGH and size < MOST_BYTES:
        size *= 4
    return LinkSpeed(8 * 2 * size / max(seconds, 1e-6), latency)


def _trip(link: Link, size: int) -> float:
    began = time.perf_counter()
    link.send(probe_message(size), PROBE_SECONDS)
    link.receive(PROBE_SECONDS)
    return time.perf_counter() - began
