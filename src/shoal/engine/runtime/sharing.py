"""How a run is shared among processes of a CPU: how many there are, and which members each of them trains.

Members whose step could not be traced stay in the calling process: their Python may have effects that the caller
waits for. So do streams, whose reading threads do not survive a fork.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from time import perf_counter, process_time

import torch
from torch.nn.parameter import is_lazy

from shoal.data.source import TensorSource
from shoal.engine.members.member import Member
from shoal.engine.planning.planner import predict
from shoal.engine.runtime.commands import TOO_FEW
from shoal.engine.runtime.planning_context import PlanningContext
from shoal.engine.runtime.processes import ask_children
from shoal.engine.units.trials import lone_seconds
from shoal.utils.torch_flags import torch_flags

WORTH_SECONDS = 2.0
"""Predicted work from which other processes are asked to help."""
EVEN = 1.1
"""The busiest process's share of the work, over the mean, up to which no stack is cut."""
SPIN_SECONDS = 0.1
HEAVY_SECONDS = 0.02
"""Of a step, from which a network is large enough for torch's threads to matter."""
STEP_SECONDS = 2e-4
"""Of the smallest network that there is."""
MANY_STEPS = 100
"""Steps of work from which it is worth a trial of a few."""


def processes_for(
    members: Sequence[Member], planning: PlanningContext, threads: int | None, *, busy_too: bool = False
) -> int:
    """How many processes these members are worth; `threads` and `busy_too` as in `workers_for`."""
    if not any(movable(member, planning) for member in members):
        return 1
    count = workers_for(threads, planning.device, predicted_seconds(planning, members), busy_too=busy_too)
    given = "SHOAL_WORKERS" in os.environ
    return count if count == 1 or given or _apart_pays(members, planning, count) else 1


def _apart_pays(members: Sequence[Member], planning: PlanningContext, count: int) -> bool:
    """Whether so many processes at once are faster, tried on the largest of the networks where large ones are most of
    the work."""
    threads = planning.executor.most_threads or torch.get_num_threads()
    if threads == 1:
        return True
    alone = {m.index: planning.request(m).alone or 0.0 for m in members if movable(m, planning)}
    heavy = [member for member in members if alone.get(member.index, 0.0) >= HEAVY_SECONDS]
    total, work = predicted_seconds(planning, members), predicted_seconds(planning, heavy) if heavy else 0.0
    if work < total / 2:
        return True
    largest = max(heavy, key=lambda member: alone[member.index])
    if total < MANY_STEPS * alone[largest.index]:
        return True
    apart = _at_once(largest, count)
    with torch_flags(planning.device, threads):
        return apart < count * lone_seconds(largest)


def threads_for(members: Sequence[Member], planning: PlanningContext, most: int) -> int:
    """How many of torch's threads these members' steps should use, decided before they train: one, or `most`.

    Small networks gain nothing from several threads, and on a busy machine they lose a lot: threads wait for each other
    at every operator. Of large networks a few steps of one are timed both ways, unless there is too little to train.
    """
    if most == 1 or not members:
        return 1
    if not all(isinstance(member.data.source, TensorSource) for member in members):
        return most  # reading data for a trial could change what training reads
    largest = max(members, key=lambda m: (planning.request(m).alone or 0.0, _least_seconds(m)))
    try:
        seconds = planning.request(largest).alone or lone_seconds(largest, rounds=1)
        if seconds < HEAVY_SECONDS:
            return 1
        if sum(member.batches_to_stop for member in members) < MANY_STEPS:
            return most
        one = lone_seconds(largest)
        with torch_flags(planning.device, most):
            return most if lone_seconds(largest) < one else 1
    except Exception:  # whatever it is will show in training, where it ends its own member
        return 1


def _at_once(member: Member, count: int) -> float:
    """Seconds of a step while so many processes do the same."""
    seconds = ask_children([partial(_send_seconds, member)] * count)
    return max(seconds) if len(seconds) == count else float("inf")


def _send_seconds(member: Member, pipe: Connection) -> None:
    pipe.send(lone_seconds(member))


