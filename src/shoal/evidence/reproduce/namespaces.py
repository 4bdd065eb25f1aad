"""Slow links on one machine: a network namespace for each worker, joined to this one by a link of a given rate.

This needs Linux, root, `ip` and `tc`. Each link is limited both ways by a token bucket; nothing else is slowed down,
and nothing outside these namespaces is changed.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

LEAST_BURST, BURST_SECONDS = 16_000, 0.0011
"""Bytes that a link may carry at once, however slow it is, and seconds of its rate: with more, a message that fits into
the bucket would arrive at once, as if the link had no rate. From 500 Mbit on it holds the kernel's largest packets (64
kB); to cut those into small ones takes a core's time, which counts at such rates."""
QUEUE = "2s"
"""How long a packet may wait before it is dropped, so that TCP is limited by the rate, not by losses."""
NEW_NETWORK = 0x40000000  # CLONE_NEWNET


@dataclass(frozen=True, slots=True)
class Links:
    """Namespaces that can be entered, and the address of this end of their links."""

    host: str
    names: tuple[str, ...]
    rate: str

    def address(self, number: int) -> str:
        """Return the address of a namespace's end of its link."""
        return f"{self.host.rpartition('.')[0]}.{10 + number}"

    def enter(self, number: int) -> None:
        """Move this process (it must have one thread) into a namespace, permanently."""
        with open(f"/var/run/netns/{self.names[number]}") as handle:
            if ctypes.CDLL(None, use_errno=True).setns(handle.fileno(), NEW_NETWORK):
                code = ctypes.get_errno()
                raise OSError(code, f"cannot enter {self.names[number]}: {os.strerror(code)}")


def missing() -> str | None:
    """Return why there can be no shaped links here, or None if there can."""
    if os.name != "posix" or not hasattr(os, "geteuid") or os.geteuid():
        return "shaped links need root on Linux"
    absent = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if absent:
        return f"shaped links need {absent[0]} (apt install iproute2)"
    try:
        with shaped(1, "1mbit"):
            return None
    except OSError as error:
        return f"shaped links cannot be made here: {error}"


def burst_of(rate: str) -> int:
    """Return the bytes of the token bucket for a rate as tc writes it, such as 100mbit.

    >>> burst_of("50mbit"), burst_of("1gbit")
    (16000, 137500)
    """
    match = re.fullmatch(r"(\d+\.?\d*)([kmg]?)bit", rate)
    if match is None:
        raise ValueError(f"a link's rate is {rate!r}; use one of tc's, such as 50mbit or 1gbit")
    bits = float(match[1]) * {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}[match[2]]
    return max(LEAST_BURST, round(bits / 8 * BURST_SECONDS))


@contextmanager
def shaped(workers: int, rate: str) -> Iterator[Links]:
    """Create namespaces, each with a link of this rate (`100mbit`) to this machine, for as long as the block runs."""
    mark = os.getpid() % 100000
    names = tuple(f"shoal{mark}-{number}" for number in range(workers))
    bridge, net = f"sh{mark}", f"10.213.{mark % 250}"
    try:
        _do("ip", "link", "add", bridge, "type", "bridge")
        _do("ip", "addr", "add", f"{net}.1/24", "dev", bridge)
        _do("ip", "link", "set", bridge, "up")
        for number, name in enumerate(names):
            outer = f"sh{mark}v{number}"
            _do("ip", "netns", "add", name)
            _do("ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", name)
            _do("ip", "link", "set", outer, "master", bridge, "up")
            _do("ip", "-n", name, "addr", "add", f"{net}.{10 + number}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _do("ip", "-n", name, "link", "set", device, "up")
            limit = ("root", "tbf", "rate", rate, "burst", str(burst_of(rate)), "latency", QUEUE)
            _do("tc", "qdisc", "add", "dev", outer, *limit)
            _do("tc", "-n", name, "qdisc", "add", "dev", "eth0", *limit)
        yield Links(f"{net}.1", names, rate)
    finally:
        for number, name in enumerate(names):
            with suppress(OSError):
                _do("ip", "link", "del", f"sh{mark}v{number}")
            with suppress(OSError):
                _do("ip", "netns", "del", name)
        with suppress(OSError):
            _do("ip", "link", "del", bridge)


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
