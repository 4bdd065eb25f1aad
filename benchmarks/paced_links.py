"""Slow links on one machine without root or `tc`: the kernel paces every TCP connection of a process.

Linux sends each connection's bytes at no more than `SO_MAX_PACING_RATE`. Each connection has the rate to itself, so a
server of two workers has twice the rate of one link.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from shoal.place.links import Link

SO_MAX_PACING_RATE = 47  # of Linux; Python's socket module does not have it


@dataclass(frozen=True, slots=True)
class PacedLinks:
    """Links of a given rate over loopback, as `namespaces.Links` are between namespaces."""

    rate: str

    def address(self, number: int) -> str:
        """Return the address of a process."""
        return "127.0.0.1"

    def enter(self, number: int) -> None:
        """Pace all connections that this process opens or accepts from now on."""
        rate = round(Link.parse(self.rate).up / 8)

        class PacedSocket(socket.socket):
            def __init__(self, *arguments: int | None, **named: int | None) -> None:
                super().__init__(*arguments, **named)  # type: ignore[arg-type]
                if self.family in (socket.AF_INET, socket.AF_INET6) and self.type == socket.SOCK_STREAM:
                    self.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, rate)

        socket.socket = PacedSocket  # type: ignore[misc]


@contextmanager
def paced(rate: str) -> Iterator[PacedLinks]:
    """Yield links of this rate (`1Gbit`)."""
    if not sys.platform.startswith("linux"):
        raise SystemExit("paced links need Linux; use --links tc elsewhere")
    yield PacedLinks(rate)
