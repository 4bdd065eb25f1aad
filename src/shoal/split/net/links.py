"""One pair of processes, and how a worker finds its coordinator.

A link is a gloo process group of two ranks. We measured what it does when the other side is gone: a killed one raises
within milliseconds; a stopped one (SIGSTOP) raises when the wait's own time is over; and a wait can be ended early by
shutting the pair's socket down. So no wait is longer than its limit, and a lost worker costs only its own pair.

They meet in a TCPStore that the coordinator hosts. A worker takes a number there, writes down what it is and gets an
answer: no with the reason, or yes; then both build the pair under a name that is never used again.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch
import torch.distributed
from torch import Tensor
from torch._C._distributed_c10d import Store

from shoal.errors import ShoalError, SplitError
from shoal.split.net import _sockets
from shoal.split.net._sockets import Traffic
from shoal.split.net._wire import HEADER_BYTES, Header, Message

dist: Any = torch.distributed
CONNECT_SECONDS = 5.0
"""For the two sides of a new pair to find each other."""
ASK_SECONDS = 10.0
"""For a worker that took a number to say what it is."""
POLL_SECONDS = 0.02
FRAME_BYTES = 48
"""gloo's own words: the sender of a buffer writes two of them besides its bytes, the receiver one."""
_ASKS, _ASK, _ANSWER, _PAIR, _HERE = "shoal/asks", "shoal/ask/", "shoal/answer/", "shoal/pair/", "shoal/here"


class LinkLost(ShoalError):
    """The other side is gone, or did not answer in time."""


