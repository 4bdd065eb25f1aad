"""Count from a run's events what has been done and what remains, for the progress display.

An event changes the numbers of one unit or member; sums are computed when they are shown.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from shoal.engine.members.member import Member
from shoal.reporting.events import Event

FADE_SECONDS = 10.0
"""Time constant of the displayed speed: the weight of a turn falls to a third after this many seconds of turns."""
SAMPLE_SECONDS, SAMPLES = 1.0, 30
"""The remaining time is estimated from this many samples, this many seconds apart."""


class Pace:
    """Measures how fast a count has grown over the last half minute."""

    __slots__ = ("_samples",)

    def __init__(self, now: float, count: float = 0.0) -> None:
        self._samples: deque[tuple[float, float]] = deque([(now, count)], maxlen=SAMPLES)

    def left(self, now: float, count: float, rest: float) -> float:
        """Return the seconds until the count has grown by `rest`, or NaN if that is unknown."""
        then, old_count = self._samples[0]
        if now - self._samples[-1][0] >= SAMPLE_SECONDS:
            self._samples.append((now, count))
        if rest <= 0:
            return 0.0
        return rest * (now - then) / (count - old_count) if count > old_count else math.nan


@dataclass(slots=True, eq=False)
class UnitProgress:
    """The progress of one unit's members."""

    label: Any
    tier: str
    pace: Pace
    left: dict[int, int] = field(default_factory=dict)
    """The number of remaining batches by member."""
    batches: int = 0
    """The number of batches that the unit has run."""
    work: float = 0.0
    """Batches summed over members; older ones count less."""
    seconds: float = 0.0
    """The seconds of that work; older ones count less."""
    bytes: int | None = None
    accumulate: int = 1

    def __len__(self) -> int:
        return len(self.left)

    def turn(self, members: int, batches: int, seconds: float) -> None:
        """Record a turn of the unit."""
        fade = math.exp(-seconds / FADE_SECONDS)
        self.work = self.work * fade + members * batches
        self.seconds = self.seconds * fade + seconds
        self.batches += batches
        self.left = {index: max(0, left - batches) for index, left in self.left.items()}

    def seconds_left(self, now: float) -> float:
        """Return the seconds until the last member ends, or NaN if that is unknown."""
        return self.pace.left(now, self.batches, max(self.left.values(), default=0))


