"""Ctrl-C during a run: the first lets the current turn end, so that everything can be saved; the second does not
wait."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any


@contextmanager
def on_interrupt(call: Callable[[], None]) -> Iterator[None]:
    """Call `call` at the first Ctrl-C inside this context, and handle the second as before.

    Nothing changes outside the main thread, or if Python cannot restore the previous handler.
    """
    old_handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or old_handler is None:
        yield
        return

    def handle(number: int, frame: Any) -> None:
        call()
        signal.signal(signal.SIGINT, old_handler)

    installed = False
    with suppress(ValueError):  # subinterpreters have no signals
        signal.signal(signal.SIGINT, handle)
        installed = True
    try:
        yield
    finally:
        if installed:
            signal.signal(signal.SIGINT, old_handler)
