"""Machines that talk slowly, on one machine: network namespaces on a bridge, each link shaped with `tc tbf`.

python benchmarks/netns.py --workers 2 --rate 100mbit      # makes them, measures their links, cleans up

    with Namespaces(4, rate="100mbit") as net:
        lead = net.start(0, [...])              # 0 is the coordinator, at net.address(0), with no limit
        workers = [net.start(n, [...]) for n in range(1, 5)]

Needs root and `ip` and `tc`; `allowed()` says why not. `netem` is not needed: the delay is the kernel's own.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

SUBNET = "10.213.7"
"""Addresses of the namespaces; nothing of it leaves this machine."""


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")


def allowed() -> str | None:
    """Why namespaces cannot be made here; None where they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} is not installed"
    try:
        with Namespaces(1, rate="1gbit"):
            return None
    except OSError as error:
        return str(error)


class Namespaces:
    """A coordinator (0) and workers (1, 2, ...), each in a network namespace with one link to a bridge.

    `rate` limits a worker's link in each direction; the coordinator's has no limit, unless `lead_rate` is given.
    """

    def __init__(self, workers: int, *, rate: str, lead_rate: str | None = None) -> None:
        self.workers, self.rate, self.lead_rate = workers, rate, lead_rate
        self._key = uuid4().hex[:5]
        self._bridge = f"shb{self._key}"
        self._processes: list[subprocess.Popen[Any]] = []

    def name(self, number: int) -> str:
        return f"shoal-{self._key}-{number}"

    def address(self, number: int) -> str:
        return f"{SUBNET}.{number + 1}"

    def __enter__(self) -> Self:
        try:
            _run("ip", "link", "add", self._bridge, "type", "bridge")
            _run("ip", "link", "set", self._bridge, "up")
            for number in range(self.workers + 1):
                self._add(number)
        except OSError:
            self._remove()
            raise
        return self

    def _add(self, number: int) -> None:
        name, inner, outer = self.name(number), f"shi{self._key}{number}", f"sho{self._key}{number}"
        _run("ip", "netns", "add", name)
        _run("ip", "link", "add", outer, "type", "veth", "peer", "name", inner)
        _run("ip", "link", "set", inner, "netns", name)
        _run("ip", "link", "set", outer, "master", self._bridge)
        _run("ip", "link", "set", outer, "up")
        inside = ("ip", "netns", "exec", name)
        _run(*inside, "ip", "addr", "add", f"{self.address(number)}/24", "dev", inner)
        _run(*inside, "ip", "link", "set", inner, "up")
        _run(*inside, "ip", "link", "set", "lo", "up")
        rate = self.rate if number else self.lead_rate
        if rate is not None:  # out of the namespace, and into it
            shape = ("root", "tbf", "rate", rate, "burst", "64kb", "latency", "200ms")
            _run(*inside, "tc", "qdisc", "add", "dev", inner, *shape)
            _run("tc", "qdisc", "add", "dev", outer, *shape)

    def start(
        self, number: int, command: Sequence[str], environment: Mapping[str, str] | None = None, **settings: Any
    ) -> subprocess.Popen[Any]:
        """Run a command inside; it ends with the namespaces."""
        env = {**os.environ, **(environment or {})}
        process = subprocess.Popen(["ip", "netns", "exec", self.name(number), *command], env=env, **settings)
        self._processes.append(process)
        return process

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        self._remove()

    def _remove(self) -> None:
        for number in range(self.workers + 1):
            for command in (
                ("ip", "link", "del", f"sho{self._key}{number}"), ("ip", "netns", "del", self.name(number))
            ):  # fmt: skip
                subprocess.run(command, capture_output=True, check=False)
        subprocess.run(("ip", "link", "del", self._bridge), capture_output=True, check=False)


_SERVE = """
import socket, sys
with socket.create_server((sys.argv[1], 9000)) as server:
    connection, _ = server.accept()
    total = 0
    while chunk := connection.recv(1 << 20):
        total += len(chunk)
    connection.sendall(b"!")
"""
_SEND = """
import socket, sys, time
for _ in range(100):
    try:
        connection = socket.create_connection((sys.argv[1], 9000)); break
    except OSError:
        time.sleep(0.05)
data, began = bytes(int(sys.argv[2])), time.perf_counter()
connection.sendall(data); connection.shutdown(socket.SHUT_WR); connection.recv(1)
print(8 * len(data) / (time.perf_counter() - began) / 1e6)
"""


def measured(net: Namespaces, sender: int, receiver: int, num_bytes: int = 5_000_000) -> float:
    """Mbit/s from one namespace to another, through a plain socket."""
    serve = net.start(receiver, [sys.executable, "-c", _SERVE, net.address(receiver)])
    send = net.start(
        sender, [sys.executable, "-c", _SEND, net.address(receiver), str(num_bytes)], stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    found = float(send.communicate(timeout=120)[0])
    serve.wait(timeout=10)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rate", default="100mbit")
    args = parser.parse_args()
    why = allowed()
    if why is not None:
        print(f"skipped: {why}")
        return
    with Namespaces(args.workers, rate=args.rate) as net:
        for number in range(1, args.workers + 1):
            up, down = measured(net, number, 0), measured(net, 0, number)
            print(f"worker {number}: {up:.1f} Mbit/s to the coordinator, {down:.1f} Mbit/s from it")


if __name__ == "__main__":
    main()