def usable_cores() -> int:
    """Cores this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def workers_for(threads: int | None, device: torch.device, seconds: float, *, busy_too: bool = False) -> int:
    """How many processes a run of so many predicted seconds is worth.

    `threads=None`: one process for each core that is free, whatever torch's own thread count. A number
    keeps everything in this process, with so many torch threads. SHOAL_WORKERS overrides both. `busy_too`: count cores
    that others use now.
    """
    if device.type != "cpu" or not hasattr(os, "fork"):
        return 1
    given = os.environ.get("SHOAL_WORKERS", "")
    if given and not (given.isdigit() and int(given) > 0):
        raise ValueError(f"SHOAL_WORKERS is {given!r}; set it to a whole number, 1 or more, or not at all")
    if given:
        return int(given)
    if threads is not None or seconds < WORTH_SECONDS:
        return 1
    cores = usable_cores()
    return cores if cores == 1 or busy_too else min(cores, max(1, round(free_cores(cores))))


def free_cores(count: int) -> float:
    """How many of so many cores this process would really get: others may use them, or a quota may limit it.

    So many processes count for a moment, and what each got of a core is added up. On a busy core a worker would only
    make the others wait for it.
    """
    return float(sum(ask_children([_spin] * count)))


def _spin(pipe: Connection) -> None:
    start, used = perf_counter(), process_time()
    while perf_counter() < start + SPIN_SECONDS:
        pass
    pipe.send((process_time() - used) / (perf_counter() - start))


def movable(member: Member, planning: PlanningContext) -> bool:
    """Whether a member may train in another process: its step has been traced, also where its stack was too small."""
    traced = member.index in planning.recipes or planning.request(member).reason == TOO_FEW
    return traced and not member.data.source.streamed


def deal(members: Sequence[Member], planning: PlanningContext, count: int) -> list[list[Member]]:
    """Members dealt out to `count` processes, the first of which is this one."""
    pieces = [Piece(kind, weight(kind, planning), movable(kind[0], planning)) for kind in kinds_of(members, planning)]
    shares = even_shares(pieces, planning, count)
    return [sorted((m for piece in share for m in piece.members), key=lambda m: m.index) for share in shares]


@dataclass(slots=True, eq=False)
class Piece:
    """Members that go to one process together."""

    members: list[Member]
    weight: float
    movable: bool


def load(share: list[Piece]) -> float:
    """Seconds of work in a share."""
    return sum(piece.weight for piece in share)


def even_shares(
    pieces: list[Piece], planning: PlanningContext, count: int, *, most: float = math.inf
) -> list[list[Piece]]:
    """Pieces for `count` processes. Stacks stay whole where that gives the processes equal work, and are halved, the
    largest first, where it does not; `most`: half a stack's share of the whole one's work, up to which it is halved."""
    while True:
        shares = share_out(pieces, count)
        busiest = max(shares, key=load)
        large = [p for p in busiest if p.movable and len(p.members) >= 4 and _half(p, planning) <= most * p.weight]
        cut = max(large, key=lambda p: p.weight, default=None)
        if cut is None or load(busiest) <= EVEN * sum(p.weight for p in pieces) / count:
            return shares
        pieces = [piece for piece in pieces if piece is not cut]
        pieces += [Piece(some, _half(cut, planning), True) for some in (cut.members[::2], cut.members[1::2])]


def _half(piece: Piece, planning: PlanningContext) -> float:
    """Seconds of work in half of a stack."""
    whole = weight(piece.members, planning)
    return piece.weight * weight(piece.members[::2], planning) / whole if whole else 0.0


def share_out(pieces: list[Piece], count: int) -> list[list[Piece]]:
    """The heaviest first, each to the process that has the least; what cannot be moved stays here."""
    shares: list[list[Piece]] = [[] for _ in range(count)]
    for piece in sorted(pieces, key=lambda piece: (piece.movable, -piece.weight)):
        (min(shares, key=load) if piece.movable else shares[0]).append(piece)
    return shares


def kinds_of(members: Sequence[Member], planning: PlanningContext) -> list[list[Member]]:
    """Members that could be one stack; the others by themselves."""
    kinds: dict[object, list[Member]] = {}
    for member in members:
        request = planning.request(member)
        alone = request.tier == "serial" or not movable(member, planning)
        kinds.setdefault(member.index if alone else request.key, []).append(member)
    return list(kinds.values())


def weight(members: Sequence[Member], planning: PlanningContext) -> float:
    """Seconds of work left in members of one kind, as far as can be said beforehand.

    A step is taken to cost something by itself and something for each member; those with less to do leave earlier.
    """
    batches = [member.batches_to_stop for member in members]
    timed = [member for member in members if _step_seconds([member], planning) is not None]
    if not timed:
        return sum(n * _least_seconds(member) for n, member in zip(batches, members, strict=True))
    count, some = len(timed), timed[: max(1, len(timed) // 2)]
    whole, half = (_step_seconds(stack, planning) or 0.0 for stack in (timed, some))
    each = max(0.0, whole - half) / max(1, count - len(some))
    return max(0.0, whole - each * count) * max(batches) + each * sum(batches)


def _step_seconds(members: Sequence[Member], planning: PlanningContext) -> float | None:
    return predict(list(map(planning.request, members))).get("step_seconds")


def predicted_seconds(planning: PlanningContext, members: Sequence[Member]) -> float:
    """What these members take in one process: from timed steps, else from the size of the networks (too little rather
    than too much)."""
    return sum(weight(kind, planning) for kind in kinds_of(members, planning))


def _least_seconds(member: Member) -> float:
    """A step at 20 GFLOP/s, every weight used once a row; what Python and torch take to call it, at least."""
    weights = sum(p.numel() for p in member.model.parameters() if not is_lazy(p))
    return max(STEP_SECONDS, 6e0 * weights * member.job.batch_size / 2e10)
