"""What a run has done and has left, counted from its events.

An event changes a few numbers of one unit or member, however many there are; sums over all of them are made when
they are shown.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from shoal.engine.members.member import Member
from shoal.reporting.events import Event

FADE_SECONDS = 10.0
"""A turn's weight in the speed that is shown falls to a third in so many seconds of turns."""
SAMPLE_SECONDS, SAMPLES = 1.0, 30
"""How the clock's view of speed is taken, for the time that is left."""


class Pace:
    """How fast a count grows by the clock, over the last half minute."""

    __slots__ = ("_samples",)

    def __init__(self, now: float, count: float = 0.0) -> None:
        self._samples: deque[tuple[float, float]] = deque([(now, count)], maxlen=SAMPLES)

    def left(self, now: float, count: float, rest: float) -> float:
        """Seconds until `rest` more; NaN where nothing can be said."""
        then, before = self._samples[0]
        if now - self._samples[-1][0] >= SAMPLE_SECONDS:
            self._samples.append((now, count))
        if rest <= 0:
            return 0.0
        return rest * (now - then) / (count - before) if count > before else math.nan


@dataclass(slots=True, eq=False)
class UnitProgress:
    """The members of one unit."""

    label: Any
    tier: str
    pace: Pace
    batches: int = 0
    """Batches the unit has run; the end of a member is on the same scale."""
    ends: dict[int, int] = field(default_factory=dict)
    """By member: the unit's batch at which it will have had its length."""
    alone: dict[int, float] = field(default_factory=dict)
    """By member: predicted seconds of one batch alone, where known."""
    work: float = 0.0
    """Member batches; older ones count less."""
    seconds: float = 0.0
    """What they took; older ones count less."""
    bytes: int | None = None
    predicted: float | None = None
    """Bytes."""
    accumulate: int = 1
    weight: float = 1.0
    """What one batch of a member counts in the work of the whole run."""

    def __len__(self) -> int:
        return len(self.ends)

    def put(self, index: int, left: int) -> None:
        """A member is here, with so many batches left."""
        self.ends[index] = self.batches + left

    def drop(self, index: int) -> int:
        """A member is no longer here; the batches that it has left."""
        left = self.left_of(index)
        del self.ends[index]
        self.alone.pop(index, None)
        return left

    def left_of(self, index: int) -> int:
        """Batches a member has left."""
        return max(0, self.ends[index] - self.batches)

    @property
    def left(self) -> int:
        """Member batches left."""
        return max(0, sum(self.ends.values()) - len(self.ends) * self.batches)

    @property
    def longest(self) -> int:
        """The unit's batch at which its last member ends."""
        return max(self.ends.values(), default=0)

    def turn(self, members: int, batches: int, seconds: float) -> None:
        """It has run for a while."""
        fade = math.exp(-seconds / FADE_SECONDS)
        self.work = self.work * fade + members * batches
        self.seconds = self.seconds * fade + seconds
        self.batches += batches

    @property
    def gain(self) -> float | None:
        """How many times faster than its members one after another; None where nothing was predicted."""
        if not self.seconds or not self.alone or len(self.alone) < len(self.ends):
            return None
        return self.work / self.seconds * sum(self.alone.values()) / len(self.alone)

    def seconds_left(self, now: float) -> float:
        """Until the last member's end, by the clock; NaN where nothing can be said."""
        return self.pace.left(now, self.batches, self.longest - self.batches)


