"""Orders to a run that is under way: given from any thread, carried out between two turns."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from shoal.errors import ShoalError

if TYPE_CHECKING:
    from shoal.engine.runtime.run import Run

Order = Callable[["Run"], Any]


class EndedError(ShoalError, RuntimeError):
    """An order came too late: the run has ended."""


class Controls:
    """A line of orders. Each is answered with what it returned or raised."""

    def __init__(self) -> None:
        self._orders: queue.SimpleQueue[tuple[Order, Future[Any]]] = queue.SimpleQueue()
        self._open = True
        self._lock = threading.Lock()

    def give(self, order: Order) -> Future[Any]:
        """Have an order carried out; EndedError in the answer where the run has ended."""
        answer: Future[Any] = Future()
        with self._lock:
            if self._open:
                self._orders.put((order, answer))
            else:
                answer.set_exception(_too_late())
        return answer

    def take(self) -> list[Callable[[Run], None]]:
        """The orders that have come."""
        found: list[Callable[[Run], None]] = []
        while not self._orders.empty():
            order, answer = self._orders.get()
            found.append(lambda run, order=order, answer=answer: _carry_out(run, order, answer))  # type: ignore[misc]
        return found

    def close(self) -> None:
        """Take no more; what has come and was not carried out is answered so."""
        with self._lock:
            self._open = False
        while not self._orders.empty():
            self._orders.get()[1].set_exception(_too_late())


def _carry_out(run: Run, order: Order, answer: Future[Any]) -> None:
    try:
        result = order(run)
    except BaseException as error:  # also sys.exit() in a model's code: whoever gave the order hears of it
        answer.set_exception(error)
    else:
        answer.set_result(result)


def _too_late() -> EndedError:
    return EndedError("the run has ended; begin another one with shoal.start")
