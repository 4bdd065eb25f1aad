"""A few timed steps that say whether stacking a recipe pays, and whether it gives the solo step's numbers.

A job's tier must not depend on its companions, or its bits would. So a recipe is tried in a canonical way: copies of
one member as a stack of fixed size, against that member's plain loop, on the same batches, in turns. The verdict is
remembered in the process and on disk (see `perf_cache`), so that later runs decide alike. Stacking is the rule; it must
clearly lose to be given up. A second, smaller stack gives the line on which the time of any pack is predicted.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable
from dataclasses import asdict, dataclass
from functools import wraps
from time import perf_counter, thread_time
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.data.source import TensorSource
from shoal.engine.members.member import Member
from shoal.engine.members.optimizers import trying
from shoal.engine.members.scratch import scratch_copy
from shoal.engine.planning import perf_cache
from shoal.engine.planning.perf_cache import digest
from shoal.engine.planning.planner import Curve
from shoal.engine.recipes.optimizer_plan import plan_optimizer
from shoal.engine.recipes.recipe import Recipe, TraceCache
from shoal.engine.stack.stack import LEAST, Stack
from shoal.engine.tiers.serial import SerialUnit
from shoal.engine.tiers.stacked.unit import StackedUnit
from shoal.engine.tiers.unit import Unit

LOSES = 0.97
"""Stacked below this times the speed of solo steps: not stacked."""
FEW_STEPS = 300
"""Jobs shorter than this are stacked without a trial, which would cost more than it could give."""
ROWS, ROUNDS = 8, 7
LARGE_ROWS, LARGE_ROUNDS = 4, 3
LARGE_SECONDS = 0.02
"""A solo step from which a network is large: its trial is smaller, its stacks have no more rows than were tried (more
would leave the cache), and stacking must gain something, since there is little Python to save."""
WORTH = 1.05
"""What a large network must gain from stacking."""
LARGE_BYTES, LARGE_FEW_STEPS = 16 << 20, 60
"""Results of a step's operators from which a network is taken for large, and the steps that are then worth a trial."""
MOST_ROWS, REFINE_SECONDS = 64, 0.25
"""A pack's own size is tried too, up to so many rows, where its step should take no longer than this."""

_verdicts: dict[str, Verdict] = {}
T = TypeVar("T")


def _undone(measure: Callable[..., T]) -> Callable[..., T]:
    """A measurement of a member or a recipe, after which Python state (a counter in a closure) is as it was."""

    @wraps(measure)
    def inner(what: Recipe | Member, *args: Any, **kwargs: Any) -> T:
        member = what.member if isinstance(what, Recipe) else what
        with trying(member.job, step=member.saved_state.watched):
            return measure(what, *args, **kwargs)

    return inner


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a trial measured: seconds of one member's step, both ways, and whether the numbers agreed."""

    stacked: float
    solo: float
    ratio: float
    """The median of solo over stacked, measured in turns."""
    pair: float = 0.0
    """Seconds of a step of the smallest stack, both rows together; 0: not measured."""

    @property
    def rows(self) -> int:
        """Rows of the stack that was tried."""
        return LARGE_ROWS if self.large else ROWS

    @property
    def curve(self) -> Curve:
        """Seconds of a stacked step over rows."""
        points = [(LEAST, self.pair)] if self.pair else []
        return Curve((*points, (self.rows, self.stacked * self.rows)))

    @property
    def large(self) -> bool:
        """Whether it was tried as a large network."""
        return self.solo >= LARGE_SECONDS

    @property
    def reason(self) -> str:
        """Why not stacked; empty where it should be."""
        if self.ratio < (WORTH if self.large else LOSES):
            return f"a stacked step runs at {self.ratio:.2f} times the speed of solo steps"
        return ""


