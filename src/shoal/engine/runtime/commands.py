"""Commands to a run in progress, from any thread or from the run's supervisor. They are carried out between two
turns."""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

from shoal.engine.planning.planner import predict
from shoal.errors import ShoalError

if TYPE_CHECKING:
    from shoal.engine.runtime.run import Run
    from shoal.engine.runtime.unit_runner import UnitRunner
    from shoal.reporting.events import Event

WORTH = 0.95
"""A stack is kept if its predicted gain over its members one after another is at least this."""

TOO_FEW = "too few are left to gain from a stack"

Command = Callable[["Run"], Any]


class Supervisor(Protocol):
    """Decides during a run which members continue, as a search does.

    It is asked before the first round and after each one, in the run's own thread. A member with `pause_at` stops after
    that epoch. If `update` neither changes its `pause_at` nor ends it in the same round, it gives up its place and is
    in `run.paused` until `update` calls `run.unpause`.
    """

    def update(self, run: Run) -> None:
        """Inspect the run and decide: set `pause_at`, or call `run.end`, `run.unpause`, `run.add`."""


def supervise(run: Run, supervisor: Supervisor) -> None:
    """Let the supervisor decide. Members that it leaves at their pauses give up their places."""
    supervisor.update(run)
    members = [*(member for runner in run.runners for member in runner.members), *run.waiting.values()]
    run.paused |= {m.index: m for m in run.take_out({m.index for m in members if m.pausing}, "pause")}
    assert run.waiting or run.runners or not run.paused, "members are paused and no supervisor decides about them"
    for runner in [runner for runner in run.runners if _no_longer_pays(run, runner)]:
        runner.alone |= dict.fromkeys(runner.members, TOO_FEW)
        run.separate(runner)


def _no_longer_pays(run: Run, runner: UnitRunner) -> bool:
    """Return whether so few members are left in a stack that they are faster one by one; False if times must not
    decide."""
    planning = run.planning
    if planning.gpu or not planning.timed or runner.unit.tier != "stacked" or not runner.unit.at_step_boundary:
        return False
    gain = predict([planning.request(member) for member in runner.members]).get("gain", math.nan)
    return gain < WORTH or (math.isnan(gain) and len(runner.members) == 1)


class EndedError(ShoalError, RuntimeError):
    """Raised for a command that came too late: the run has ended."""


class Controls:
    """A queue of commands. Each is answered with what it returned or raised."""

    def __init__(self, *, keep_open: bool = False, live: Any = None) -> None:
        """Create an empty queue.

        Args:
            keep_open: A run without anything to train waits for commands until `finish`.
            live: The object to which callbacks give their commands.
        """
        self.live = live
        self.run: Run | None = None
        """The run, once it has begun. Only its own thread may use it."""
        self._keep_open = keep_open
        self._commands: queue.SimpleQueue[tuple[Command, Future[Any]]] = queue.SimpleQueue()
        self._open = True
        self._lock = threading.Lock()
        self._news, self._num_ends = threading.Condition(), 0

    def give(self, command: Command) -> Future[Any]:
        """Queue a command and return its answer; the answer is an EndedError if the run has ended."""
        answer: Future[Any] = Future()
        with self._lock:
            if self._open:
                self._commands.put((command, answer))
            else:
                answer.set_exception(_too_late())
        return answer

    def finish(self) -> None:
        """Let the run end when its jobs have ended; no more jobs are added."""
        self._keep_open = False
        self.give(lambda run: None)  # wakes the run if it waits for a command

    def carry_out(self, run: Run) -> bool:
        """Carry out the queued commands, and return whether there were any.

        A run that stays open and has nothing to train waits for one.
        """
        self.run, any_done = run, False
        while not self._commands.empty() or (self._keep_open and _idle(run)):
            if self._commands.empty():
                run.save()
            command, answer = self._commands.get()
            any_done = True
            try:
                result = command(run)
            except (
                BaseException
            ) as error:  # even sys.exit() in users' code is passed to the thread that gave the command
                answer.set_exception(error)
            else:
                answer.set_result(result)
        return any_done

    def listen(self, event: Event) -> None:
        """Handle the run's events: notify those who wait for a job to end."""
        if event.kind == "leave":
            self._wake_waiting()

    def _wake_waiting(self) -> None:
        with self._news:
            self._num_ends += 1
            self._news.notify_all()

    @property
    def num_ends(self) -> int:
        """How many jobs, and the run itself, have ended so far."""
        return self._num_ends

    def wait_for_an_end(self, num_ends: int, timeout: float | None) -> bool:
        """Wait until more than `num_ends` have ended; returns False on a timeout."""
        with self._news:
            return self._news.wait_for(lambda: self._num_ends > num_ends, timeout)

    def close(self) -> None:
        """Accept no more commands; those that were not carried out are answered with an EndedError."""
        with self._lock:
            self._open = False
        while not self._commands.empty():
            self._commands.get()[1].set_exception(_too_late())
        self._wake_waiting()


def _idle(run: Run) -> bool:
    """Return whether a run has nothing to train and would end."""
    return not (run.waiting or run.runners or run.interrupted)


def _too_late() -> EndedError:
    return EndedError("the run has ended; begin another one with shoal.start")
