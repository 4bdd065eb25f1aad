"""The speed of links, in each direction."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.errors import PlaceError, SplitError
from shoal.net.link_speed import LinkSpeed


@dataclass(frozen=True, slots=True)
class Link:
    """A machine's link: bits per second each way, and the round-trip seconds of an empty message.

    Examples:
        >>> Link.parse("1Gbit, 5ms")
        Link(up=1000000000.0, down=1000000000.0, latency=0.005)
        >>> Link.parse("100Mbit").seconds_up(12_500_000)
        1.0
    """

    up: float
    """Bits per second from the worker."""
    down: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        if not (self.up > 0 and self.down > 0 and self.latency >= 0):
            raise PlaceError(f"link {self.up:g} / {self.down:g} bit/s, {self.latency:g} s: speeds must be above 0")

    @staticmethod
    def parse(text: str | Link | LinkSpeed) -> Link:
        """Create a link from "1Gbit", "100Mbit 5ms", or a measured link."""
        if isinstance(text, Link):
            return text
        if isinstance(text, LinkSpeed):
            return Link(text.bits, text.bits, text.latency)
        try:
            speed = LinkSpeed.parse(text)
        except (SplitError, TypeError):
            raise PlaceError(
                f"link is {text!r}; give its speed, such as 100Mbit, 1Gbit or '100Mbit 5ms', or a shoal.place.Link"
            ) from None
        return Link(speed.bits, speed.bits, speed.latency)

    def faster(self, times: float) -> Link:
        """Return the link with its speed multiplied by a factor."""
        return Link(self.up * times, self.down * times, self.latency)

    def seconds_up(self, num_bytes: float) -> float:
        """Return the seconds to send so many bytes from the machine, without the latency."""
        return 8 * num_bytes / self.up

    def seconds_down(self, num_bytes: float) -> float:
        """Return the seconds to send so many bytes to the machine, without the latency."""
        return 8 * num_bytes / self.down

    def drifted(self, other: Link, share: float = 0.25) -> bool:
        """Return whether another measurement differs by more than this share, in either direction."""
        return any(abs(a - b) > share * a for a, b in ((self.up, other.up), (self.down, other.down)))

    def __str__(self) -> str:
        if self.up == self.down:
            return str(LinkSpeed(self.up, self.latency)).replace(", 0 ms there and back", "")
        return f"{LinkSpeed(self.up)} up, {LinkSpeed(self.down, self.latency)} down".replace(
            ", 0 ms there and back", ""
        )
