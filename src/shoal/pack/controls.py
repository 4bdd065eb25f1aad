"""Orders to a run that is under way: given from any thread, carried out between two turns."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.pack.run import Run

Order = Callable[["Run"], Any]


class Controls:
    """A line of orders. Each is answered with what it returned or raised."""

    def __init__(self) -> None:
        self._orders: queue.SimpleQueue[Callable[[Run], None]] = queue.SimpleQueue()
        self._open = True
        self._lock = threading.Lock()

    def give(self, order: Order) -> Future[Any]:
        """Have an order carried out; RuntimeError in the answer where the run has ended."""
        answer: Future[Any] = Future()

        def carry_out(run: Run) -> None:
            try:
                answer.set_result(order(run))
            except Exception as error:
                answer.set_exception(error)

        with self._lock:
            if self._open:
                self._orders.put(carry_out)
            else:
                answer.set_exception(RuntimeError("the run has ended"))
        return answer

    def take(self) -> list[Callable[[Run], None]]:
        """The orders that have come."""
        found = []
        while not self._orders.empty():
            found.append(self._orders.get())
        return found

    def close(self) -> list[Callable[[Run], None]]:
        """Take no more; what has come is given back."""
        with self._lock:
            self._open = False
        return self.take()
