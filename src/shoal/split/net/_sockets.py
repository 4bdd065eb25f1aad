"""What went through this process's TCP connections, asked of the kernel (Linux): nothing that we count ourselves."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

_COUNTERS = struct.Struct("<QQ")
_COUNTERS_AT = 120
"""Of tcpi_bytes_acked and tcpi_bytes_received in struct tcp_info."""
_ESTABLISHED = 1
_IDLE_SECONDS, _BETWEEN_SECONDS, _PROBES = 15, 5, 3
"""When a silent connection is asked whether the other machine is still there."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of payload that the other side has confirmed, and that came in; no TCP or IP headers."""

    sent: int = 0
    received: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.sent + other.sent, self.received + other.received)

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.sent - other.sent, self.received - other.received)

    @property
    def both(self) -> int:
        return self.sent + self.received


@dataclass(frozen=True, slots=True)
class Connection:
    """One TCP connection of this process."""

    fd: int
    local: int
    """Port here."""
    remote: int
    """Port there."""
    traffic: Traffic


def connections() -> dict[str, Connection]:
    """This process's open TCP connections, by what the kernel calls them: a name that is not used again."""
    found = {}
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            key = os.readlink(f"/proc/self/fd/{name}")
            if key.startswith("socket:") and (seen := _connection(int(name))) is not None:
                found[key] = seen
        except OSError:  # closed in between
            continue
    return found


def _connection(fd: int) -> Connection | None:
    with _borrowed(fd) as there:
        if there.family not in (socket.AF_INET, socket.AF_INET6) or there.type != socket.SOCK_STREAM:
            return None
        info = there.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        if info[0] != _ESTABLISHED or len(info) < _COUNTERS_AT + _COUNTERS.size:
            return None
        sent, received = _COUNTERS.unpack_from(info, _COUNTERS_AT)
        return Connection(fd, there.getsockname()[1], there.getpeername()[1], Traffic(sent, received))


@contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    """The socket behind a descriptor that somebody else owns."""
    there = socket.socket(fileno=os.dup(fd))
    try:
        yield there
    finally:
        there.close()


def traffic(names: Iterable[str], seen: Mapping[str, Connection] | None = None) -> Traffic:
    """What went through these connections in all; one that is closed counts nothing."""
    seen = connections() if seen is None else seen
    return sum((seen[name].traffic for name in names if name in seen), Traffic())


def cut(names: Iterable[str]) -> None:
    """End these connections, whoever waits for them: waits on both sides raise at once."""
    for key, connection in connections().items():
        if key in set(names):
            try:
                with _borrowed(connection.fd) as there:
                    there.shutdown(socket.SHUT_RDWR)
            except OSError:  # gone already
                continue


def keep_alive(names: Iterable[str]) -> None:
    """Have the kernel notice when the other machine has gone without a word."""
    for key, connection in connections().items():
        if key in set(names):
            with _borrowed(connection.fd) as there:
                there.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for name, value in (
                    ("TCP_KEEPIDLE", _IDLE_SECONDS), ("TCP_KEEPINTVL", _BETWEEN_SECONDS), ("TCP_KEEPCNT", _PROBES),
                ):  # fmt: skip
                    if hasattr(socket, name):
                        there.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
