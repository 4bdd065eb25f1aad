"""The loop: members join, ride, leave and are saved, while others wait.

Each round the ones who waited may join, every unit gets a turn up to its next event (or for a second or so), and what
happened is settled member by member. The loop knows nothing of how a tier trains, and a unit nothing of who waits.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from shoal.engine.planning.limits import Limits
from shoal.engine.planning.policy import Fifo, Policy, Ticket
from shoal.engine.planning.queue import Queue
from shoal.engine.runtime._turns import turn
from shoal.engine.runtime.unit_runner import UnitListener, UnitRunner
from shoal.engine.tiers.unit import Outcome, out_of_memory, words
from shoal.reporting.events import Event, happened
from shoal.utils import garbage_collection
from shoal.utils.interrupts import on_interrupt

if TYPE_CHECKING:
    from shoal.engine.members.member import Member
    from shoal.engine.planning.planner import Part
    from shoal.engine.runtime.commands import Controls
    from shoal.engine.runtime.planning_context import PlanningContext
    from shoal.engine.tiers.unit import Unit
    from shoal.reporting.callbacks import Callbacks, Ending
    from shoal.storage.run_folder import RunFolder

TURN_SECONDS = 1.0
"""A round's length, where nothing happens before."""
SAFER = 0.9
"""After memory was full: the share of what rode then that may ride from there on."""


