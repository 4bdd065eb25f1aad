"""The run loop: members join, train, leave and are saved, while others wait.

In each round waiting members may join, every unit runs up to its next event (or for a second or so), and the results
are processed member by member. The loop depends on no tier, and units know nothing of waiting members.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from shoal.engine.members.evaluation_weights import finish_weights
from shoal.engine.planning.policy import Fifo, Policy, Ticket
from shoal.engine.planning.queue import MemberLimit, Queue
from shoal.engine.runtime._checkpointing import Checkpointing
from shoal.engine.runtime.commands import supervise
from shoal.engine.runtime.unit_runner import UnitListener, UnitRunner, turn
from shoal.engine.tiers.unit import Outcome, memory_message, out_of_memory
from shoal.reporting.events import Listener, new_event
from shoal.utils import garbage_collection
from shoal.utils.interrupts import on_interrupt

if TYPE_CHECKING:
    from shoal.engine.members.member import Member
    from shoal.engine.planning.planner import Part
    from shoal.engine.runtime.commands import Controls, Supervisor
    from shoal.engine.runtime.planning_context import PlanningContext
    from shoal.engine.tiers.unit import Unit
    from shoal.reporting.callbacks import Callbacks, Ending
    from shoal.storage.run_folder import RunFolder

TURN_SECONDS = 1.0
"""The length of a round if no event ends it earlier."""


class Run(UnitListener):
    """Members on one device: some run, the others wait."""

    def __init__(
        self, members: Sequence[Member], planning: PlanningContext, *, policy: Policy | None = None,
        notify: Listener | None = None, callbacks: Callbacks | None = None, folder: RunFolder | None = None,
        save_every: float = 60.0, controls: Controls | None = None, numbers: Iterator[int] | None = None,
        all_members: list[Member] | None = None, before_turn: Callable[[dict[int, int]], object] | None = None,
        between: Callable[[], object] | None = None, supervisor: Supervisor | None = None,
    ) -> None:  # fmt: skip
        """Create a run of these members. Those that have not ended wait at first.

        Args:
            members: The members to train.
            planning: What is known about them.
            policy: Decides which members run first; by default in order of arrival.
            notify: Called with each event.
            callbacks: The user's callbacks, called after each epoch and at each end.
            folder: Where members are saved, every `save_every` seconds.
            controls: Commands to the run while it is in progress.
            numbers: Numbers for its units; by default 1, 2, 3.
            all_members: All members, also ended ones and those of other processes; added members come last.
            before_turn: Called before each turn with the number of batches that each member will have trained after it.
            between: Called once a round, in runs without callbacks.
            supervisor: Decides between rounds which paused members continue.
        """
        self.planning, self.folder, self.callbacks, self.controls = planning, folder, callbacks, controls
        self.members = {member.index: member for member in members}
        self.saves = folder is not None and not folder.passing
        self.paused: dict[int, Member] = {}
        """Members that wait until the supervisor lets them continue or ends them."""
        self.waiting = {m.index: m for m in members if m.status == "running"}
        self.runners: list[UnitRunner] = []
        self._notify = notify
        self._queue = Queue(policy or Fifo())
        self.turn_seconds = min(TURN_SECONDS, save_every / 2) if folder is not None else TURN_SECONDS
        self.checkpointing = Checkpointing(folder, save_every, members)
        self._changed = True
        self._limit = MemberLimit()
        self.interrupted = False
        self._numbers = numbers or itertools.count(1)
        self.all_members = list(members) if all_members is None else all_members
        self._before_turn, self._supervisor = before_turn, supervisor
        self._between = between if callbacks is None else partial(callbacks.after_round, self.end)
        for member in self.waiting.values():
            self._queue.add(planning.ticket(member, time.monotonic()))

    def go(self) -> None:
        """Train all members to their ends. The results are in the members."""
        with on_interrupt(self.interrupt) if self.folder is not None else nullcontext():
            try:
                while self._has_work():
                    self._admit()
                    self._turn()
                    self.save()
                    if self._between is not None:
                        self._between()
                    if self.interrupted:
                        raise KeyboardInterrupt
                self.save()
            except KeyboardInterrupt:
                self._cancel()
                raise
            finally:
                garbage_collection.thaw()
                if self.folder is not None:
                    self.folder.flush()

    def interrupt(self) -> None:
        """Save all members after this turn, and stop."""
        self.interrupted = True

    def _cancel(self) -> None:
        if self.interrupted:
            self.save(now=True)
        for runner in self.runners:
            runner.cancel()
        for member in (*self.waiting.values(), *self.paused.values()):
            member.status = "cancelled"
        self.runners, self.waiting, self.paused = [], {}, {}

    # --- which members run --------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Start members that should run now, and move those that should not back to the queue."""
        has_slices = self._queue.policy.slice_seconds is not None
        if (
            not self.waiting
            or not (self._changed or has_slices)
            or not all(runner.unit.at_step_boundary for runner in self.runners)
        ):
            return
        self._changed = False
        self._limit.lift({self.planning.request(member).key for member in (*self.waiting.values(), *self._running())})
        admission = self._queue.admit(self._fits, time.monotonic())
        self._eject(set(admission.leave))
        joining = [self.waiting.pop(index) for index in admission.join]
        if joining:
            self._place(joining)
        if not self.runners and not self._changed:
            self._give_up()

    def _fits(self, tickets: list[Ticket]) -> bool:
        return len(tickets) <= self._limit.most and self.planning.fits([self.members[t.index] for t in tickets])

    def _running(self) -> list[Member]:
        return [member for runner in self.runners for member in runner.members]

    def _give_up(self) -> None:
        """End the waiting members, since none runs and none of them fits."""
        for index in list(self.waiting):
            member = self.waiting.pop(index)
            member.error = f"it {self.planning.too_large(member)}"
            self._fail(member)

    def _fail(self, member: Member) -> None:
        """End a member that never ran. It is not saved as failed, so that a resume with more memory trains it."""
        member.status = "failed"
        self._queue.remove(member.index)
        self.report_leave(member)

    def _place(self, members: list[Member]) -> None:
        """Put members into existing units that accept them, or into new ones."""
        joining = self.planning.joinable_units(self.runners, members)
        for runner in {runner: None for runner, _ in joining}:
            runner.join([recipe for target, recipe in joining if target is runner])
        for runner, recipe in joining:
            self.planning.record.add_member(runner, recipe.member)
            self._report_join(runner, recipe.member)
        joined_indices = {recipe.member.index for _, recipe in joining}
        remaining = [member for member in members if member.index not in joined_indices]
        built = self._units(remaining) if remaining else []
        for unit, part in built:
            runner = UnitRunner(unit, self, next(self._numbers))
            self.runners.append(runner)
            self.planning.record.add(runner, part)
            for member in runner.members:
                self._report_join(runner, member)
        if built:
            garbage_collection.freeze()

    def _units(self, members: list[Member]) -> list[tuple[Unit, Part]]:
        """Build units of these members; none if memory does not hold them all, and then fewer are tried."""
        try:
            return self.planning.units(members)
        except Exception as error:
            if not out_of_memory(error):
                raise
            reason = memory_message(error)
        self._memory_full(members, reason)
        return []

    def _report_join(self, runner: UnitRunner, member: Member) -> None:
        predicted = self.planning.predicted(member)
        self._report("join", member, tier=runner.unit.tier, unit=runner.number, size=len(runner.members), **predicted)

    def _eject(self, indices: set[int]) -> None:
        self.waiting |= {member.index: member for member in self._give_up_places(indices, self._queue.policy.name)}

    def _give_up_places(self, indices: set[int], by: str) -> list[Member]:
        """Remove members from their units, written back, so that they can continue in any unit."""
        ejected: list[Member] = []
        for runner in self.runners:
            slots = [slot for slot, member in enumerate(runner.members) if member.index in indices]
            ejected += runner.eject(slots) if slots else []
        for member in ejected:
            self.checkpointing.note(member)
            self._report("preempt", member, by=by)
        self.runners = [runner for runner in self.runners if runner.members]
        return ejected

    # --- a round ------------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        self.runners = [runner for runner in self.runners if runner.ready()]
        self._place(self.planning.renewals.take_out(self.runners, self.waiting.values()))
        if not self.runners:
            return
        num_in_sequence = 1 if self.planning.gpu else len(self.runners)  # on a CPU units run one after another
        seconds = max(min(0.02, self.turn_seconds), self.turn_seconds / num_in_sequence)
        batches = [runner.next_batches(seconds) for runner in self.runners]
        if self._before_turn is not None:
            pairs = zip(self.runners, batches, strict=True)
            self._before_turn({m.index: m.batches + count for runner, count in pairs for m in runner.members})
        outcomes = turn(
            self.runners, batches, self.planning.executor, self._record_turn, self.planning.renewals.look_within
        )
        full = [(r, o.full) for r, o in zip(self.runners, outcomes, strict=True) if o.full and r.members]
        for runner in list(self.runners):
            self.separate(runner)
        if full:
            runner, detail = full[0]
            self._memory_full(list(runner.members), detail, runner)

    def separate(self, runner: UnitRunner) -> None:
        """Give members that cannot train with the others any more their own units."""
        units = runner.separate()
        if units:
            sizes = [len(runner.members), *[1] * len(units)]
            self._report("split", unit=runner.number, reason=units[0][1], sizes=sizes)
        for unit, reason in units:
            alone = UnitRunner(unit, self, next(self._numbers))
            self.runners.append(alone)
            self.planning.record.add(alone, self.planning.run_alone(unit.members[0], reason))
            self._report_join(alone, unit.members[0])
        self.runners = [other for other in self.runners if other.members]

    def _record_turn(self, runner: UnitRunner, outcome: Outcome, done: int) -> None:
        """Record the cost of a unit's turn, before its results are processed."""
        share = outcome.seconds / max(1, len(runner.members))
        for member in runner.members:
            seconds_left = member.batches_left * runner.batch_seconds / max(1, len(runner.members))
            self._queue.add_device_time(member.index, share, seconds_left)
        size = self.planning.record.note_turn(runner, outcome.seconds, done)
        self._report(
            "turn", unit=runner.number, tier=runner.unit.tier, members=len(runner.members), batches=done,
            seconds=outcome.seconds, bytes=size,
        )  # fmt: skip

    def _memory_full(self, members: list[Member], detail: str, runner: UnitRunner | None = None) -> None:
        """Let these members wait, since memory was full, and run fewer at once; fail one that had the device alone."""
        self.planning.executor.forget()
        self._changed = True
        reason, others = f"memory was full ({detail})", [m for m in self._running() if m not in members]
        if len(members) == 1 and not others:
            self._limit.forget()
            (last,) = members
            last.error = f"{reason} with no other job beside it; use a smaller network or batch_size, or accumulate"
            if runner is None:
                return self._fail(last)
            self.runners = []
            return runner.leave({0: "failed"})
        half = len(members) // 2
        most = len(others) + half if half else max(1, len(others) // 2)
        self._limit.lower(most, {self.planning.request(member).key for member in members})
        self.planning.note_full_memory(members)
        sizes = [half, len(members) - half] if half else [1, len(others)]
        self._report("split", unit=runner.number if runner is not None else None, reason=reason, sizes=sizes)
        for member in members:
            self._queue.move(member.index, running=False, now=time.monotonic())
        if runner is None:
            self.waiting |= {member.index: member for member in members}
        else:
            self._eject({member.index for member in members})
        self.planning.executor.forget()

    # --- events and checkpoints ---------------------------------------------------------------------------------------

    def _report(self, kind: str, member: Member | None = None, /, **data: Any) -> None:
        if self._notify is not None:
            self._notify(new_event(kind, member, **data))

    def epoch(self, runner: UnitRunner, slot: int) -> Ending | None:
        member = runner.members[slot]
        self._report("epoch", member, **member.history[-1])
        return None if self.callbacks is None else self.callbacks.after(member, partial(runner.unit.write_back, [slot]))

    def left(self, runner: UnitRunner, slot: int) -> Ending | None:
        member = runner.members[slot]
        ending = None if self.callbacks is None else self.callbacks.after(member)
        if ending is not None:
            member.status, member.error = ending.status, ending.error
        if member.status != "cancelled":
            self._ended(member)
            self._queue.remove(member.index)
        else:
            self.report_leave(member)
        return ending

    def _ended(self, member: Member) -> None:
        self._changed = True
        self.checkpointing.note(member)
        self.report_leave(member)

    def report_leave(self, member: Member) -> None:
        status, error = member.status, member.error
        self._report("leave", member, status=status, error=error, steps=member.step, seconds=member.seconds)

    def save(self, *, now: bool = False) -> None:
        """Save members whose checkpoint is due, and those that have left their units."""
        self.checkpointing.save(self.runners, self._report, now=now)

    # --- commands -----------------------------------------------------------------------------------------------------

    def _has_work(self) -> bool:
        """Carry out commands since the last round, and return whether there is something to train."""
        if self.controls is not None and self.controls.carry_out(self):
            self.planning.renewals.due = True
        for member in [member for member in self._running() if member.reshaped]:  # its batches have another shape now
            self.replace(member, "new batches")
        if self._supervisor is not None:
            supervise(self, self._supervisor)
        return bool(self.waiting or self.runners)

    def end(self, indices: set[int], status: str, error: str | None = None) -> list[Member]:
        """End members now, and return those that had not ended yet."""
        ended = self.take_out(indices & self.waiting.keys(), status)
        ended += [self.paused.pop(index) for index in sorted(indices & self.paused.keys())]
        for member in ended:
            member.status, member.error = status, error
            finish_weights(member)
            self._ended(member)
        for runner in self.runners:
            leaving = {slot: member for slot, member in enumerate(runner.members) if member.index in indices}
            for member in leaving.values():
                member.error = error
            runner.leave(dict.fromkeys(leaving, status))
            ended += leaving.values()
            for member in leaving.values() if status == "cancelled" else ():  # for good, also in a resumed run
                self._queue.remove(member.index)
                self._changed = True
                self.checkpointing.note(member)
        self.runners = [runner for runner in self.runners if runner.members]
        return ended

    def add(self, *members: Member) -> None:
        """Add members, which wait for their turn to start."""
        self.planning.add(members)
        self.planning.note_tiers(members)
        self.planning.renewals.due = True
        self.all_members += members
        self.checkpointing.add(members, self.planning.recipes)
        self.put_back(members)

    def replace(self, member: Member, by: str = "a copy") -> None:
        """Put a member in the place of the one with its index; it waits for a unit."""
        self.take_out({member.index}, by)
        member.reshaped = False
        self.paused.pop(member.index, None)
        self.checkpointing.forget(member)
        self.planning.replace(member)
        self.all_members[self.all_members.index(self.members[member.index])] = member
        self.put_back([member])

    def take_out(self, indices: set[int], by: str) -> list[Member]:
        """Remove members from their units, written back, or from the queue."""
        members = [self.waiting.pop(index) for index in sorted(indices & self.waiting.keys())]
        members += self._give_up_places(indices, by)
        for member in members:
            self._queue.remove(member.index)
        self._changed |= bool(members)
        return members

    def put_back(self, members: Sequence[Member]) -> None:
        """Queue members: new ones, ones that were taken out, or replacements."""
        for member in members:
            self._queue.add(self.planning.ticket(member, time.monotonic()))
            self.members[member.index] = self.waiting[member.index] = member
        self._changed = True

    def unpause(self, index: int) -> None:
        """Let a paused member continue, to its end or its next pause."""
        if index in self.paused:
            self.put_back([self.paused.pop(index)])

    def written(self, member: Member) -> Member:
        """Return the member, with its weights and state written back from its unit."""
        for runner in self.runners:
            if member in runner.members:
                runner.unit.write_back([runner.members.index(member)])
        return member
