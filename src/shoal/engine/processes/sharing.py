"""How a run is shared among processes on a CPU: how many there are, and which members each of them trains.

Members whose step could not be traced stay in the calling process, since their Python code may have side effects that
the caller expects. So do streams, whose reading threads do not survive a fork.
"""

from __future__ import annotations

import math
import os
import time
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
from shoal.engine.processes.child import ask_children
from shoal.engine.runtime.commands import TOO_FEW
from shoal.engine.runtime.planning_context import PlanningContext
from shoal.engine.tiers.threads import busy
from shoal.engine.units.trials import lone_seconds
from shoal.environment import usable_cores
from shoal.utils.torch_flags import torch_flags

WORTH_SECONDS = 2.0
"""Other processes are used if the predicted work takes at least this many seconds."""
EVEN = 1.1
"""No stack is split if the busiest process has at most this many times the mean work."""
SPIN_SECONDS = 0.1
HEAVY_SECONDS = 0.02
"""If a step takes at least this many seconds, the network is large enough for torch's threads to matter."""
STEP_SECONDS = 2e-4
"""The assumed seconds of a step of a very small network."""
MOMENTS, MOMENT_SECONDS = 3, 0.1
"""How often to check whether the cores are busy, and the seconds between two checks."""
MANY_STEPS = 100
"""If at least this many steps are left, a trial of a few steps is worthwhile."""


def processes_for(
    members: Sequence[Member], planning: PlanningContext, threads: int | None, *, busy_too: bool = False
) -> int:
    """Return how many processes to use for these members; `threads` and `busy_too` as in `workers_for`."""
    if not any(movable(member, planning) for member in members):
        return 1
    count = workers_for(threads, planning.device, predicted_seconds(planning, members), busy_too=busy_too)
    is_set = "SHOAL_WORKERS" in os.environ
    return count if count == 1 or is_set or _processes_pay(members, planning, count) else 1


def _processes_pay(members: Sequence[Member], planning: PlanningContext, count: int) -> bool:
    """Return whether it is faster to use so many processes at once.

    It is tried on the largest network, if large networks are most of the work.
    """
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
    at_once = _parallel_step_seconds(largest, count)
    with torch_flags(planning.device, 1 if busy(threads) else threads):
        return at_once < count * lone_seconds(largest)


def threads_for(members: Sequence[Member], planning: PlanningContext, most: int) -> int:
    """Return how many of torch's threads these members' steps should use, decided before they train: one, or `most`.

    Small networks gain nothing from several threads, and on a busy machine they lose a lot: threads wait for each other
    at every operator. For large networks, a few steps of the largest are timed both ways. If the cores stay busy, it is
    one thread; if the run is short, `most`.
    """
    if most == 1 or not members:
        return 1
    if not all(isinstance(member.data.source, TensorSource) for member in members):
        return 1 if _stays_busy(most) else most  # reading data for a trial could change what training reads
    largest = max(members, key=lambda m: (planning.request(m).alone or 0.0, _least_seconds(m)))
    try:
        steps = sum(member.batches_to_stop for member in members)
        return threads_of_step(largest, steps, most, planning.request(largest).alone)
    except Exception:  # the same error will end its own member in training
        return 1


def threads_of_step(member: Member, steps: int, most: int, seconds: float | None = None) -> int:
    """Return how many of torch's threads so many steps like this member's should use; one is in use now.

    Args:
        seconds: The time of a step with one thread, if it is known.
    """
    seconds = seconds or lone_seconds(member, rounds=1)
    if seconds < HEAVY_SECONDS or _stays_busy(most):
        return 1
    if steps < MANY_STEPS:
        return most
    one = lone_seconds(member)
    with torch_flags(torch.device("cpu"), most):
        return most if lone_seconds(member) < one else 1


def _stays_busy(threads: int) -> bool:
    """Return whether the cores are busy at several moments: a decision for a whole run must not follow from one."""
    for probe in range(MOMENTS):
        if probe:
            time.sleep(MOMENT_SECONDS)
        if not busy(threads):
            return False
    return True


def _parallel_step_seconds(member: Member, count: int) -> float:
    """Return seconds of a step while so many processes run the same step."""
    seconds = ask_children([partial(_send_seconds, member)] * count)
    return max(seconds) if len(seconds) == count else float("inf")


def _send_seconds(member: Member, pipe: Connection) -> None:
    pipe.send(lone_seconds(member))


def workers_for(threads: int | None, device: torch.device, seconds: float, *, busy_too: bool = False) -> int:
    """Return how many processes to use for a run of so many predicted seconds.

    Args:
        threads: None: one process for each free core, whatever torch's thread count is. A number keeps everything in
            this process, with so many torch threads. SHOAL_WORKERS overrides both.
        busy_too: Count cores that other programs use now, too.
    """
    if device.type != "cpu" or not hasattr(os, "fork"):
        return 1
    setting = os.environ.get("SHOAL_WORKERS", "")
    if setting and not (setting.isdigit() and int(setting) > 0):
        raise ValueError(f"SHOAL_WORKERS is {setting!r}; set it to a whole number, 1 or more, or not at all")
    if setting:
        return int(setting)
    if threads is not None or seconds < WORTH_SECONDS:
        return 1
    cores = usable_cores()
    return cores if cores == 1 or busy_too else min(cores, max(1, round(free_cores(cores))))


