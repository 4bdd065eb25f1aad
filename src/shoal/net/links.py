"""A TCP connection between the coordinator, or server, and a worker: how it is made, and what it sends.

Every worker has its own connection, so a worker that dies, stalls or is cut off does not affect the others. Every wait
has a time limit, and `cut` ends the waits of other threads at once.
"""

from __future__ import annotations

import json
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ShoalError, SplitError, describe
from shoal.net.messages import ANSWER, ASK, HEADER_BYTES, Header, Message, WireError, text_message

ASK_SECONDS = 10.0
"""How long a worker that has connected may take to send its request."""
_KEEP_ALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""When and how often the kernel checks whether a silent machine is still there, in seconds."""
_LOST_SECONDS = 30
"""How long the other machine may take to confirm what it was sent, as `_KEEP_ALIVE` allows a silent one. The default
of Linux is about 15 minutes."""


class LinkLost(ShoalError):
    """The other side is gone, or did not answer in time."""


class Refused(SplitError):
    """The coordinator does not accept this worker. The message says why."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that were sent to workers and received from them, without TCP and IP headers."""

    sent: int = 0
    received: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.sent + other.sent, self.received + other.received)

    @property
    def both(self) -> int:
        return self.sent + self.received


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a coordinator."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @staticmethod
    def parse(text: str, *, any_port: bool = False) -> Address:
        """Parse HOST:PORT."""
        host, colon, port = text.rpartition(":")
        if not colon or not host or not port.isdigit() or not (0 if any_port else 1) <= int(port) < 65536:
            raise SplitError(f"{text!r} is not an address; give HOST:PORT, such as 10.0.0.1:29500")
        return Address(host, int(port))


class Link:
    """One side of a connection: it sends and receives messages, and counts their bytes in `traffic`."""

    def __init__(self, connection: socket.socket) -> None:
        self._sent = self._received = 0  # each is counted by the thread that sends or receives
        self._socket = connection
        connection.setblocking(False)  # each direction waits with its own time limit
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * _LOST_SECONDS))

    @property
    def traffic(self) -> Traffic:
        """The bytes so far, including those of incomplete messages."""
        return Traffic(self._sent, self._received)

    def forget_traffic(self) -> None:
        """Restart the count of bytes."""
        self._sent = self._received = 0

    def send(self, message: Message, seconds: float) -> None:
        """Send a message, or raise a LinkLost if it is not sent within `seconds`."""
        until = time.monotonic() + seconds
        with self._errors(), self._sending:
            for data in (message.header.to_bytes(), message.payload.numpy().data):
                self._write(memoryview(data), until)

    def _write(self, remaining: memoryview, until: float) -> None:
        while remaining:
            try:
                count = self._socket.send(remaining)
                remaining = remaining[count:]
                self._sent += count
            except BlockingIOError:
                self._wait(selectors.EVENT_WRITE, until)

    def _wait(self, event: int, until: float) -> None:
        """Wait until the socket can be read or written, or raise a TimeoutError."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, event)
            if not selector.select(max(until - time.monotonic(), 0.001)):
                raise TimeoutError

    def receive(self, seconds: float) -> Message:
        """Return the next message, checked, or raise a LinkLost if none comes within `seconds`."""
        until = time.monotonic() + seconds
        with self._errors(), self._receiving:
            header = Header.from_bytes(bytes(self._read(HEADER_BYTES, until).numpy()))
            message = Message(header, self._read(header.description_bytes + header.body_bytes, until))
        message.check()
        return message

    def _read(self, num_bytes: int, until: float) -> Tensor:
        buffer = torch.empty(num_bytes, dtype=torch.uint8)
        remaining = memoryview(buffer.numpy().data)
        while remaining:
            try:
                count = self._socket.recv_into(remaining)
            except BlockingIOError:
                self._wait(selectors.EVENT_READ, until)
                continue
            if not count:
                raise ConnectionError
            remaining = remaining[count:]
            self._received += count
        return buffer

    @property
    def local_host(self) -> str:
        """This side's address, as the other side sees it."""
        return str(self._socket.getsockname()[0])

    @property
    def remote_host(self) -> str:
        """The other side's address."""
        return str(self._socket.getpeername()[0])

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise LinkLost("it did not answer in time") from error
        except (OSError, ValueError) as error:  # waiting for a closed socket raises a ValueError
            raise LinkLost("the connection was closed") from error

    def cut(self) -> None:
        """End the connection, so that waits on both sides raise at once."""
        with suppress(OSError):  # the connection has ended already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection, and free it once no thread waits for it."""
        self.cut()
        with self._sending, self._receiving:
            self._socket.close()