class Tally:
    """Follows all members of a run."""

    def __init__(self, members: Iterable[Member], clock: Callable[[], float] = monotonic) -> None:
        self.clock = clock
        self.began = clock()
        self.members: dict[int, Member] = {}
        self.waiting: dict[int, int] = {}
        """The remaining batches of each member that is in no unit."""
        self.ended: dict[int, str] = {}
        """Status of each member that has ended."""
        self.losses: dict[int, float] = {}
        self.worked = 0.0
        """The work of this run: batches of members, weighted by their predicted cost if it is known."""
        self.packs: dict[Any, UnitProgress] = {}
        self.unit_of: dict[int, UnitProgress] = {}
        """The unit of each member that is running."""
        self.joins = False
        """Whether members have joined units."""
        self.alone: dict[int, float] = {}
        """The predicted seconds of one batch of each member by itself."""
        self.note = ""
        self.resume = ""
        """How to resume a run that was interrupted and saved."""
        self._missed: dict[int, int] = {}
        """The batches of cancelled members that were never trained."""
        self._bytes: dict[int, float] = {}
        """Each member's share of the memory predicted for its pack."""
        self._usual = 1.0
        """The weight of a batch of a member whose cost is unknown."""
        self._pace = Pace(self.began)
        for member in members:
            self._update_member(member)

    def __call__(self, event: Event) -> None:
        handle = getattr(self, f"_on_{event.kind}", None)
        if handle is not None:
            handle(event.member, event.data)

    @property
    def counts(self) -> Counter[str]:
        """How many members ended with each status."""
        return Counter(self.ended.values())

    @property
    def cut_short(self) -> bool:
        """Whether members were cancelled or the run was interrupted; the run's end shows which of the two."""
        return bool(self._missed or self.resume)

    @property
    def left(self) -> int:
        """The number of remaining batches, summed over members."""
        return sum(sum(pack.left.values()) for pack in self.packs.values()) + sum(self.waiting.values())

    @property
    def share(self) -> float:
        """The fraction of the work that is done, from 0 to 1."""
        total = sum(map(length, self.members.values()))
        return 1 - (self.left + sum(self._missed.values())) / total if total else 1.0

    @property
    def running(self) -> int:
        """The number of running members."""
        return len(self.unit_of)

    def seconds_left(self) -> float:
        """Return the seconds until the end of the run, or NaN if that is unknown."""
        now = self.clock()
        batches_left = (self.waiting, *(pack.left for pack in self.packs.values()))
        work_left = sum(
            left * self.alone.get(index, self._usual) for group in batches_left for index, left in group.items()
        )
        all_left = self._pace.left(now, self.worked, work_left)
        longest = [pack.seconds_left(now) for pack in self.packs.values()]
        return max([all_left, *(x for x in longest if not math.isnan(x))])

    def loss_range(self) -> tuple[float, float] | None:
        """Return the smallest and the largest of the members' last losses."""
        losses = [loss for loss in self.losses.values() if math.isfinite(loss)]
        return (min(losses), max(losses)) if losses else None

    def gain(self, pack: UnitProgress) -> float | None:
        """Return how many times faster a unit is than its members one after another, or None without a prediction."""
        alone = [self.alone[index] for index in pack.left if index in self.alone]
        if not pack.seconds or not alone or len(alone) < len(pack):
            return None
        return pack.work / pack.seconds * sum(alone) / len(alone)

    def predicted_bytes(self, pack: UnitProgress) -> float | None:
        """Return the memory predicted for a unit, or None without a prediction."""
        shares = [self._bytes[index] for index in pack.left if index in self._bytes]
        return sum(shares) if len(shares) == len(pack) else None

    def _weight(self, pack: UnitProgress) -> float:
        """Return the weight of a batch of one of a unit's members, which are alike."""
        return self.alone.get(next(iter(pack.left), -1), self._usual)

    def _update_member(self, member: Member) -> None:
        """Add a member, or update how far a resumed one has come."""
        index = member.index
        self.members.setdefault(index, member)
        if index in self.unit_of or index in self.ended:
            return
        self.waiting[index] = length(member) - done(member)
        if member.status != "running":
            self._count_end(index, member.status, self.waiting.pop(index))

    def _count_end(self, index: int, status: str, left: int) -> None:
        self.ended[index] = status
        if status == "cancelled":
            self._missed[index] = left

    def _leave_unit(self, index: int) -> int | None:
        """Remove a member from its unit, and return its remaining batches, or None if it was in no unit."""
        pack = self.unit_of.pop(index, None)
        if pack is None:
            return None
        left = pack.left.pop(index)
        if not pack.left:
            self.packs.pop(pack.label, None)
        return left

    # --- events -----------------------------------------------------------------------------------------------------

    def _on_start(self, member: Member | None, data: Mapping[str, Any]) -> None:
        for each in list(self.members.values()):
            self._update_member(each)
        for part in (data.get("plan") or {}).get("parts", ()):
            members, predicted = part["members"], part.get("predicted") or {}
            for name, shares in (("alone_seconds", self.alone), ("memory_bytes", self._bytes)):
                if predicted.get(name):
                    shares |= dict.fromkeys(members, predicted[name] / len(members))
        if self.alone:
            self._usual = sum(self.alone.values()) / len(self.alone)

    def _on_join(self, member: Member, data: Mapping[str, Any]) -> None:
        self.joins = True
        index, label, alone = member.index, data["unit"], data.get("alone_seconds")
        self._leave_unit(index)
        self.members.setdefault(index, member)
        for tables in (self.waiting, self.ended, self._missed):
            tables.pop(index, None)
        if alone and math.isfinite(alone):
            self.alone[index] = alone
        if label not in self.packs:
            self.packs[label] = UnitProgress(label, data["tier"], Pace(self.clock()))
        pack = self.unit_of[index] = self.packs[label]
        pack.left[index] = length(member) - done(member)
        pack.accumulate = member.job.accumulate

    def _on_turn(self, member: Member | None, data: Mapping[str, Any]) -> None:
        pack = self.packs.get(data["unit"])
        if pack is None:
            return
        pack.turn(data["members"], data["batches"], data["seconds"])
        if data.get("bytes") is not None:
            pack.bytes = data["bytes"]
        self.worked += data["members"] * data["batches"] * self._weight(pack)

    def _on_epoch(self, member: Member, data: Mapping[str, Any]) -> None:
        index, left = member.index, length(member) - done(member)
        if "loss" in data:
            self.losses[index] = data["loss"]
        if index in self.ended:
            return
        pack = self.unit_of.get(index)
        table = self.waiting if pack is None else pack.left
        self.worked += (table.get(index, left) - left) * self.alone.get(index, self._usual)
        table[index] = left

    def _on_leave(self, member: Member, data: Mapping[str, Any]) -> None:
        index = member.index
        self._update_member(member)
        left = self._leave_unit(index)
        if left is None:
            left = self.waiting.pop(index, 0)
        if index not in self.ended:
            self._count_end(index, data["status"], left)

    def _on_preempt(self, member: Member, data: Mapping[str, Any]) -> None:
        if (left := self._leave_unit(member.index)) is not None:
            self.waiting[member.index] = left

    def _on_split(self, member: Member | None, data: Mapping[str, Any]) -> None:
        self.note = f"pack {data.get('unit')} was split into {data.get('sizes')}: {data.get('reason')}"
        pack = self.packs.get(data.get("unit"))
        for index in list(pack.left) if pack is not None else []:
            self.waiting[index] = self._leave_unit(index) or 0

    def _on_end(self, member: Member | None, data: Mapping[str, Any]) -> None:
        self.resume = data.get("resume", "")

    def _on_note(self, member: Member | None, data: Mapping[str, Any]) -> None:
        name = "" if member is None else f"{member.name}: "
        self.note = f"{name}{data.get('text', '')}"
        if member is not None:
            self._update_member(member)


def batches_at(member: Member, step: int) -> int:
    """Return the number of batches after `step` optimizer steps; the last step of an epoch may have fewer batches."""
    batches, k = max(1, member.usual_batches), member.job.accumulate
    epochs, steps = divmod(step, -(-batches // k))
    return epochs * batches + min(batches, steps * k)


def length(member: Member) -> int:
    """Return the number of batches of the entire job."""
    job = member.job
    return (job.epochs or 0) * max(1, member.usual_batches) if job.steps is None else batches_at(member, job.steps)


def done(member: Member) -> int:
    """Return the number of batches that a member has trained on."""
    return min(length(member), batches_at(member, member.step))
