"""A lock for global state of the process, such as torch's generator, so that several threads can have runs; and
control over which forked processes keep the file locks of their parent."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any


class ThreadLock:
    """A re-entrant lock that is free in a forked child, where the thread that held it does not exist."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: Any) -> None:
        self._lock.release()


one_at_a_time = ThreadLock()
"""Held while torch is patched, its own generator is used for a member, or Python state is restored."""


_lock_files: weakref.WeakSet[IO[str]] = weakref.WeakSet()
_keep = False
"""Whether forked processes currently keep lock files open."""


def close_in_children(file: IO[str]) -> None:
    """Make processes that are forked later close their copies of this file, which holds a lock.

    A file lock is held until the last copy is closed, and a worker of a DataLoader may outlive its killed parent.
    """
    _lock_files.add(file)


@contextmanager
def locks_kept() -> Iterator[None]:
    """Let processes that are forked inside this context keep the lock, since they write what it protects and end
    with it."""
    global _keep
    _keep = True
    try:
        yield
    finally:
        _keep = False


def _close_lock_files() -> None:
    for file in [] if _keep else list(_lock_files):
        file.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_lock_files)
