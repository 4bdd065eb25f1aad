"""Queues and events of plain pipes, for a DataLoader and workers that are started by another process.

The locks of multiprocessing's own queues cannot be sent to a process that exists. Here each pipe has one process that
writes and one that reads, so that it needs none.
"""

from __future__ import annotations

import multiprocessing
import queue
import sys
import threading
import traceback
from collections import deque
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any


@dataclass(slots=True)
class Count:
    """A number of batches."""

    value: int = 0
    closed: bool = False
    """Whether there will be no more."""


class Results:
    """The results of all workers: a pipe of each."""

    def __init__(self) -> None:
        self.readers: dict[Connection, Count] = {}
        self._ready: deque[Any] = deque()
        self._own: deque[Any] = deque()
        """What this process itself has put."""
        self._wake, self._waker = multiprocessing.Pipe(duplex=False)

    def get(self, timeout: float | None = None) -> Any:
        """Return the next result, or raise queue.Empty, also if a worker has ended."""
        if not self._ready:
            self._ready.extend(wait([*self.readers, self._wake], timeout))
        if not self._ready:
            raise queue.Empty
        reader = self._ready.popleft()
        if reader is self._wake:
            reader.recv_bytes()
            return self._own.popleft()
        try:
            result = reader.recv()
        except (EOFError, ConnectionResetError):
            self.readers.pop(reader).closed = True
            reader.close()
            raise queue.Empty from None
        self.readers[reader].value += 1
        return result

    def put(self, value: Any) -> None:
        self._own.append(value)
        self._waker.send_bytes(b"1")

    def cancel_join_thread(self) -> None:
        """Do nothing: it has no thread."""

    def close(self) -> None:
        for pipe in (*self.readers, self._wake, self._waker):
            pipe.close()
        self.readers = {}


class Sender:
    """The end of a pipe into which objects are put. A thread of its own sends them."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._values: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, value: Any) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._send, daemon=True)
            self._thread.start()
        self._values.put(value)

    def _send(self) -> None:
        while (value := self._values.get()) is not _LAST:
            try:
                message = ForkingPickler.dumps(value)
            except Exception:  # it cannot be pickled, or there are no more files; who waits for it sees the pipe's end
                traceback.print_exc()
                break
            value = None  # frees it
            try:
                self._pipe.send_bytes(message)
            except OSError:  # nobody reads it any more
                break
        self._pipe.close()

    def cancel_join_thread(self) -> None:
        """Do nothing: nobody waits for its thread."""

    def close(self) -> None:
        if self._thread is None:
            self._pipe.close()
        else:
            self._values.put(_LAST)


_LAST = object()


class Indices(Sender):
    """The queue of one worker's indices, as the process that trains has it."""

    def __init__(self) -> None:
        self.reader, writer = multiprocessing.Pipe(duplex=False)
        super().__init__(writer)
        self.asked = 0
        """The number of batches that the worker was asked for."""

    def put(self, value: Any) -> None:
        self.asked += value is not None
        super().put(value)


class Receiver:
    """A worker's end of the queue of its indices."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def get(self, timeout: float | None = None) -> Any:
        if not self._pipe.poll(timeout):
            raise queue.Empty
        try:
            return self._pipe.recv()
        except (EOFError, OSError):
            sys.exit(1)  # the process that trains is gone


class Done:
    """An event that the process that trains sets, and of which workers have the other end."""

    def __init__(self) -> None:
        self.reader, self._writer = multiprocessing.Pipe(duplex=False)
        self._set = False

    def set(self) -> None:
        if not self._set:
            self._set = True
            self._writer.send_bytes(b"1")

    def is_set(self) -> bool:
        return self._set


class Flag:
    """A worker's end of an event."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def is_set(self) -> bool:
        return self._pipe.poll(0)  # what comes is never read, since all workers share it
