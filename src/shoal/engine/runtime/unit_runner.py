"""The training of one unit: turns, epochs, validation, early stopping, and members that end and leave."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from shoal.engine.members import row_order
from shoal.engine.members.evaluation_weights import finish_weights
from shoal.engine.members.history import history_row, weights
from shoal.engine.members.member import Member
from shoal.engine.members.resuming import closes_early
from shoal.engine.tiers.evaluate import evaluate
from shoal.engine.tiers.unit import Executor, Outcome, Unit, context_lost
from shoal.errors import MemberError, describe_with_place
from shoal.jobs.early_stopping import validates

if TYPE_CHECKING:
    from shoal.engine.recipes.recipe import Recipe
    from shoal.reporting.callbacks import Ending

FIRST = 4
"""Batches of a unit's first turn if turns are timed, since its speed is not known yet."""
STREAM_CHUNK = 8
"""Batches of a turn if data is streamed. Readers stay this close, so that a batch is read once for all of them."""


class UnitListener:
    """Is called when a unit's members end epochs and leave. This one does nothing."""

    saves = False
    """Whether members are saved at their end, so that another run can train them longer."""

    def epoch(self, runner: UnitRunner, slot: int) -> Ending | None:
        """Handle the end of a member's epoch. Returns how the member must end now, or None."""

    def left(self, runner: UnitRunner, slot: int) -> Ending | None:
        """Handle a member that is about to leave, written back and with its status. Returns another ending for it, or
        None."""


