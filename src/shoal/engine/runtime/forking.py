"""How many processes a run is shared among: those of one thread each against one with torch's threads, which large
networks use well."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import torch

from shoal.engine.runtime.processes import forget, fork
from shoal.engine.runtime.workers import movable, predicted_seconds, workers_for
from shoal.engine.units.trials import lone_seconds

if TYPE_CHECKING:
    from shoal.engine.members.member import Member
    from shoal.engine.runtime.planning_context import PlanningContext

HEAVY_SECONDS = 0.02
"""Of a step, from which a network is large enough for threads to matter."""
MANY_STEPS = 100
"""Steps of work from which it is worth a trial of a few."""


def processes_for(members: Sequence[Member], planning: PlanningContext, threads: int | None) -> int:
    """How many processes these members are worth; `threads` as in `workers_for`."""
    count = workers_for(threads, planning.device, predicted_seconds(planning, members))
    told = "SHOAL_WORKERS" in os.environ
    return count if count == 1 or told or _apart_pays(members, planning, count) else 1


def _apart_pays(members: Sequence[Member], planning: PlanningContext, count: int) -> bool:
    """Whether so many processes at once are faster, tried on the largest of the networks where large ones are most of
    the work."""
    if torch.get_num_threads() == 1:
        return True
    alone = {m.index: planning.request(m).alone or 0.0 for m in members if movable(m, planning)}
    heavy = [member for member in members if alone.get(member.index, 0.0) >= HEAVY_SECONDS]
    total, work = predicted_seconds(planning, members), predicted_seconds(planning, heavy) if heavy else 0.0
    if work < total / 2:
        return True
    largest = max(heavy, key=lambda member: alone[member.index])
    if total < MANY_STEPS * alone[largest.index]:
        return True
    return _at_once(largest, count) < count * lone_seconds(largest)


def _at_once(member: Member, count: int) -> float:
    """Seconds of a step while so many processes do the same."""
    handles = [fork(partial(_timed, member)) for _ in range(count)]
    found = []
    for pid, pipe in handles:
        with suppress(EOFError):
            found.append(pipe.recv())
        forget(pipe)
        os.waitpid(pid, 0)
    return max(found) if len(found) == count else float("inf")


def _timed(member: Member, pipe: Connection) -> None:
    pipe.send(lone_seconds(member))