class Run(UnitListener):
    """Members on one device: some ride, the others wait."""

    def __init__(
        self, members: Sequence[Member], planning: PlanningContext, *, policy: Policy | None = None,
        tell: Callable[[Event], None] | None = None, callbacks: Callbacks | None = None,
        folder: RunFolder | None = None, save_every: float = 60.0, controls: Controls | None = None,
        numbers: Iterator[int] | None = None, everybody: list[Member] | None = None,
        before_turn: Callable[[dict[int, int]], object] | None = None, between: Callable[[], object] | None = None,
    ) -> None:  # fmt: skip
        """A run of these members, of which those that have not ended wait.

        Args:
            members: What to train.
            planning: What is known of them.
            policy: Which goes first; by default the first that came.
            tell: Called with each event.
            callbacks: The user's, after each epoch and at each end.
            folder: Where members are saved, every `save_every` seconds.
            controls: Commands to the run while it is under way.
            numbers: Of its units; by default 1, 2, 3.
            everybody: All members, those of other processes and those that have ended too; members that are added
                while it runs are appended.
            before_turn: Called before each turn with the batches that each member will have had after it.
            between: Called once a round.
        """
        self.planning, self.folder, self.callbacks, self.controls = planning, folder, callbacks, controls
        self.members = {member.index: member for member in members}
        self._kept = set(self.members)
        """Whom the folder knows: not those that come later."""
        self.waiting = {m.index: m for m in members if m.status == "running"}
        self.runners: list[UnitRunner] = []
        self._listener = tell
        self._queue = Queue(policy or Fifo())
        self._turn_seconds = min(TURN_SECONDS, save_every / 2) if folder is not None else TURN_SECONDS
        self._save_every, self._saved = save_every, time.monotonic()
        self._unsaved: list[Member] = []
        self._changed = True
        self._limits = Limits()
        """Less than planned, once memory was full."""
        self._interrupted = False
        self._numbers = numbers or itertools.count(1)
        self.everybody = list(members) if everybody is None else everybody
        self._before_turn, self._between = before_turn, between
        for member in self.waiting.values():
            self._queue.add(planning.ticket(member, time.monotonic()))

    def go(self) -> None:
        """Train all members to their ends; what came of them is then in the members."""
        with on_interrupt(self.interrupt) if self.folder is not None else nullcontext():
            try:
                while self._obey():
                    self._admit()
                    self._turn()
                    self._save()
                    if self._between is not None:
                        self._between()
                    if self._interrupted:
                        raise KeyboardInterrupt
                self._save()
            except KeyboardInterrupt:
                self._cancel()
                raise
            finally:
                garbage_collection.thaw()
                if self.folder is not None:
                    self.folder.flush()

    def interrupt(self) -> None:
        """Save everybody after this turn, and stop."""
        self._interrupted = True

    def _cancel(self) -> None:
        if self._interrupted:
            self._save(now=True)
        for runner in self.runners:
            runner.cancel()
        for member in self.waiting.values():
            member.status = "cancelled"
        self.runners, self.waiting = [], {}

    # --- who rides --------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Let those join who should ride now, and take places from those who should not."""
        sliced = self._queue.policy.slice_seconds is not None
        if not self.waiting or not (self._changed or sliced) or not all(runner.unit.settled for runner in self.runners):
            return
        self._changed = False
        self._limits.lift({self.planning.request(member).key for member in (*self.waiting.values(), *self._running())})
        admission = self._queue.admit(self._fits, time.monotonic())
        if admission.leave:
            self._eject(set(admission.leave))
        joining = [self.waiting.pop(index) for index in admission.join]
        if joining:
            self._seat(joining)
        if not self.runners and not self._changed:
            self._give_up()

    def _fits(self, tickets: list[Ticket]) -> bool:
        members, room = [self.members[ticket.index] for ticket in tickets], self._room
        return len(tickets) <= self._limits.members and (room == math.inf or self.planning.bytes(members) <= room)

    def _running(self) -> list[Member]:
        return [member for runner in self.runners for member in runner.members]

    @property
    def _room(self) -> float:
        return min(self.planning.budget, self._limits.bytes)

    def _give_up(self) -> None:
        """Nobody rides and nobody fits: the first in line will not, however long it waits."""
        for index in list(self.waiting):
            member = self.waiting.pop(index)
            member.status, member.error = "failed", f"it {self.planning.too_large(member, self._room)}"
            self._queue.remove(index)
            self._tell_leave(member)  # and it is not saved so: with more memory a resume takes it on

    def _seat(self, members: list[Member]) -> None:
        """Give members places: beside others that do the same, or in units of their own."""
        seated = self.planning.seats(self.runners, members)
        for runner in {runner: None for runner, _ in seated}:
            runner.join([recipe for own, recipe in seated if own is runner])
        for runner, recipe in seated:
            self.planning.joined(runner, recipe.member)
            self._tell_join(runner, recipe.member)
        found = {recipe.member.index for _, recipe in seated}
        rest = [member for member in members if member.index not in found]
        built = self._units(rest) if rest else []
        for unit, part in built:
            runner = UnitRunner(unit, self, next(self._numbers))
            self.runners.append(runner)
            self.planning.boarded(runner, part)
            for member in runner.members:
                self._tell_join(runner, member)
        if built and self.planning.gpu:
            garbage_collection.freeze()

    def _units(self, members: list[Member]) -> list[tuple[Unit, Part]]:
        """Units of these members; none where memory does not hold them all, and then fewer are tried."""
        try:
            return self.planning.units(members)
        except Exception as error:
            if not out_of_memory(error):
                raise
            said = words(error)
        self.planning.executor.forget()
        self._changed = True
        running = self._running()
        if not running and len(members) == 1:
            members[0].error = f"memory was full ({said}) with nobody beside it; use a smaller network"
            members[0].status = "failed"
            self._limits.forget()
            self._queue.remove(members[0].index)
            self._tell_leave(members[0])
            return []
        fewer = [*running, *members[: len(members) // 2]]
        self._may_ride(fewer, [*running, *members], members)
        sizes = [len(members) // 2, len(members) - len(members) // 2]
        self.tell("split", unit=None, reason=f"memory was full ({said})", sizes=sizes)
        for member in members:
            self.waiting[member.index] = member
            self._queue.move(member.index, running=False, now=time.monotonic())
        return []

    def _tell_join(self, runner: UnitRunner, member: Member) -> None:
        predicted = self.planning.predicted(member)
        self.tell("join", member, tier=runner.unit.tier, unit=runner.number, size=len(runner.members), **predicted)

    def _eject(self, indices: set[int]) -> None:
        for runner in self.runners:
            slots = [slot for slot, member in enumerate(runner.members) if member.index in indices]
            for member in runner.eject(slots) if slots else []:
                self.waiting[member.index] = member
                self._unsaved.append(member)
                self.tell("preempt", member, by=self._queue.policy.name)
        self.runners = [runner for runner in self.runners if runner.members]

    # --- a round ----------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        self.runners = [runner for runner in self.runners if runner.ready()]
        self._seat(self.planning.renewals.take_out(self.runners, self.waiting.values()))
        if not self.runners:
            return
        apart = 1 if self.planning.gpu else len(self.runners)  # on a CPU one comes after the other
        seconds = max(min(0.02, self._turn_seconds), self._turn_seconds / apart)
        batches = [runner.next_batches(seconds) for runner in self.runners]
        if self._before_turn is not None:
            pairs = zip(self.runners, batches, strict=True)
            self._before_turn({m.index: m.batches + count for runner, count in pairs for m in runner.members})
        outcomes = turn(self.runners, batches, self.planning.executor, self._look, self.planning.renewals.look_within)
        full = [(r, o.full) for r, o in zip(self.runners, outcomes, strict=True) if o.full and r.members]
        self.runners += [own for runner in self.runners for own in self._separate(runner)]
        self.runners = [runner for runner in self.runners if runner.members]
        if full:
            self._make_room(*full[0])

    def _separate(self, runner: UnitRunner) -> list[UnitRunner]:
        """Rides of their own for members that cannot go on beside the others."""
        units = runner.separate()
        if units:
            self.tell("split", unit=runner.number, reason=units[0][1], sizes=[len(runner.members), *[1] * len(units)])
        runners = []
        for unit, reason in units:
            runners.append(UnitRunner(unit, self, next(self._numbers)))
            self.planning.boarded(runners[-1], self.planning.alone(unit.members[0], reason))
            self._tell_join(runners[-1], unit.members[0])
        return runners

    def _look(self, runner: UnitRunner, outcome: Outcome, done: int) -> None:
        """A ride's turn is over; what came of it is settled after this."""
        share = outcome.seconds / max(1, len(runner.members))
        for member in runner.members:
            left = self.planning.seconds_left(member, runner.batch_seconds / max(1, len(runner.members)))
            self._queue.rode(member.index, share, left)
        size = self.planning.noted(runner, outcome.seconds, done)
        self.tell(
            "turn", unit=runner.number, tier=runner.unit.tier, members=len(runner.members), batches=done,
            seconds=outcome.seconds, bytes=size,
        )  # fmt: skip

    def _make_room(self, runner: UnitRunner, said: str) -> None:
        """Memory was full: half of the ride's members wait until there is room, or all others do."""
        everybody = self._running()
        slots = list(range(len(runner.members)))
        reason = f"memory was full ({said})"
        if len(slots) > 1:
            half = slots[len(slots) // 2 :]
            sizes = [len(slots) - len(half), len(half)]
            gone = {runner.members[slot].index for slot in half}
        elif len(self.runners) > 1:
            gone = {member.index for other in self.runners if other is not runner for member in other.members}
            sizes = [1, len(gone)]
        else:
            member = runner.members[0]
            member.error = f"{reason} with nobody beside it; use a smaller batch_size, or accumulate"
            runner.leave({0: "failed"})
            self.runners = []
            self._limits.forget()
            return
        self.planning.full(runner.members)
        self.tell("split", unit=runner.number, reason=reason, sizes=sizes)
        self.planning.executor.forget()
        stay = [member for member in everybody if member.index not in gone]
        if self.planning.gpu:  # who stays is built anew: a smaller stack beside the one that fills it would not fit
            self._may_ride(stay, everybody, runner.members)
            gone |= {member.index for member in runner.members}
            self._changed = True
        else:
            self._may_ride(stay, everybody, runner.members, least=SAFER * self.planning.bytes(everybody))
        for index in gone:
            self._queue.move(index, running=False, now=time.monotonic())
        self._eject(gone)
        self.planning.executor.forget()

    def _may_ride(self, fewer: list[Member], all: list[Member], full: list[Member], least: float = 0.0) -> None:
        """From now on no more may ride than these, of all who did not fit; so many bytes in any case. `full`: those
        whose unit it was."""
        most = max(least, self.planning.bytes(fewer))
        alike = self.planning.bytes(fewer) >= self.planning.bytes(all)  # one alone is two rows, too
        kinds = {self.planning.request(member).key for member in full}
        self._limits.lower(most, len(fewer) if alike else math.inf, kinds)

    # --- what is told and saved -------------------------------------------------------------------------------------

    def tell(self, kind: str, member: Member | None = None, /, **data: Any) -> None:
        event = happened(kind, member, **data)
        if self._listener is not None:
            self._listener(event)

    def epoch(self, runner: UnitRunner, slot: int) -> Ending | None:
        member = runner.members[slot]
        self.tell("epoch", member, **member.history[-1])
        return None if self.callbacks is None else self.callbacks.after(member, partial(runner.unit.write_back, [slot]))

    def left(self, runner: UnitRunner, slot: int) -> Ending | None:
        member = runner.members[slot]
        ending = None if self.callbacks is None else self.callbacks.after(member)
        if ending is not None:
            member.status, member.error = ending.status, ending.error
        if member.status != "cancelled":
            self._gone(member)
            self._queue.remove(member.index)
        else:
            self._tell_leave(member)
        return ending

    def _gone(self, member: Member) -> None:
        self._changed = True
        self._unsaved.append(member)
        self._tell_leave(member)

    def _tell_leave(self, member: Member) -> None:
        self.tell("leave", member, status=member.status, error=member.error, steps=member.step, seconds=member.seconds)

    def _save(self, *, now: bool = False) -> None:
        """Write down where everybody is, when it is time; and members that have left, at once."""
        if self.folder is None:
            return
        start = time.monotonic()
        due = now or (start - self._saved >= self._save_every and not self.folder.busy)
        members, self._unsaved = self._unsaved, []
        members = [m for m in members if m.status == "running" or not self.folder.passing]
        if due:
            self._saved = start
            for runner in self.runners:
                if runner.unit.settled:
                    runner.unit.write_back()
                    members += runner.members
        members = [member for member in members if member.index in self._kept]
        if members:
            self.folder.save_many(members)
        if due:
            self.tell("checkpoint", members=len(members), seconds=time.monotonic() - start)

    # --- what it is told --------------------------------------------------------------------------------------------

    def _obey(self) -> bool:
        """Do what was asked for since the last round; whether there is something to train."""
        for order in self.controls.take() if self.controls is not None else []:
            order(self)
            self.planning.renewals.due = True
        return bool(self.waiting or self.runners)

    def end(self, index: int, status: str, error: str | None = None) -> bool:
        """End a member here and now; whether it was still under way."""
        if index in self.waiting:
            member = self.waiting.pop(index)
            member.status, member.error = status, error
            self._queue.remove(index)
            self._gone(member)
            return True
        runner = next((runner for runner in self.runners if self.members.get(index) in runner.members), None)
        if runner is None:
            return False
        slot = runner.members.index(self.members[index])
        (member := runner.members[slot]).error = error
        runner.leave({slot: status})
        if status == "cancelled":  # for good, and not until the run is resumed
            self._queue.remove(index)
            self._changed = True
            self._unsaved.append(member)
        self.runners = [other for other in self.runners if other.members]
        return True

    def add(self, member: Member) -> None:
        """One more member, which waits for its place."""
        self.planning.add([member])
        self._queue.add(self.planning.ticket(member, time.monotonic()))
        self.members[member.index] = self.waiting[member.index] = member
        self.everybody.append(member)
        self._changed = True

    def written(self, member: Member) -> Member:
        """A member with all that it has become."""
        for runner in self.runners:
            if member in runner.members:
                runner.unit.write_back([runner.members.index(member)])
        return member
