"""A placed training from its first to its last step, at the server: turns, checkpoints, events, the report."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from shoal.engine.runtime.unit_runner import UnitListener, UnitRunner
from shoal.engine.tiers.unit import Outcome
from shoal.errors import MemberError, PlaceError
from shoal.place.links import Link
from shoal.place.training.joining import StateLost
from shoal.place.training.members import WorkerLost, Workers
from shoal.place.training.roles import Built
from shoal.place.training.server import build_server
from shoal.place.training.units import AsynchronousUnit, PlacedUnit
from shoal.reporting.callbacks import Callbacks
from shoal.reporting.events import Listener, new_event
from shoal.utils.interrupts import on_interrupt
from shoal.utils.tables import duration, size

if TYPE_CHECKING:
    from shoal.place.placement import Placement
    from shoal.reporting.callbacks import Ending
    from shoal.storage.run_folder import RunFolder

TURN_SECONDS = 1.0
LOOK_TIMES = 50
"""The next check of the links comes after so many times the seconds that the last one took."""
MOST_LOST_STATES = 20
"""How many times a run may go back to its last checkpoint."""


@dataclass(kw_only=True, slots=True)
class PlacedReport:
    """What a placed training did and cost, predicted and measured."""

    mode: str
    workers: int
    cut: str
    steps: int = 0
    seconds: float = 0.0
    """Seconds of all steps, without validation."""
    seconds_measured: float = 0.0
    """Seconds of one step: the median, which is not affected by waits for workers that join or are lost."""
    seconds_predicted: float = 0.0
    """Predicted seconds of one step."""
    bytes_sent: int = 0
    """Bytes from the server to all workers at its sockets, including those for joining."""
    bytes_received: int = 0
    bytes_between: int = 0
    """Bytes that workers sent to each other."""
    bytes_measured: float = 0.0
    """Bytes of one step and worker, both ways, after the first step."""
    bytes_predicted: int = 0
    """Predicted bytes of one step and worker, both ways."""
    lost: list[dict[str, Any]] = field(default_factory=list)
    """Workers that were lost: in which step, why, and how long the run waited for them."""
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [
            f"{self.mode}: {self.workers} workers" + (f", cut after {self.cut}" if self.cut else ""),
            f"step     {duration(self.seconds_measured)} (predicted {duration(self.seconds_predicted)})",
            f"bytes    {size(int(self.bytes_measured))} for a worker and step (predicted {size(self.bytes_predicted)})",
        ]
        if self.lost:
            longest = max(entry["waited"] for entry in self.lost)
            lines.append(f"lost     {len(self.lost)} workers; the longest wait was {duration(longest)}")
        return "\n".join([*lines, *self.notes])


class PlacedRun(UnitListener):
    """The server's loop: turns of one member, until it has ended."""

    def __init__(
        self,
        built: Built,
        workers: Workers,
        placement: Placement,
        *,
        folder: RunFolder | None = None,
        save_every: float = 60.0,
        callbacks: Callbacks | None = None,
        notify: Listener | None = None,
        replan: Callable[[float], Placement | None] | None = None,
    ) -> None:
        """Create the run. `replan` returns another placement, or None, given how many times faster the links have
        become."""
        self.built, self.workers, self.member = built, workers, built.member
        self.server = build_server(built, workers)
        self.folder, self.save_every, self.callbacks = folder, save_every, callbacks
        self._notify = notify
        self._replan = replan
        self._link: Link | None = None
        self._drifts = 0
        self.next: Placement | None = None
        """The placement with which to continue after the links have changed."""
        self._snapshot: dict[str, Any] | None = None
        self._saved, self._next_look = time.monotonic(), 0.0
        self._interrupted = False
        self._lost_states = 0
        self.report = PlacedReport(
            mode=placement.mode, workers=built.roles.workers, cut=placement.cut_name,
            seconds_predicted=placement.seconds, bytes_predicted=placement.predicted.socket_bytes,
        )  # fmt: skip

    def go(self) -> None:
        """Train the member to its end; Ctrl-C saves it first."""
        with on_interrupt(self._interrupt) if self.folder is not None else nullcontext():
            while self.member.status == "running" and self.next is None:
                kind = PlacedUnit if self.built.roles.staleness is None else AsynchronousUnit
                runner = UnitRunner(kind(self.member, self.server), self, 1)
                self._report("join", tier="placed", unit=1, size=1)
                try:
                    self._train(runner)
                except StateLost as error:
                    self._go_back(error)
        self._finish()

    def _train(self, runner: UnitRunner) -> None:
        if self.built.held_by_workers and self._snapshot is None:
            runner.unit.write_back()
            self._take_snapshot()
        while runner.ready():
            steps = self.member.step
            outcome = self._turn(runner, runner.next_batches(min(TURN_SECONDS, self.save_every / 2)))
            self.report.seconds += outcome.seconds
            runner.finish_turn(outcome)
            self.report.steps += max(0, self.member.step - steps)
            self._save(runner)
            if self._interrupted:
                runner.cancel()
                raise KeyboardInterrupt
            if self.next is not None:
                return

    def _turn(self, runner: UnitRunner, batches: int) -> Outcome:
        runner.begin()
        runner.start()
        started, failed = time.perf_counter(), None
        try:
            runner.unit.run(batches)
        except (MemberError, StateLost, PlaceError) as error:
            cause = error.cause if isinstance(error, MemberError) else error
            if isinstance(cause, (StateLost, PlaceError)):
                self._keep_committed(runner)
                raise cause from None
            assert isinstance(error, MemberError)
            failed = error
        outcome = Outcome(time.perf_counter() - started, failed)
        done = self.member.place - runner._before[0]
        self._report("turn", unit=1, tier="placed", members=1, batches=done, seconds=outcome.seconds, bytes=None)
        return outcome

    def _keep_committed(self, runner: UnitRunner) -> None:
        """Save what was trained so far before the run ends with an error, if it is in this process."""
        if self.folder is None or self.built.held_by_workers or not self.member.at_step_boundary:
            return
        runner.finish_turn(Outcome(0.0))
        if self.member.status == "running":
            runner.unit.write_back()
            self.folder.save(self.member)

    def _save(self, runner: UnitRunner, *, now: bool = False) -> None:
        due = now or self._interrupted or time.monotonic() - self._saved >= self.save_every
        ended = not runner.members
        if not ended and (not due or not runner.unit.at_step_boundary):
            return
        self._saved = started = time.monotonic()
        if not ended:
            runner.unit.write_back()
            self._take_snapshot()
            self._look_at_link()
        if self.folder is not None:
            self.folder.save_many([self.member])
            self._report("checkpoint", members=1, seconds=time.monotonic() - started)

    def _take_snapshot(self) -> None:
        if self.built.held_by_workers:
            self._snapshot = copy.deepcopy(self.member.state())

    def _go_back(self, error: StateLost) -> None:
        """Continue from the last checkpoint, since state was lost with a worker."""
        self._lost_states += 1
        if self._snapshot is None or self._lost_states > MOST_LOST_STATES:
            raise PlaceError(f"{error}, {self._lost_states} times; check the workers and run this again") from None
        self.member.load_state(copy.deepcopy(self._snapshot))
        for worker in self.workers.live:
            worker.needs_state = True
        line = f"{error}; the run continues from step {self.member.step}"
        self.report.notes.append(line)
        self.workers.log(line)

    def _look_at_link(self) -> None:
        """Measure the links between two steps. If they have changed by more than a quarter, twice in a row, ask for
        another placement.

        It takes at most a fiftieth of the time.
        """
        began = time.monotonic()
        if began < self._next_look:
            return
        self.workers.check_paused()
        link = self._probe()
        now = time.monotonic()
        self._next_look = now + LOOK_TIMES * (now - began)
        if link is None or self._replan is None:
            return
        if self._link is None:
            self._link = link
            return
        self._drifts = self._drifts + 1 if self._link.drifted(link) else 0
        if self._drifts < 2:
            return
        times = link.up / self._link.up
        self._link, self._drifts = link, 0
        self.next = self._replan(times)
        decision = "the placement stays" if self.next is None else f"placed again: {self.next.predicted.describe()}"
        line = f"step {self.member.step}: the links are {times:.2f} times as fast as they were; {decision}"
        self.report.notes.append(line)
        self.workers.log(line)

    def _probe(self) -> Link | None:
        if self._replan is None or not self.workers.live:
            return None
        try:
            return self.workers.probe()
        except WorkerLost:
            return None  # the next step finds out which worker it is

    def _interrupt(self) -> None:
        self._interrupted = True

    def _finish(self) -> None:
        report, traffic = self.report, self.workers.traffic
        report.bytes_sent, report.bytes_received = traffic.sent, traffic.received
        report.bytes_between = self.workers.group_bytes
        snapshots = self.server.sent_bytes
        if len(snapshots) == 2:
            first, last = snapshots
            moved = last.moved - first.moved + 2 * (last.between - first.between)
            report.bytes_measured = moved / (last.batches - first.batches) / max(1, report.workers)
        ends = self.server.ended
        steps = [after - before for before, after in pairwise(ends)]
        report.seconds_measured = median(steps) if steps else 0.0
        report.lost = [asdict(lost) for lost in self.workers.lost]

    # --- events -------------------------------------------------------------------------------------------------------

    def _report(self, kind: str, /, **data: Any) -> None:
        if self._notify is not None:
            about = self.member if kind in ("join", "epoch", "leave") else None
            self._notify(new_event(kind, about, **data))

    def epoch(self, runner: UnitRunner, slot: int) -> Ending | None:
        self._report("epoch", **self.member.history[-1])
        if self.callbacks is None:
            return None
        return self.callbacks.after(self.member, partial(runner.unit.write_back, [slot]))

    def left(self, runner: UnitRunner, slot: int) -> Ending | None:
        member = self.member
        ending = None if self.callbacks is None else self.callbacks.after(member)
        if ending is not None:
            member.status, member.error = ending.status, ending.error
        self._report("leave", status=member.status, error=member.error, steps=member.step, seconds=member.seconds)
        return ending