class Tally:
    """Follows all members of a run."""

    def __init__(self, members: Iterable[Member], clock: Callable[[], float] = monotonic) -> None:
        self.clock = clock
        self.began = clock()
        self.members: dict[int, Member] = {}
        self.waiting: dict[int, int] = {}
        """By member that is in no unit: batches left."""
        self.ended: dict[int, str] = {}
        """By member: how it ended."""
        self.losses: dict[int, float] = {}
        self.worked = 0.0
        """What this run has trained: member batches, by what they cost alone where that is known."""
        self.packs: dict[Any, UnitProgress] = {}
        self.home: dict[int, UnitProgress] = {}
        """By member that runs: its unit."""
        self.joins = False
        """Whether members have joined units."""
        self.alone: dict[int, float] = {}
        """By member: predicted seconds of a batch alone."""
        self.note = ""
        self.over = False
        self._missed: dict[int, int] = {}
        """By cancelled member: batches that were never trained."""
        self._bytes: dict[int, float] = {}
        """By member: its share of the bytes that are predicted for its pack."""
        self._usual = 1.0
        """What a batch of a member counts whose cost is not known."""
        self._pace = Pace(self.began)
        self._do = {
            "start": self._start,
            "join": self._join,
            "turn": self._turn,
            "epoch": self._epoch,
            "leave": self._leave,
            "preempt": self._preempt,
            "split": self._split,
            "note": self._note,
            "end": self._end,
        }
        for member in members:
            self._see(member)

    def __call__(self, event: Event) -> None:
        do = self._do.get(event.kind)
        if do is not None:
            do(event.member, event.data)

    @property
    def counts(self) -> Counter[str]:
        """Members by the way they ended."""
        return Counter(self.ended.values())

    @property
    def total(self) -> int:
        """Batches of all members."""
        return sum(map(length, self.members.values()))

    @property
    def missed(self) -> int:
        """Batches that were never trained, of members that were cancelled."""
        return sum(self._missed.values())

    @property
    def left(self) -> int:
        """Member batches left."""
        return sum(pack.left for pack in self.packs.values()) + sum(self.waiting.values())

    @property
    def share(self) -> float:
        """How much of the work is done, 0 to 1."""
        total = self.total
        return 1 - (self.left + self.missed) / total if total else 1.0

    @property
    def running(self) -> int:
        """Members that run now."""
        return len(self.home)

    def seconds_left(self) -> float:
        """Until the end, by the clock; NaN where nothing can be said."""
        now = self.clock()
        rest = sum(pack.left * pack.weight for pack in self.packs.values())
        rest += sum(left * self._weight(index) for index, left in self.waiting.items())
        all_left = self._pace.left(now, self.worked, rest)
        longest = [pack.seconds_left(now) for pack in self.packs.values()]
        return max([all_left, *(x for x in longest if not math.isnan(x))])

    def loss_range(self) -> tuple[float, float] | None:
        """The smallest and the largest of the members' last losses."""
        losses = [loss for loss in self.losses.values() if math.isfinite(loss)]
        return (min(losses), max(losses)) if losses else None

    def _see(self, member: Member) -> None:
        """Take in a member that is new to us, or what a resume has made of it."""
        index = member.index
        self.members.setdefault(index, member)
        if index in self.home or index in self.ended:
            return
        self.waiting[index] = length(member) - done(member)
        if member.status != "running":
            self._count_end(index, member.status, self.waiting.pop(index))

    def _count_end(self, index: int, status: str, left: int) -> None:
        self.ended[index] = status
        if status == "cancelled":
            self._missed[index] = left

    def _start(self, member: Member | None, data: Mapping[str, Any]) -> None:
        for each in list(self.members.values()):
            self._see(each)
        for part in (data.get("plan") or {}).get("parts", ()):
            self._take_part(part["members"], part.get("predicted") or {})
        if self.alone:
            self._usual = sum(self.alone.values()) / len(self.alone)

    def _take_part(self, members: Sequence[int], predicted: Mapping[str, float]) -> None:
        for name, shares in (("alone_seconds", self.alone), ("memory_bytes", self._bytes)):
            if predicted.get(name):
                shares |= dict.fromkeys(members, predicted[name] / len(members))

    def _weight(self, index: int) -> float:
        return self.alone.get(index, self._usual)

    def _join(self, member: Member | None, data: Mapping[str, Any]) -> None:
        assert member is not None
        self.joins = True
        index, label, alone = member.index, data["unit"], data.get("alone_seconds")
        self._leave_unit(index)
        self.members.setdefault(index, member)
        for places in (self.waiting, self.ended, self._missed):
            places.pop(index, None)
        if alone and math.isfinite(alone):
            self.alone[index] = alone
        if label not in self.packs:
            self.packs[label] = UnitProgress(label, data["tier"], Pace(self.clock()))
        pack = self.home[index] = self.packs[label]
        pack.put(index, length(member) - done(member))
        pack.accumulate, pack.weight = member.job.accumulate, self._weight(index)
        if index in self.alone:
            pack.alone[index] = self.alone[index]
        if index in self._bytes:
            pack.predicted = self._bytes[index] * len(pack)

    def _leave_unit(self, index: int) -> int | None:
        """Take a member out of its unit: what it has left; None where it was in none."""
        pack = self.home.pop(index, None)
        if pack is None:
            return None
        left = pack.drop(index)
        if not pack.ends:
            self.packs.pop(pack.label, None)
        return left

    def _turn(self, member: Member | None, data: Mapping[str, Any]) -> None:
        pack = self.packs.get(data["unit"])
        if pack is None:
            return
        members, batches = data["members"], data["batches"]
        pack.turn(members, batches, data["seconds"])
        if data.get("bytes") is not None:
            pack.bytes = data["bytes"]
        self.worked += members * batches * pack.weight

    def _epoch(self, member: Member | None, data: Mapping[str, Any]) -> None:
        assert member is not None
        index, left = member.index, length(member) - done(member)
        if "loss" in data:
            self.losses[index] = data["loss"]
        pack = self.home.get(index)
        if pack is not None:
            self.worked += (pack.left_of(index) - left) * pack.weight
            pack.put(index, left)
        elif index not in self.ended:
            self.worked += (self.waiting.get(index, left) - left) * self._weight(index)
            self.waiting[index] = left

    def _leave(self, member: Member | None, data: Mapping[str, Any]) -> None:
        assert member is not None
        index = member.index
        self._see(member)
        left = self._leave_unit(index)
        if left is None:
            left = self.waiting.pop(index, 0)
        if index not in self.ended:
            self._count_end(index, data["status"], left)

    def _preempt(self, member: Member | None, data: Mapping[str, Any]) -> None:
        if member is not None and (left := self._leave_unit(member.index)) is not None:
            self.waiting[member.index] = left

    def _split(self, member: Member | None, data: Mapping[str, Any]) -> None:
        self.note = f"pack {data.get('unit')} was split into {data.get('sizes')}: {data.get('reason')}"
        pack = self.packs.get(data.get("unit"))
        for index in list(pack.ends) if pack is not None else []:
            self.waiting[index] = self._leave_unit(index) or 0

    def _note(self, member: Member | None, data: Mapping[str, Any]) -> None:
        name = "" if member is None else f"{member.name}: "
        self.note = f"{name}{data.get('text', '')}"
        if member is not None:
            self._see(member)

    def _end(self, member: Member | None, data: Mapping[str, Any]) -> None:
        self.over = True


def batches_at(member: Member, step: int) -> int:
    """Batches a member has had after so many optimizer steps; an epoch may end in a smaller group."""
    batches, k = max(1, member.num_batches), member.job.accumulate
    epochs, steps = divmod(step, -(-batches // k))
    return epochs * batches + min(batches, steps * k)


def length(member: Member) -> int:
    """Batches of the whole job."""
    job = member.job
    return (job.epochs or 0) * max(1, member.num_batches) if job.steps is None else batches_at(member, job.steps)


def done(member: Member) -> int:
    """Batches a member has had."""
    return min(length(member), batches_at(member, member.step))