class Listener:
    """Accepts connections, and calls `answer(link, request)` for each in a separate thread.

    `answer` sends the answer and returns whether the link stays open.
    """

    def __init__(self, address: Address, answer: Callable[[Link, dict[str, Any]], bool]) -> None:
        try:
            family = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0][0]
            self._server = socket.create_server((address.host, address.port), family=family)
        except OSError as error:
            reason = error.strerror or error
            raise SplitError(f"cannot listen at {address} ({reason}); use a free port of this machine") from None
        self.address = Address(address.host, self._server.getsockname()[1])
        self._answer = answer
        self._threads: list[threading.Thread] = []
        self._accept_thread = threading.Thread(target=self._accept, name="shoal-accept", daemon=True)
        self._accept_thread.start()

    def _accept(self) -> None:
        with suppress(OSError):  # the listener was closed
            while True:
                link = Link(self._server.accept()[0])
                thread = threading.Thread(target=self._receive_request, args=(link,), daemon=True)
                self._threads = [thread, *(t for t in self._threads if t.is_alive())]
                thread.start()

    def _receive_request(self, link: Link) -> None:
        stays_open = False
        with suppress(ShoalError, ValueError, TypeError):  # not a worker, or it has left
            stays_open = self._answer(link, dict(json.loads(link.receive(ASK_SECONDS).text)))
        if not stays_open:
            link.close()

    def close(self) -> None:
        """Stop listening."""
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # works even if forked processes share the socket
        self._accept_thread.join()
        self._server.close()
        for thread in self._threads:
            thread.join(ASK_SECONDS)


def send_answer(link: Link, **answer: Any) -> None:
    """Answer a worker's request."""
    link.send(text_message(ANSWER, json.dumps(answer)), ASK_SECONDS)


def read_offer(where: Address, seconds: float) -> dict[str, Any]:
    """Return the settings of a coordinator's run, or raise a LinkLost if there is no coordinator."""
    link, answer = _request(where, {"want": "offer"}, seconds)
    link.close()
    return dict(answer.get("offer") or {})


def connect(where: Address, ask: dict[str, Any], seconds: float) -> Link:
    """Ask to join a run, and return the link.

    Raises a LinkLost if no coordinator answers within `seconds`, and a Refused if it does not accept.
    """
    link, answer = _request(where, ask, seconds)
    if "no" in answer:
        link.close()
        raise Refused(str(answer["no"]))
    link.forget_traffic()
    return link


def _request(where: Address, ask: dict[str, Any], seconds: float) -> tuple[Link, dict[str, Any]]:
    """Connect, send a request, and return the link and the answer."""
    link = Link(_reach(where, seconds))
    try:
        link.send(text_message(ASK, json.dumps(ask)), seconds)
        return link, dict(json.loads(link.receive(seconds).text))
    except LinkLost as error:
        link.close()
        raise LinkLost(f"the coordinator at {where} did not answer ({describe(error)})") from error
    except (WireError, ValueError, TypeError):
        link.close()
        raise Refused(f"{where} is not a coordinator of Shoal; check the address") from None


def _reach(where: Address, seconds: float) -> socket.socket:
    """Connect as soon as a coordinator listens at the address."""
    until = time.monotonic() + seconds
    while True:
        try:
            connection = socket.create_connection((where.host, where.port), timeout=2.0)
            if connection.getsockname() != connection.getpeername():
                return connection
            connection.close()  # a port without a listener can connect to itself
        except OSError as error:
            if time.monotonic() > until:
                reason = error.strerror or error
                raise LinkLost(f"no coordinator at {where} for {seconds:g} s ({reason}); start it first") from None
        time.sleep(0.1)