class Refused(SplitError):
    """The coordinator will not have this worker; the reason, in one line."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a coordinator is."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @staticmethod
    def parse(text: str, *, any_port: bool = False) -> Address:
        """From HOST:PORT."""
        host, colon, port = text.rpartition(":")
        if not colon or not host or not port.isdigit() or not (0 if any_port else 1) <= int(port) < 65536:
            raise SplitError(f"{text!r} is no address; give HOST:PORT, such as 10.0.0.1:29500")
        return Address(host, int(port))


def on_the_wire(message_bytes: int, payload: bool = True) -> tuple[int, int]:
    """Bytes at the sockets for one message of so many bytes: the sender's, and the receiver's."""
    buffers = 2 if payload else 1
    return message_bytes + 2 * FRAME_BYTES * buffers, FRAME_BYTES * buffers


class Link:
    """A pair of processes that send each other messages."""

    def __init__(self, group: Any, rank: int, names: frozenset[str]) -> None:
        self._group, self._rank, self._names = group, rank, names
        self._held: list[Tensor] = []
        self._last = Traffic()
        _sockets.keep_alive(names)

    @property
    def traffic(self) -> Traffic:
        """Bytes through its socket so far, as the kernel counts them; the last known ones once it is closed."""
        now = _sockets.traffic(self._names)
        self._last = now if now.both >= self._last.both else self._last
        return self._last

    def send(self, message: Message, seconds: float) -> None:
        """Send a message; LinkLost where it has not gone out in so many seconds."""
        header = torch.frombuffer(bytearray(message.header.to_bytes()), dtype=torch.uint8)
        buffers = [header, message.payload] if message.payload.numel() else [header]
        self._held = buffers  # gloo reads them until they are out, also when nobody waits any more
        until = time.monotonic() + seconds
        works = self._try(lambda: [self._group.send([buffer], 1 - self._rank, 0) for buffer in buffers])
        for work in works:
            self._wait(work, until)

    def receive(self, seconds: float) -> Message:
        """The next message, checked; LinkLost where none has come in so many seconds."""
        until = time.monotonic() + seconds
        header = Header.from_bytes(bytes(self._fill(HEADER_BYTES, until).numpy()))
        message = Message(header, self._fill(header.description_bytes + header.body_bytes, until))
        message.check()
        return message

    def _fill(self, num_bytes: int, until: float) -> Tensor:
        buffer = torch.empty(num_bytes, dtype=torch.uint8)
        if num_bytes:
            self._held = [buffer]
            self._wait(self._try(lambda: self._group.recv([buffer], 1 - self._rank, 0)), until)
        return buffer

    def _wait(self, work: Any, until: float) -> None:
        self._try(lambda: work.wait(timedelta(seconds=max(until - time.monotonic(), 0.001))))

    def _try(self, do: Callable[[], Any]) -> Any:
        if self._group is None:
            raise LinkLost("the connection is closed")
        try:
            return do()
        except RuntimeError as error:
            late = "imed out" in str(error)
            raise LinkLost("it did not answer in time" if late else "the connection was closed") from error

    def cut(self) -> None:
        """End it, whoever waits for it."""
        self._last = self.traffic
        _sockets.cut(self._names)

    def close(self) -> None:
        """End it, and let go of what gloo holds for it as soon as nobody waits any more."""
        if self._group is not None:
            self.cut()
            self._group = None


def _pair(store: Any, name: str, rank: int, address: str, port: int) -> Link:
    """This side of a new pair. `address` is this side's own; sockets at `port` are the store's."""
    before = _sockets.connections()
    options = dist.ProcessGroupGloo._Options()
    options._timeout, options._threads = timedelta(seconds=CONNECT_SECONDS), 1
    try:
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        group = dist.ProcessGroupGloo(_Meeting(store, f"{_PAIR}{name}/"), rank, 2, options)
    except RuntimeError as error:
        raise LinkLost("it did not connect") from error
    new = {key: found for key, found in _sockets.connections().items() if key not in before}
    return Link(group, rank, frozenset(key for key, at in new.items() if port not in (at.local, at.remote)))


class _Meeting(Store):
    """What gloo reads and writes while a pair is built. It trusts what it reads: half of it would be a crash."""

    def __init__(self, store: Any, prefix: str) -> None:
        super().__init__()
        self._store, self._prefix = store, prefix

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._prefix + key, value)

    def get(self, key: str) -> bytes:
        found = bytes(self._store.get(self._prefix + key))
        host = int.from_bytes(found[:8], "little")  # length and name of the host, length and addresses of its pairs
        pairs = int.from_bytes(found[8 + host : 16 + host], "little")
        if len(found) < 16 or 16 + host + pairs > len(found):
            raise RuntimeError(f"the address of the other side is {len(found)} bytes long, which is not all of it")
        return found

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=CONNECT_SECONDS)) -> None:
        self._store.wait([self._prefix + key for key in keys], timeout)


class Listener:
    """Where workers come in: hosts the store, and answers those who ask."""

    def __init__(self, address: Address, offer: Mapping[str, Any] | None = None) -> None:
        if not dist.is_available() or not dist.is_gloo_available():
            raise SplitError("this torch was built without gloo; install one that has it, such as from pytorch.org")
        try:
            _bindable(address)
            self._server: Any = dist.TCPStore(
                address.host, address.port, is_master=True, timeout=timedelta(seconds=10), wait_for_workers=False
            )
        except (RuntimeError, ValueError, OSError) as error:
            raise SplitError(
                f"cannot listen at {address} ({_reason(error)}); use a free port of this machine"
            ) from None
        self.address = Address(address.host, self._server.port)
        self._server.set(_HERE, json.dumps(dict(offer or {})))
        self._known = 0
        self._silent: dict[int, float] = {}
        """Numbers that were taken by somebody who has not said yet who it is, and since when."""
        self._closed = threading.Event()

    def next(self) -> dict[str, Any] | None:
        """Wait for the next worker that asks; None once the door is closed."""
        while not self._closed.is_set():
            taken = int(self._server.add(_ASKS, 0))
            self._silent |= {number: time.monotonic() for number in range(self._known, taken)}
            self._known = taken
            for number, since in list(self._silent.items()):
                if self._server.check([f"{_ASK}{number}"]):
                    del self._silent[number]
                    if (ask := _parsed(bytes(self._server.get(f"{_ASK}{number}")))) is not None:
                        return ask
                elif time.monotonic() - since > ASK_SECONDS:
                    del self._silent[number]
            self._closed.wait(POLL_SECONDS)
        return None

    def refuse(self, ask: dict[str, Any], why: str) -> None:
        self._server.set(_ANSWER + ask["id"], json.dumps({"no": why}))

    def admit(self, ask: dict[str, Any]) -> Link:
        """Say yes and build the pair; LinkLost where the worker is not there any more."""
        self._server.set(_ANSWER + ask["id"], json.dumps({"yes": True}))
        return _pair(self._server, ask["id"], 0, str(ask.get("reached") or self.address.host), self.address.port)

    def close(self) -> None:
        """No more workers: `next` returns None."""
        self._closed.set()

    def end(self) -> None:
        """Stop listening, once nobody waits for the next one."""
        self._server = None


def _parsed(text: bytes) -> dict[str, Any] | None:
    try:
        ask = json.loads(text)
    except ValueError:
        return None
    return ask if isinstance(ask, dict) and isinstance(ask.get("id"), str) else None


def _bindable(address: Address) -> None:
    """OSError where this is no free address of this machine."""
    family, kind, protocol, _, place = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        trial.bind(place)


def read_offer(where: Address, seconds: float) -> dict[str, Any]:
    """What a coordinator tells everybody: the settings of its run. LinkLost where there is none."""
    _reach(where, seconds)
    try:
        return dict(json.loads(_store(where).get(_HERE)))
    except RuntimeError as error:
        raise LinkLost(f"{where} is no coordinator of Shoal's ({_reason(error)}); check the address") from None


def _store(where: Address) -> Any:
    """A connection to the coordinator's store; Refused where it is somebody else's."""
    store = dist.TCPStore(
        where.host, where.port, is_master=False, timeout=timedelta(seconds=30), wait_for_workers=False
    )  # fmt: skip
    if not store.check([_HERE]):
        raise Refused(f"{where} is no coordinator of Shoal's; check the address")
    return store


def connect(where: Address, ask: dict[str, Any], seconds: float) -> Link:
    """Ask to join, and join.

    LinkLost where nobody was there for so many seconds, Refused where the coordinator says no.
    """
    here, there = _reach(where, seconds)
    name = f"{socket.gethostname()}-{os.getpid()}-{uuid4().hex[:12]}"
    try:
        store = _store(where)
        number = int(store.add(_ASKS, 1)) - 1
        store.set(f"{_ASK}{number}", json.dumps({**ask, "id": name, "reached": there}))
        store.wait([_ANSWER + name], timedelta(seconds=seconds))
        answer = json.loads(store.get(_ANSWER + name))
    except RuntimeError as error:
        raise LinkLost(f"the coordinator at {where} did not answer ({_reason(error)})") from error
    if "no" in answer:
        raise Refused(answer["no"])
    return _pair(store, name, 1, here, where.port)


def _reach(where: Address, seconds: float) -> tuple[str, str]:
    """Wait until somebody listens there; the two addresses of the way: ours and theirs."""
    until = time.monotonic() + seconds
    while True:
        try:
            with socket.create_connection((where.host, where.port), timeout=2.0) as found:
                return found.getsockname()[0], found.getpeername()[0]
        except OSError as error:
            if time.monotonic() > until:
                reason = error.strerror or error
                raise LinkLost(f"no coordinator at {where} for {seconds:g} s ({reason}); start it first") from None
            time.sleep(0.1)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
