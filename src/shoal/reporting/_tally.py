"""What a run has done and has left, counted from its events.

An event costs the same however many members ride: a unit keeps one sum over its members, and a turn moves all of
them on by moving the unit on. Whatever needs a look at every unit or member is left to whoever asks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
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


class UnitProgress:
    """The members of one unit."""

    __slots__ = (
        "accumulate",
        "alone",
        "batches",
        "bytes",
        "costs",
        "ends",
        "label",
        "longest",
        "pace",
        "predicted",
        "seconds",
        "tier",
        "total",
        "weight",
        "work",
    )

    def __init__(self, label: Any, tier: str, now: float) -> None:
        self.label = label
        self.tier = tier
        self.batches = 0
        """Batches the unit has run; a member's last batch is told on the same scale."""
        self.ends: dict[int, int] = {}
        """By member: the unit's batch at which it will have had its length."""
        self.longest: int | None = None
        """The largest of them; None where it has to be looked for."""
        self.total = 0
        """Their sum."""
        self.alone: dict[int, float] = {}
        """By member: predicted seconds of one batch alone, where known."""
        self.costs = 0.0
        """Their sum."""
        self.work = self.seconds = 0.0
        """Member batches, and the seconds they took; older ones count less."""
        self.bytes: int | None = None
        self.predicted: float | None = None
        self.accumulate = 1
        self.weight = 1.0
        """What one batch of a member counts in the work of the whole run."""
        self.pace = Pace(now)

    def __len__(self) -> int:
        return len(self.ends)

    def put(self, index: int, left: int) -> None:
        """A member is here, with so many batches left."""
        end = self.batches + left
        before = self.ends.get(index, 0)
        self.total += end - before
        self.ends[index] = end
        if self.longest is not None:
            if end >= self.longest:
                self.longest = end
            elif before == self.longest:
                self.longest = None

    def drop(self, index: int) -> None:
        """A member is no longer here."""
        end = self.ends.pop(index)
        self.total -= end
        if end == self.longest:
            self.longest = None
        self.costs -= self.alone.pop(index, 0.0)

    def left_of(self, index: int) -> int:
        """Batches a member has left."""
        return max(0, self.ends[index] - self.batches)

    @property
    def left(self) -> int:
        """Member batches left."""
        return max(0, self.total - len(self.ends) * self.batches)

    def turn(self, members: int, batches: int, seconds: float) -> None:
        """It has run for a while."""
        fade = math.exp(-seconds / FADE_SECONDS)
        self.work = self.work * fade + members * batches
        self.seconds = self.seconds * fade + seconds
        self.batches += batches

    @property
    def speed(self) -> float | None:
        """Member batches a second of its turns."""
        return self.work / self.seconds if self.seconds > 0 else None

    @property
    def gain(self) -> float | None:
        """How many times faster than its members one after another; None where nothing was predicted."""
        if self.speed is None or not self.alone or len(self.alone) < len(self.ends):
            return None
        return self.speed * self.costs / len(self.alone)

    def seconds_left(self, now: float) -> float:
        """Until the last member's end, by the clock; NaN where nothing can be said."""
        if self.longest is None:
            self.longest = max(self.ends.values(), default=0)
        return self.pace.left(now, self.batches, self.longest - self.batches)


