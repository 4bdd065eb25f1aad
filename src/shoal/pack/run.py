"""The loop over units: epochs, validation, early stopping, and members that finish, diverge or fail and leave.

It knows nothing of how a tier trains. Each round every unit gets a turn, up to its next event (a member's end, or the
end of its epoch), and what happened is then settled member by member.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.errors import MemberError, describe
from shoal.monitor import validates
from shoal.pack.evaluate import evaluate
from shoal.pack.members import Member
from shoal.pack.unit import Executor, Outcome, Unit

STREAM_CHUNK = 8
"""Batches a turn where data is streamed: readers stay this close, so that a batch is read once for all of them."""

Watcher = Callable[[Member], None]
"""Called after each epoch of a member, and when it leaves."""


def run(units: list[Unit], executor: Executor | None = None, watch: Watcher | None = None) -> None:
    """Train the units' members to their ends; what came of them is then in the members."""
    executor = executor or Executor()
    tracks = [Track(unit, watch or (lambda member: None)) for unit in units]
    try:
        while tracks := [track for track in tracks if track.ready()]:
            for track in tracks:
                track.begin()
            work = [(track.unit, track.next_batches()) for track in tracks]
            outcomes = executor.run(work, partial(look_ahead, tracks, work))
            for track, outcome in zip(tracks, outcomes, strict=True):
                track.settle(outcome)
    except KeyboardInterrupt:
        for track in tracks:
            track.cancel()
        raise


def look_ahead(tracks: list[Track], work: list[tuple[Unit, int]]) -> None:
    """What an executor may do while it waits for a device."""
    for track, (_, batches) in zip(tracks, work, strict=True):
        track.look_ahead(batches)


