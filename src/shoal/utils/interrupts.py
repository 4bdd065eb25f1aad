"""Ctrl-C during a run: the first one lets the turn end, so that all can be saved; the second one does not wait."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any


@contextmanager
def on_interrupt(call: Callable[[], None]) -> Iterator[None]:
    """Inside: the first Ctrl-C makes this call, the second is as it was before. Only the main thread can do that, and
    only where the handler before it is one that Python can put back; elsewhere nothing changes."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return

    def note(number: int, frame: Any) -> None:
        call()
        signal.signal(signal.SIGINT, before)

    installed = False
    with suppress(ValueError):  # an interpreter beside the main one has no signals
        signal.signal(signal.SIGINT, note)
        installed = True
    try:
        yield
    finally:
        if installed:
            signal.signal(signal.SIGINT, before)