class Tally:
    """Follows all members of a run."""

    def __init__(self, members: Iterable[Member], clock: Callable[[], float] = monotonic) -> None:
        self.clock = clock
        self.began = clock()
        self.members: dict[int, Member] = {}
        self.waiting: dict[int, int] = {}
        """By member that rides nowhere: batches left."""
        self.ended: dict[int, str] = {}
        self.counts: dict[str, int] = {}
        """Members by the way they ended."""
        self.losses: dict[int, float] = {}
        self.total = 0
        """Batches of all members."""
        self.missed = 0
        """Batches that were never trained, of members that ended before their length as cancelled."""
        self.worked = 0.0
        """What this run has trained: member batches, by what they cost alone where that is known."""
        self._usual = 1.0
        """What a batch of a member counts whose cost is not known."""
        self.packs: dict[Any, UnitProgress] = {}
        self.home: dict[int, UnitProgress] = {}
        self.joins = False
        """Whether we are told who rides."""
        self.parts: dict[int, tuple[float | None, float | None]] = {}
        """By member, from the plan: seconds of a batch alone, and its share of its pack's bytes."""
        self.note = ""
        self.over = False
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

    def tell(self, member: Member) -> None:
        """A member has ended an epoch, or left, and nobody tells of turns."""
        row = member.history[-1] if member.history else {}
        if member.status == "running":
            self._epoch(member, row)
        else:
            self._loss(member.index, row)
            self._leave(member, {"status": member.status})

    @property
    def left(self) -> int:
        """Member batches left."""
        return sum(pack.left for pack in self.packs.values()) + sum(self.waiting.values())

    @property
    def share(self) -> float:
        """How much of the work is done, 0 to 1."""
        return 1 - (self.left + self.missed) / self.total if self.total else 1.0

    @property
    def running(self) -> int:
        """Members that ride now."""
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
        index, left = member.index, length(member) - done(member)
        if index not in self.members:
            self.members[index] = member
            self.total += length(member)
        if index in self.home or index in self.ended:
            return
        if member.status == "running":
            self.waiting[index] = left
        else:
            self.waiting.pop(index, None)
            self._count(index, member.status, left)

    def _count(self, index: int, status: str, left: int) -> None:
        self.ended[index] = status
        self.counts[status] = self.counts.get(status, 0) + 1
        if status == "cancelled":
            self.missed += left

    def _back(self, index: int, left: int) -> None:
        """A member that had ended goes on after all."""
        status = self.ended.pop(index)
        self.counts[status] -= 1
        if status == "cancelled":
            self.missed -= left

    def _start(self, member: Member | None, data: Mapping[str, Any]) -> None:
        for each in list(self.members.values()):
            self._see(each)
        for part in (data.get("plan") or {}).get("parts", ()):
            self._plan(part["members"], part.get("predicted") or {})
        known = [alone for alone, _ in self.parts.values() if alone]
        self._usual = sum(known) / len(known) if known else 1.0

    def _weight(self, index: int) -> float:
        return self.parts.get(index, (None, None))[0] or self._usual

    def _plan(self, members: Sequence[int], predicted: Mapping[str, float]) -> None:
        alone, held = predicted.get("alone_seconds"), predicted.get("memory_bytes")
        count = max(1, len(members))
        share = (None if alone is None else alone / count, None if held is None else held / count)
        for index in members:
            self.parts[index] = share

    def _join(self, member: Member | None, data: Mapping[str, Any]) -> None:
        assert member is not None
        self.joins = True
        index, label = member.index, data["unit"]
        self._see(member)
        if index in self.ended:
            self._back(index, length(member) - done(member))
        self._go(index)
        self.waiting.pop(index, None)
        pack = self._pack(label, data["tier"])
        pack.put(index, length(member) - done(member))
        pack.accumulate, pack.weight = member.job.accumulate, self._weight(index)
        self.home[index] = pack
        alone, held = self.parts.get(index, (None, None))
        alone = data.get("alone_seconds", alone)
        if alone is not None and math.isfinite(alone):
            pack.alone[index] = alone
            pack.costs += alone
        if data.get("predicted_bytes") is not None:
            pack.predicted = data["predicted_bytes"]
        elif held is not None:
            pack.predicted = held * len(pack)

    def _pack(self, label: Any, tier: str) -> UnitProgress:
        pack = self.packs.get(label)
        if pack is None:
            pack = self.packs[label] = UnitProgress(label, tier, self.clock())
        return pack

    def _go(self, index: int) -> int | None:
        """A member leaves its pack: what it had left; None where it rode nowhere."""
        pack = self.home.pop(index, None)
        if pack is None:
            return None
        left = pack.left_of(index)
        pack.drop(index)
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
        index = member.index
        self._loss(index, data)
        left = length(member) - done(member)
        pack = self.home.get(index)
        if pack is not None:
            self.worked += (pack.left_of(index) - left) * pack.weight
            pack.put(index, left)
        elif index not in self.ended:
            self.worked += (self.waiting.get(index, left) - left) * self._weight(index)
            self.waiting[index] = left

    def _loss(self, index: int, row: Mapping[str, float]) -> None:
        if "loss" in row:
            self.losses[index] = row["loss"]

    def _leave(self, member: Member | None, data: Mapping[str, Any]) -> None:
        assert member is not None
        index = member.index
        self._see(member)
        left = self._go(index)
        if left is None:
            left = self.waiting.pop(index, 0)
        if index not in self.ended:
            self._count(index, data["status"], left)

    def _preempt(self, member: Member | None, data: Mapping[str, Any]) -> None:
        if member is not None and (left := self._go(member.index)) is not None:
            self.waiting[member.index] = left

    def _split(self, member: Member | None, data: Mapping[str, Any]) -> None:
        self.note = f"pack {data.get('unit')} was split into {data.get('sizes')}: {data.get('reason')}"
        pack = self.packs.get(data.get("unit"))
        for index in list(pack.ends) if pack is not None else []:
            left = self._go(index)
            self.waiting[index] = left or 0

    def _note(self, member: Member | None, data: Mapping[str, Any]) -> None:
        who = "" if member is None else f"{member.name}: "
        self.note = f"{who}{data.get('text', '')}"
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
