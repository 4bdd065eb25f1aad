"""A lock for global state of the process, such as torch's generator, so that runs in several threads can coexist."""

from __future__ import annotations

import os
import threading
from typing import Any


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
