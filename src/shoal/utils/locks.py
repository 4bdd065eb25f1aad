"""Locks: one for global state of the process, such as torch's generator, so that runs in several threads can coexist;
and which forked processes hold the file locks of their parent."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any


class ThreadLock:
    """A re-entrant lock. In a forked child it is free: the thread that held it is not there."""

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
"""Held while torch is patched, its own generator is lent to a member, or Python state is put back."""


_lock_files: weakref.WeakSet[IO[str]] = weakref.WeakSet()
_keep = False
"""Whether forked processes keep lock files open now."""


def close_in_children(file: IO[str]) -> None:
    """Have processes that are forked from here on close their copies of this file, which holds a lock.

    A file lock is held until the last copy is closed, and a worker of a DataLoader may outlive its killed parent.
    """
    _lock_files.add(file)


@contextmanager
def locks_kept() -> Iterator[None]:
    """Inside, a forked process keeps its copies: one that writes what the lock protects, and ends with its parent."""
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