def free_cores(count: int) -> float:
    """Measure how many of so many cores this process would get: others may use them, or a quota may limit it.

    So many processes spin for a moment, and their shares of a core are added up. A worker on a busy core would only
    make the others wait for it.
    """
    return float(sum(ask_children([_spin] * count)))


def _spin(pipe: Connection) -> None:
    start, cpu_start = perf_counter(), process_time()
    while perf_counter() < start + SPIN_SECONDS:
        pass
    pipe.send((process_time() - cpu_start) / (perf_counter() - start))


def movable(member: Member, planning: PlanningContext) -> bool:
    """Return whether a member may train in another process: its step was traced, even if its stack was too small."""
    traced = member.index in planning.recipes or planning.request(member).reason == TOO_FEW
    return traced and not member.data.source.streamed


def assign_members(members: Sequence[Member], planning: PlanningContext, count: int) -> list[list[Member]]:
    """Assign members to `count` processes, the first of which is this one."""
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
    """Return the seconds of work in a share."""
    return sum(piece.weight for piece in share)


def even_shares(
    pieces: list[Piece], planning: PlanningContext, count: int, *, most: float = math.inf
) -> list[list[Piece]]:
    """Return shares of the pieces for `count` processes.

    Stacks are kept whole if that gives the processes equal work; otherwise they are halved, the largest first.

    Args:
        most: A stack is halved only if half of it takes at most this share of the whole one's work.
    """
    while True:
        shares = share_out(pieces, count)
        busiest = max(shares, key=load)
        large = [
            p for p in busiest if p.movable and len(p.members) >= 4 and _half_weight(p, planning) <= most * p.weight
        ]
        to_split = max(large, key=lambda p: p.weight, default=None)
        if to_split is None or load(busiest) <= EVEN * sum(p.weight for p in pieces) / count:
            return shares
        pieces = [piece for piece in pieces if piece is not to_split]
        pieces += [
            Piece(half, _half_weight(to_split, planning), True)
            for half in (to_split.members[::2], to_split.members[1::2])
        ]


def _half_weight(piece: Piece, planning: PlanningContext) -> float:
    """Return the seconds of work in half of a stack."""
    all_weight = weight(piece.members, planning)
    return piece.weight * weight(piece.members[::2], planning) / all_weight if all_weight else 0.0


def share_out(pieces: list[Piece], count: int) -> list[list[Piece]]:
    """Assign the heaviest pieces first, each to the process with the least work; pieces that cannot be moved stay
    here."""
    shares: list[list[Piece]] = [[] for _ in range(count)]
    for piece in sorted(pieces, key=lambda piece: (piece.movable, -piece.weight)):
        (min(shares, key=load) if piece.movable else shares[0]).append(piece)
    return shares


def kinds_of(members: Sequence[Member], planning: PlanningContext) -> list[list[Member]]:
    """Group members that could be one stack; others are alone."""
    kinds: dict[object, list[Member]] = {}
    for member in members:
        request = planning.request(member)
        alone = request.tier == "serial" or not movable(member, planning)
        kinds.setdefault(member.index if alone else request.key, []).append(member)
    return list(kinds.values())


def weight(members: Sequence[Member], planning: PlanningContext) -> float:
    """Predict the seconds of work left in members of one kind.

    A step is assumed to have a fixed cost and a cost per member; members with less to do leave earlier.
    """
    batches = [member.batches_to_stop for member in members]
    timed = [member for member in members if _step_seconds([member], planning) is not None]
    if not timed:
        return sum(n * _least_seconds(member) for n, member in zip(batches, members, strict=True))
    count, half_members = len(timed), timed[: max(1, len(timed) // 2)]
    all_seconds, half_seconds = (_step_seconds(stack, planning) or 0.0 for stack in (timed, half_members))
    per_member = max(0.0, all_seconds - half_seconds) / max(1, count - len(half_members))
    return max(0.0, all_seconds - per_member * count) * max(batches) + per_member * sum(batches)


def _step_seconds(members: Sequence[Member], planning: PlanningContext) -> float | None:
    return predict(list(map(planning.request, members))).get("step_seconds")


def predicted_seconds(planning: PlanningContext, members: Sequence[Member]) -> float:
    """Predict what these members take in one process, from timed steps or else from the size of the networks (a low
    estimate)."""
    return sum(weight(kind, planning) for kind in kinds_of(members, planning))


def _least_seconds(member: Member) -> float:
    """Estimate a step at 20 GFLOP/s with every weight used once per row, but at least the overhead of calling it."""
    weights = sum(p.numel() for p in member.model.parameters() if not is_lazy(p))
    return max(STEP_SECONDS, 6e0 * weights * member.job.batch_size / 2e10)