class Track:
    """One unit's place in its training."""

    def __init__(self, unit: Unit, watch: Watcher) -> None:
        self.unit = unit
        self.watch = watch
        self.done = 0
        """Batches of this epoch that are done."""
        self.total = 0
        """Batches in this epoch; 0 between epochs."""
        self.first_step: list[int] = []
        """Each member's optimizer steps before this epoch."""
        self._ahead: tuple[dict[int, int], Tensor] | None = None
        """The next epoch's orders where they are known already, and whose rows they are."""
        for member in unit.members:
            member.tier = unit.tier

    def ready(self) -> bool:
        """Let members that have had their length go; whether any are left."""
        if self.unit.members and not self.total:
            self._leave({slot: "done" for slot, member in enumerate(self.unit.members) if member.finished()})
        return bool(self.unit.members)

    def begin(self) -> None:
        """Start an epoch, unless one is under way."""
        if self.total:
            return
        members = self.unit.members
        self.unit.begin_epoch(self._orders())
        self.done, self.total = 0, members[0].num_batches
        self.first_step = [member.step for member in members]

    def look_ahead(self, batches: int) -> None:
        """Draw the next epoch's orders while the device is busy with the last batches of this one."""
        if self._ahead is None and self.done + batches == self.total:
            members = self.unit.members
            self._ahead = {member.index: row for row, member in enumerate(members)}, epoch_orders(members)

    def _orders(self) -> Tensor:
        members = self.unit.members
        if self._ahead is None:
            return epoch_orders(members)
        rows, orders_MN = self._ahead
        self._ahead = None
        if len(rows) == len(members):
            return orders_MN
        kept = orders_MN[[rows[member.index] for member in members]]
        return kept if orders_MN.stride(0) else orders_MN[:1].expand(len(members), -1)

    def next_batches(self) -> int:
        """How many batches until something has to be settled."""
        batches = min(self._limit(slot) for slot in range(len(self.unit.members))) - self.done
        streamed = any(member.data.source.streamed for member in self.unit.members)
        return min(batches, STREAM_CHUNK) if streamed else batches

    def _limit(self, slot: int) -> int:
        """Batches of this epoch that a member takes part in: all, or up to its last step."""
        job = self.unit.members[slot].job
        if job.steps is None:
            return self.total
        return min(self.total, (job.steps - self.first_step[slot]) * job.accumulate)

    def settle(self, outcome: Outcome) -> None:
        """Take in what a turn did: who failed, who diverged, who is at the end of an epoch or of its training."""
        for member in self.unit.members:
            member.seconds += outcome.seconds / len(self.unit.members)
        losses = self.unit.losses()
        self.done = losses.shape[1]
        ends: dict[int, str] = {}
        first_bad = _first_bad(losses)
        for slot, member in enumerate(self.unit.members):
            ends |= self._advance(slot, member, losses, first_bad.get(slot))
        if outcome.error is not None:  # its batch is missing from the losses, or is NaN in them
            ends[outcome.error.slot] = self._fail(outcome.error)
        at_end = [s for s in range(len(self.unit.members)) if s not in ends and self._limit(s) == self.done]
        if at_end:
            ends |= self._end_epoch(at_end)
        if self.done == self.total:
            self.total = 0
        self._leave(ends)

    def _advance(self, slot: int, member: Member, losses_MT: Tensor, bad: int | None) -> dict[int, str]:
        """Count the steps done; a non-finite loss ends the member."""
        batches = self.done if bad is None else bad
        k = member.job.accumulate
        whole = self.total if batches == self.total else batches - batches % k
        member.step = self.first_step[slot] + -(-whole // k)
        if bad is None:
            return {}
        value = float(losses_MT[slot, bad])
        member.error = f"the loss became {value} in epoch {member.epoch + 1} after step {member.step}"
        return {slot: "diverged"}

    def _fail(self, error: MemberError) -> str:
        self.unit.members[error.slot].error = describe(error.cause)
        return "failed"

    def _end_epoch(self, slots: list[int]) -> dict[int, str]:
        """Close the epoch for these members: their history rows, validation, schedules, best weights, early stops."""
        members, ends = self.unit.members, dict[int, str]()
        whole = self.done == self.total
        losses, logs, rates = self.unit.losses().numpy(), self.unit.logs(), self.unit.rates()
        rows = batch_rows(members[0], losses.shape[1])
        for slot in slots:
            members[slot].epoch += 1
        due = [s for s in slots if validates(members[s].job, members[s].epoch, members[s].finished())]
        values = evaluate(self.unit, due) if due else {}
        watched: list[float | None] = [None] * len(members)
        for slot in slots:
            member, val = members[slot], values.get(slot, {})
            if isinstance(val, MemberError):
                ends[slot] = self._fail(val)
                continue
            member.history.append(history_row(member, losses[slot], logs[slot], rates[slot], val, rows))
            watched[slot] = member.monitor.value(member.history[-1])
        if whole:
            self.unit.end_epoch(watched)
        for slot in slots:
            if slot not in ends:
                ends |= self._look(slot)
        return ends

    def _look(self, slot: int) -> dict[int, str]:
        """After a member's epoch: keep its weights if they are its best, and see whether it is at its end."""
        member = self.unit.members[slot]
        best, stop = member.monitor.see(member.history[-1])
        if best and member.job.keep == "best":
            self.unit.write_back([slot])
            member.best = weights(member.model)
        self.watch(member)
        if member.finished():
            return {slot: "done"}
        return {slot: "stopped"} if stop else {}

    def _leave(self, ends: dict[int, str]) -> None:
        """Let members go, each with its weights and the way it ended, and go on with the others."""
        if not ends:
            return
        self.unit.write_back(list(ends))
        for slot, status in ends.items():
            member = self.unit.members[slot]
            member.status = status
            if member.best is not None:
                member.model.load_state_dict(member.best)
            self.watch(member)
        stay = [slot for slot in range(len(self.unit.members)) if slot not in ends]
        self.first_step = [self.first_step[slot] for slot in stay] if self.total else []
        if stay:
            self.unit = self.unit.keep(stay)
        else:
            self.unit.members = []

    def cancel(self) -> None:
        """Stop here: members keep what they have."""
        self._leave(dict.fromkeys(range(len(self.unit.members)), "cancelled"))


def epoch_orders(members: list[Member]) -> Tensor:
    """Each member's rows for its next epoch, [M, n]; with a first stride of 0 where all agree, and then kept once."""
    rows: list[Tensor] = []
    seen: list[tuple[Member, bytes, Tensor, Tensor, Tensor]] = []
    for member in members:
        if not member.job.shuffle:
            rows.append(_cut(member, torch.arange(len(member.data))))
            continue
        state = member.orders.get_state()
        key = state.numpy().tobytes()
        for other, other_key, order, after, other_rows in seen:
            if key == other_key and len(order) == len(member.data):
                member.orders.set_state(after)
                rows.append(other_rows if member.data.same(other.data) else _cut(member, order))
                break
        else:
            order = torch.randperm(len(member.data), generator=member.orders)
            rows.append(_cut(member, order))
            seen.append((member, key, order, member.orders.get_state(), rows[-1]))
    if all(row is rows[0] or torch.equal(row, rows[0]) for row in rows):
        return rows[0].expand(len(rows), -1)
    return torch.stack(rows)


def _cut(member: Member, order: Tensor) -> Tensor:
    return member.data.rows(order[: member.num_rows])


def _first_bad(losses_MT: Tensor) -> dict[int, int]:
    """For members with a non-finite loss, its batch."""
    finite = torch.isfinite(losses_MT)
    if bool(finite.all()):
        return {}
    return {slot: int((~row).nonzero()[0]) for slot, row in enumerate(finite) if not bool(row.all())}


def batch_rows(member: Member, batches: int) -> NDArray[np.float64]:
    """Rows in each of the first batches of an epoch."""
    size = member.job.batch_size
    rows = np.full(batches, size, dtype=np.float64)
    if batches == member.num_batches:
        rows[-1] = member.num_rows - size * (batches - 1)
    return rows


def history_row(
    member: Member,
    losses: NDArray[np.float64],
    logs: dict[str, Tensor],
    rate: float,
    val: dict[str, float],
    rows: NDArray[np.float64],
) -> dict[str, float]:
    """An epoch in numbers: losses and logs are means over its batches, weighted by their rows.

    Sums are exact, so that they do not depend on how many members are summed at once.
    """
    total = math.fsum(rows.tolist())

    def mean(values: NDArray[np.float64]) -> float:
        return math.fsum((values * rows).tolist()) / total

    row: dict[str, float] = {"epoch": member.epoch, "step": member.step, "loss": mean(losses)}
    row |= {name: mean(values.numpy()) for name, values in logs.items()}
    return row | val | {"lr": rate, "seconds": member.seconds}


def weights(model: torch.nn.Module) -> dict[str, object]:
    """A copy of a model's state on the CPU."""
    return {
        k: v.detach().to("cpu", copy=True) if isinstance(v, Tensor) else copy.deepcopy(v)
        for k, v in model.state_dict().items()
    }