def num_steps(member: Member) -> int:
    """Optimizer steps of the whole job."""
    job = member.job
    if job.steps is not None:
        return job.steps
    return (job.epochs or 0) * -(-member.num_batches // job.accumulate)


def verdicts(recipes: list[Recipe], trace_cache: TraceCache, *, short_too: bool = False) -> dict[int, Verdict]:
    """What trials say about members of one recipe key, by their places; those left out are stacked, as is the rule.

    Each is tried with its own optimizer: members that have the same one share a trial. `short_too`: also jobs that are
    not worth a trial, whose tier it does not decide.
    """
    by_optimizer: dict[Hashable, Verdict | None] = {}
    said: dict[int, Verdict] = {}
    for recipe in recipes:
        if not (can_be_timed(recipe) if short_too else worth_a_trial(recipe)):
            continue
        kind = recipe.optimizer.key
        if kind not in by_optimizer:
            by_optimizer[kind] = verdict(recipe, trace_cache)
        if (answer := by_optimizer[kind]) is not None:
            said[recipe.member.index] = answer
    return said


def worth_a_trial(recipe: Recipe) -> bool:
    """Whether a trial decides a job's tier: it follows from the job itself, never from its companions."""
    few = LARGE_FEW_STEPS if result_bytes(recipe) >= LARGE_BYTES else FEW_STEPS
    return can_be_timed(recipe) and num_steps(recipe.member) >= few


def can_be_timed(recipe: Recipe) -> bool:
    """Whether a few steps can be timed beforehand: on a CPU, with data in memory."""
    return recipe.member.device.type == "cpu" and isinstance(recipe.member.data.source, TensorSource)


def result_bytes(recipe: Recipe) -> int:
    """Bytes of all results of one member's step, as traced."""
    graph = next(iter(recipe.steps.values()))
    values = [node.meta.get("val") for node in graph.nodes if node.op == "call_function"]
    return sum(v.numel() * v.element_size() for v in pytree.tree_leaves(values) if isinstance(v, Tensor))


def verdict(recipe: Recipe, trace_cache: TraceCache) -> Verdict | None:
    """What a trial says about this recipe, now or earlier; None where it cannot be tried."""
    key = digest(recipe)
    if key not in _verdicts:
        answer = _remembered(key)
        if answer is None:
            try:
                answer = trial(recipe, trace_cache)
            except Exception:  # whatever it is will show in training, where it ends its own member
                return None
            perf_cache.remember(key, asdict(answer))
        _verdicts[key] = answer
    return _verdicts[key]


def _remembered(key: str) -> Verdict | None:
    """What an earlier run measured; None where a number is missing."""
    try:
        return Verdict(**perf_cache.lookup(key).verdict)
    except TypeError:
        return None


def seconds_curve(recipe: Recipe, tried: Verdict | None, tier: str = "stacked") -> Curve | None:
    """Seconds of a step over rows: what runs have shown, then what the trial said."""
    seen = perf_cache.lookup(digest(recipe)).curve("seconds", tier)
    said = tried.curve.points if tried is not None and tier == "stacked" else ()
    return Curve.of([*said, *(seen.points if seen is not None else ())])


def refine(recipe: Recipe, trace_cache: TraceCache, rows: int, tried: Verdict) -> None:
    """Time a stack of a pack's own size, where that is cheap and far from what was tried; it changes no tier."""
    rows = min(rows, MOST_ROWS)
    curve = seconds_curve(recipe, tried)
    if tried.large or curve is None or rows < 2 * tried.rows or curve.at(rows) > REFINE_SECONDS:
        return
    if any(rows / 2 < known <= rows * 2 for known, _ in curve.points):
        return
    try:
        seconds = step_seconds(recipe, trace_cache, rows)
    except Exception:  # whatever it is will show in training, where it ends its own member
        return
    perf_cache.note(digest(recipe), tier="stacked", rows=rows, seconds=seconds)


@_undone
def step_seconds(recipe: Recipe, trace_cache: TraceCache, rows: int, rounds: int = 5) -> float:
    """Seconds of a step of so many copies of the recipe's member, stacked."""
    runner = _stacked(recipe, trace_cache, rows)
    runner.run(1)
    block = max(1, min(16, int(0.02 / runner.run(1))))  # short steps in a row, as in training: caches are warm then
    return statistics.median(runner.run(block) / block for _ in range(rounds))


@_undone
def lone_seconds(member: Member, rounds: int = 2) -> float:
    """Seconds of a step of a copy of this member alone: on a CPU with as many threads as torch has now."""
    runner = _Runner(SerialUnit(scratch_copy(member)))
    runner.run(1)
    return min(runner.run(1) for _ in range(rounds))


def _stacked(recipe: Recipe, trace_cache: TraceCache, rows: int) -> _Runner:
    member = scratch_copy(recipe.member)
    copied = Recipe(member, recipe.steps, plan_optimizer(member))
    copied.shared = recipe.shared
    return _Runner(StackedUnit.around(Stack([copied], size=rows), trace_cache), thread_time)


@_undone
def trial(recipe: Recipe, trace_cache: TraceCache) -> Verdict:
    """Step copies of the recipe's member, stacked and alone, in turns."""
    alone = _Runner(SerialUnit(scratch_copy(recipe.member)), thread_time)
    alone.run(1)
    first = alone.run(1)
    rows, rounds = (ROWS, ROUNDS) if first < LARGE_SECONDS else (LARGE_ROWS, LARGE_ROUNDS)
    together, two = _stacked(recipe, trace_cache, rows), _stacked(recipe, trace_cache, LEAST)
    together.run(2)
    two.run(2)
    ratios, stacked, solo, pair = [], [], [], []
    for number in range(rounds):
        if number % 2:
            a, b = together.run(1), alone.run(rows)
        else:
            b, a = alone.run(rows), together.run(1)
        stacked.append(a / rows)
        solo.append(b / rows)
        ratios.append(solo[-1] / stacked[-1])
        pair.append(two.run(1))
    middle = statistics.median
    return Verdict(middle(stacked), middle(solo), middle(ratios), middle(pair))


class _Runner:
    """A unit stepped over its data in order, again and again."""

    def __init__(self, unit: Unit, clock: Callable[[], float] | None = None) -> None:
        """`clock`: the time of this thread on its core, so that what else the machine does is not counted; None: of the
        wall."""
        self.unit = unit
        self.clock = clock or perf_counter
        self.left = 0

    def run(self, batches: int) -> float:
        """Seconds of so many batches."""
        self._wait()
        start = self.clock()
        for _ in range(batches):
            if not self.left:
                self._begin()
            self.unit.run(1)
            self.left -= 1
        self._wait()
        return self.clock() - start

    def _wait(self) -> None:
        if self.unit.members[0].device.type == "cuda":
            torch.cuda.synchronize(self.unit.members[0].device)

    def _begin(self) -> None:
        member = self.unit.members[0]
        rows = member.data.rows(torch.arange(member.num_rows))
        self.unit.begin_epoch(rows.unsqueeze(0))
        self.left = member.num_batches