class UnitRunner:
    """A unit with its members, each at its own position in its training."""

    def __init__(self, unit: Unit, host: UnitListener, number: int = 0) -> None:
        self.unit = unit
        self.host = host
        self.number = number
        """A number that is different for each unit of a run."""
        self.batch_seconds = 0.0
        """Seconds of a batch of all members in the last turn."""
        self.alone: dict[Member, str] = {}
        """Members that must train by themselves after this turn, and why."""
        self._before: list[int] = []
        self._set_tier()

    def _set_tier(self) -> None:
        for member in self.unit.members:
            member.tier = self.unit.tier

    @property
    def members(self) -> list[Member]:
        return self.unit.members

    def ready(self) -> bool:
        """Let members that have reached their length leave, and return whether any are left."""
        ended = {s: "done" for s, member in enumerate(self.members) if not member.place and member.finished()}
        self.leave(ended)
        return bool(self.members)

    def begin(self) -> None:
        """Draw the rows of members that are at the beginning of an epoch."""
        row_order.assign_rows(self.members)
        self.unit.begin_reading()

    def look_ahead(self, batches: int) -> None:
        """Draw the next epoch's rows, and prepare for members that are about to end, while the device is busy."""
        row_order.look_ahead([member for member in self.members if member.place + batches == member.num_batches])
        ending = [slot for slot, member in enumerate(self.members) if member.batches_left <= batches]
        self.unit.look_ahead(ending)

    def next_batches(self, seconds: float = math.inf) -> int:
        """Return the batches until a member's epoch or training ends, or until so many seconds have passed."""
        batches = min(_next_stop(member) - member.place for member in self.members)
        if any(member.data.source.streamed for member in self.members):
            batches = min(batches, self._whole_steps(STREAM_CHUNK))
        if not self.batch_seconds and seconds < math.inf:
            batches = min(batches, self._whole_steps(FIRST))
        elif seconds < batches * self.batch_seconds:
            batches = min(batches, self._whole_steps(max(1, int(seconds / self.batch_seconds))))
        if batches > 1 and len({member.rows_in(batches) for member in self.members}) > 1:
            batches -= 1  # a member's last batch is short, and runs by itself
        return batches

    def _whole_steps(self, batches: int) -> int:
        """Round up so many batches so that they end with an optimizer step."""
        member = self.members[0]
        k = member.job.accumulate
        return -(-(member.place + batches) // k) * k - member.place

    def start(self) -> None:
        """Remember each member's position, which `finish_turn` compares."""
        self._before = [member.place for member in self.members]

    def finish_turn(self, outcome: Outcome) -> None:
        """Process the results of a turn: members that failed, diverged, or reached the end of an epoch or of
        training."""
        members = self.members
        ends: dict[int, str] = {}
        done = 0
        for slot, (member, before) in enumerate(zip(members, self._before, strict=True)):
            member.seconds += outcome.seconds / len(members)
            done = max(done, member.place - before)
            ends |= _advance(slot, member, before)
        if done:
            self.batch_seconds = outcome.seconds / done
        self.alone |= {members[slot]: reason for slot, reason in outcome.alone.items()}
        if outcome.error is not None:
            ends[outcome.error.slot] = self._fail(outcome.error)
        ends |= self._failures()
        moved = [member.unvalidated or member.place > self._before[s] for s, member in enumerate(members)]
        within = [s for s, member in enumerate(members) if s not in ends and moved[s] and _validates_within(member)]
        if within:
            ends |= self._validate_within(within)
        at_end = [s for s, member in enumerate(members) if s not in ends and _limit(member) == member.place]
        if at_end:
            ends |= self._end_epoch(at_end)
        self.leave(ends)

    def _fail(self, error: MemberError) -> str:
        """Note the error of a member, and return its status."""
        if context_lost(error.cause):
            raise error.cause from error
        self.members[error.slot].error = describe_with_place(error.cause)
        return "failed"

    def _failures(self) -> dict[int, str]:
        """Return members that end here, since their optimizer or their schedule raised."""
        return {slot: self._fail(MemberError(slot, error)) for slot, error in self.unit.failures().items()}

    def separate(self) -> list[tuple[Unit, str]]:
        """Remove members that cannot stay in this unit, and return a unit for each, and why."""
        separated: list[tuple[Unit, str]] = []
        slots = [slot for slot, member in enumerate(self.members) if member in self.alone]
        if slots:
            reasons = [self.alone[self.members[slot]] for slot in slots]
            separated = list(zip(self.unit.alone(slots), reasons, strict=True))
            for unit, _ in separated:
                # otherwise `begin` does it when it draws their rows
                if all(member.order is not None for member in unit.members):
                    unit.begin_reading()
            self.drop(slots)
        self.alone = {}
        return separated

    def _end_epoch(self, slots: list[int]) -> dict[int, str]:
        """Close the epoch for these members: history rows, validation, schedules, best weights, early stopping."""
        members, ends = self.members, dict[int, str]()
        rates = [
            rate if member.rate is None else member.rate
            for rate, member in zip(self.unit.rates(), members, strict=True)
        ]
        if self.host.saves:
            self._save_before_end([slot for slot in slots if closes_early(members[slot])], rates)
        completed = [slot for slot in slots if members[slot].place == members[slot].num_batches]
        for slot in slots:
            members[slot].epoch += 1
            members[slot].rate = None
        due = [s for s in slots if validates(members[s].job, members[s].epoch, members[s].at_stop)]
        values = self._validate(due) if due else {}
        watched: dict[int, float | None] = {}
        for slot in slots:
            member, val = members[slot], values.get(slot, {})
            if isinstance(val, MemberError):
                ends[slot] = self._fail(val)
                continue
            member.history.append(history_row(member, rates[slot], val))
            watched[slot] = member.monitor.value(member.history[-1])
            member.error = member.monitor.missing(member.history[-1], member.job.val is None or slot in due)
            if member.error is not None:
                ends[slot] = "failed"
        stops = {slot: self._judge(slot, members[slot].history[-1]) for slot in watched if slot not in ends}
        self.unit.end_epoch({slot: value for slot, value in watched.items() if slot in completed})
        ends |= self._failures()
        for slot in slots:
            if slot in completed:
                members[slot].close_epoch()
            if slot not in ends:
                ends |= self._ending_after_epoch(slot, stops[slot])
        return ends

    def _save_before_end(self, slots: list[int], rates: list[float]) -> None:
        """Keep the states of members whose last epoch is closed differently than other epochs."""
        if slots:
            self.unit.write_back(slots)
        for slot in slots:
            member = self.members[slot]
            at_end = member.place == member.num_batches
            between = {"rate": rates[slot]} if at_end else {"unvalidated": _is_due_within(member)}
            member.before_end = copy.deepcopy(member.state()) | between

    def _validate_within(self, slots: list[int]) -> dict[int, str]:
        """Validate members in the middle of an epoch, and return those that end here."""
        ends = dict[int, str]()
        for slot, values in self._validate(slots).items():
            self.members[slot].unvalidated = False
            if isinstance(values, MemberError):
                ends[slot] = self._fail(values)
                continue
            member = self.members[slot]
            row = {"epoch": member.epoch + 1, "step": member.step, **values}
            member.validations.append(row)
            if self._judge(slot, row):
                ends[slot] = "stopped"
        return ends

    def _judge(self, slot: int, row: dict[str, float]) -> bool:
        """Copy a member's weights if they are its best, and return whether it should stop."""
        member = self.members[slot]
        best, stop = member.monitor.see(row)
        if best and member.job.keep == "best":
            with self.unit.evaluation_weights([slot]):
                self.unit.write_back([slot])
                member.best = weights(member.model)
        return stop

    def _validate(self, slots: list[int]) -> dict[int, dict[str, float] | MemberError]:
        """Return these members' validation values. If it raises for all together, each is validated by itself."""
        try:
            with self.unit.evaluation_weights(slots):
                return evaluate(self.unit, slots)
        except Exception as error:
            if context_lost(error):
                raise
            if len(slots) == 1:
                return {slots[0]: MemberError(slots[0], error)}
        return {slot: value for one in slots for slot, value in self._validate([one]).items()}

    def _ending_after_epoch(self, slot: int, stop: bool) -> dict[int, str]:
        """Return how a member ends after this epoch, if it does."""
        member = self.members[slot]
        ending = self.host.epoch(self, slot)
        if ending is not None and ending.status == "failed":
            member.error = ending.error
            return {slot: "failed"}
        if member.finished():
            return {slot: "done"}
        if ending is not None:
            member.error = ending.error
        if stop or ending is not None:
            return {slot: "stopped"}
        member.enter_train_mode()
        return {}

    def leave(self, ends: dict[int, str]) -> None:
        """Let members leave, each with its weights and its status."""
        if not ends:
            return
        self.unit.write_back(list(ends))
        for slot, status in ends.items():
            member = self.members[slot]
            member.status = status
            finish_weights(member)
            ending = self.host.left(self, slot)
            if ending is not None:
                member.status, member.error = ending.status, ending.error
        self.drop(list(ends))

    def eject(self, slots: list[int]) -> list[Member]:
        """Let members leave before their end, so that they can continue in any unit."""
        self.unit.write_back(slots)
        ejected = [self.members[slot] for slot in slots]
        self.drop(slots)
        for member in ejected:
            member.rest()
        return ejected

    def join(self, recipes: Sequence[Recipe]) -> None:
        """Add members, each in its current state."""
        self.unit = self.unit.join(recipes)
        self._set_tier()

    def drop(self, slots: list[int]) -> None:
        """Remove these members, which have been written back."""
        stay = [slot for slot in range(len(self.members)) if slot not in slots]
        if stay:
            self.unit = self.unit.keep(stay)
        else:
            sources = {member.data.source for member in self.members}
            self.unit.end_reading()
            self.unit.members = []
            for source in sources:
                source.release()

    def cancel(self) -> None:
        """Stop now, with the members' weights as they are."""
        self.leave(dict.fromkeys(range(len(self.members)), "cancelled"))


def turn(
    runners: list[UnitRunner],
    batches: list[int],
    executor: Executor,
    look: Callable[[UnitRunner, Outcome, int], None] | None = None,
    done: Callable[[Sequence[UnitRunner]], None] | None = None,
) -> list[Outcome]:
    """Run so many batches of each unit, process the results, and return the outcomes.

    Args:
        look: Called with each outcome before its results are processed.
        done: Called when all units have run and before any epoch is closed.
    """
    for runner in runners:
        runner.begin()
        runner.start()
    work = [(runner.unit, count) for runner, count in zip(runners, batches, strict=True)]

    def look_ahead() -> None:  # while the executor waits for a device
        for runner, count in zip(runners, batches, strict=True):
            runner.look_ahead(count)

    outcomes = executor.run([item for item in work if item[1]], look_ahead)
    for i, (_, count) in enumerate(work):
        if not count:  # it was saved at the end of an epoch that is not closed yet
            outcomes.insert(i, Outcome(0.0))
    if done is not None:
        done(runners)
    for runner, count, outcome in zip(runners, batches, outcomes, strict=True):
        if look is not None:
            look(runner, outcome, count)
        runner.finish_turn(outcome)
    return outcomes


def _limit(member: Member) -> int:
    """Return the batches of this epoch that a member trains: all, or up to its last step."""
    job = member.job
    if job.steps is None:
        return member.num_batches
    return min(member.num_batches, (job.steps - member.first_step) * job.accumulate)


def _next_stop(member: Member) -> int:
    """Return the batch of this epoch after which a member ends its epoch or is validated."""
    job, limit = member.job, _limit(member)
    if job.val_every_steps is None:
        return limit
    if member.unvalidated:
        return member.place
    step = member.first_step + member.place // job.accumulate
    due = (step // job.val_every_steps + 1) * job.val_every_steps
    return min(limit, (due - member.first_step) * job.accumulate)


def _validates_within(member: Member) -> bool:
    """Return whether a member is due for a validation in the middle of its epoch."""
    return member.place < _limit(member) and _is_due_within(member)


def _is_due_within(member: Member) -> bool:
    """Return whether `val_every_steps` says that a member is validated after its last batch."""
    job = member.job
    if job.val_every_steps is None or member.place % job.accumulate:
        return False
    return member.step % job.val_every_steps == 0


def _advance(slot: int, member: Member, before: int) -> dict[int, str]:
    """Count the steps taken; a non-finite loss ends the member."""
    new = member.losses[before:]
    bad_index = None if math.isfinite(sum(new)) else next((i for i, x in enumerate(new) if not math.isfinite(x)), None)
    batches, k = member.place if bad_index is None else before + bad_index, member.job.accumulate
    epoch_done = batches == member.num_batches
    member.step = member.first_step + (-(-batches // k) if epoch_done else batches // k)
    if bad_index is None:
        return {}
    member.error = f"the loss became {new[bad_index]} in epoch {member.epoch + 1} after step {member.step}"
    return {slot: "diverged"}
