"""Time a few steps to find out whether stacking a recipe pays.

A job's tier must not depend on the other jobs, or its bits would. So every recipe is tried in the same way: copies of
one member as a stack of fixed size, and that member's plain loop, in turns on the same batches. The result is kept in
the process and on disk (see `perf_cache`), so that later runs decide the same. Jobs are stacked unless stacking is
clearly slower. A second, smaller stack gives the line from which the time of any pack is predicted.
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
"""Jobs are not stacked if stacked steps run at less than this share of the speed of solo steps."""
FEW_STEPS = 300
"""Jobs with fewer steps are stacked without a trial, which would cost more than it could save."""
ROWS, ROUNDS = 8, 7
LARGE_ROWS, LARGE_ROUNDS = 4, 3
LARGE_SECONDS = 0.02
"""A network is large if a solo step takes at least so many seconds. Its trial is smaller, its stacks have at most the
rows that were tried (more would not fit the cache), and stacking must gain something, since there is little Python
overhead to save."""
WORTH = 1.05
"""The least speed-up by stacking that a large network must have."""
LARGE_BYTES, LARGE_FEW_STEPS = 16 << 20, 60
"""A network whose operators produce so many bytes in a step is assumed to be large, and is then worth a trial from so
many steps on."""
MOST_ROWS, REFINE_SECONDS = 64, 0.25
"""The pack's own size is timed too, up to so many rows, if its step is expected to take at most so many seconds."""

_trial_results: dict[str, TrialResult] = {}
T = TypeVar("T")


def _restoring_state(measure: Callable[..., T]) -> Callable[..., T]:
    """Decorate a measurement of a member or recipe, so that Python state (a counter in a closure) is restored after
    it."""

    @wraps(measure)
    def inner(what: Recipe | Member, *args: Any, **kwargs: Any) -> T:
        member = what.member if isinstance(what, Recipe) else what
        with trying(member.job, step=member.saved_state.watched):
            return measure(what, *args, **kwargs)

    return inner


@dataclass(frozen=True, slots=True)
class TrialResult:
    """The measurements of a trial: seconds of one member's step, stacked and alone."""

    stacked: float
    solo: float
    ratio: float
    """The median of solo time over stacked time, measured in turns."""
    pair: float = 0.0
    """Seconds of a step of the smallest stack, both rows together; 0: not measured."""

    @property
    def rows(self) -> int:
        """The number of rows of the stack that was tried."""
        return LARGE_ROWS if self.large else ROWS

    @property
    def curve(self) -> Curve:
        """Seconds of a stacked step as a function of the rows."""
        points = [(LEAST, self.pair)] if self.pair else []
        return Curve((*points, (self.rows, self.stacked * self.rows)))

    @property
    def large(self) -> bool:
        """Whether it was tried as a large network."""
        return self.solo >= LARGE_SECONDS

    @property
    def reason(self) -> str:
        """Why it should not be stacked; empty if it should."""
        if self.ratio < (WORTH if self.large else LOSES):
            return f"a stacked step runs at {self.ratio:.2f} times the speed of solo steps"
        return ""


def num_steps(member: Member) -> int:
    """Return the optimizer steps of the whole job."""
    job = member.job
    if job.steps is not None:
        return job.steps
    return (job.epochs or 0) * -(-member.num_batches // job.accumulate)


def trial_results(recipes: list[Recipe], trace_cache: TraceCache, *, short_too: bool = False) -> dict[int, TrialResult]:
    """Return the trial results of members of one recipe key, by member index. Members without a result are stacked.

    Each member is tried with its own optimizer; members with the same optimizer share a trial.

    Args:
        short_too: Also try jobs that are not worth a trial. Their tier does not depend on it.
    """
    by_optimizer: dict[Hashable, TrialResult | None] = {}
    by_member: dict[int, TrialResult] = {}
    for recipe in recipes:
        if not (can_be_timed(recipe) if short_too else worth_a_trial(recipe)):
            continue
        kind = recipe.optimizer.key
        if kind not in by_optimizer:
            by_optimizer[kind] = trial_result(recipe, trace_cache)
        if (answer := by_optimizer[kind]) is not None:
            by_member[recipe.member.index] = answer
    return by_member


def worth_a_trial(recipe: Recipe) -> bool:
    """Return whether a trial decides a job's tier. This depends only on the job, never on other jobs."""
    few = LARGE_FEW_STEPS if result_bytes(recipe) >= LARGE_BYTES else FEW_STEPS
    return can_be_timed(recipe) and num_steps(recipe.member) >= few


def can_be_timed(recipe: Recipe) -> bool:
    """Return whether a few steps can be timed beforehand: on a CPU, with data in memory."""
    return recipe.member.device.type == "cpu" and isinstance(recipe.member.data.source, TensorSource)


def result_bytes(recipe: Recipe) -> int:
    """Return the bytes of all results of one member's traced step."""
    graph = next(iter(recipe.steps.values()))
    values = [node.meta.get("val") for node in graph.nodes if node.op == "call_function"]
    return sum(v.numel() * v.element_size() for v in pytree.tree_leaves(values) if isinstance(v, Tensor))


def trial_result(recipe: Recipe, trace_cache: TraceCache) -> TrialResult | None:
    """Return the result of this recipe's trial, measured now or earlier; None if it cannot be tried."""
    key = digest(recipe)
    if key not in _trial_results:
        answer = _stored_result(key)
        if answer is None:
            try:
                answer = trial(recipe, trace_cache)
            except Exception:  # the same error will end this member in training
                return None
            perf_cache.remember(key, asdict(answer))
        _trial_results[key] = answer
    return _trial_results[key]


def _stored_result(key: str) -> TrialResult | None:
    """Return the result of an earlier run; None if a number is missing."""
    try:
        return TrialResult(**perf_cache.lookup(key).trial_result)
    except TypeError:
        return None


def seconds_curve(recipe: Recipe, result: TrialResult | None, tier: str = "stacked") -> Curve | None:
    """Return seconds of a step as a function of the rows, from earlier runs and from the trial."""
    measured = perf_cache.lookup(digest(recipe)).curve("seconds", tier)
    trial_points = result.curve.points if result is not None and tier == "stacked" else ()
    return Curve.of([*trial_points, *(measured.points if measured is not None else ())])


def refine(recipe: Recipe, trace_cache: TraceCache, rows: int, result: TrialResult) -> None:
    """Time a stack of the pack's own size, if that is cheap and far from the sizes that are known. It changes no
    tier."""
    rows = min(rows, MOST_ROWS)
    curve = seconds_curve(recipe, result)
    if result.large or curve is None or rows < 2 * result.rows or curve.at(rows) > REFINE_SECONDS:
        return
    if any(rows / 2 < known <= rows * 2 for known, _ in curve.points):
        return
    try:
        seconds = step_seconds(recipe, trace_cache, rows)
    except Exception:  # the same error will end this member in training
        return
    perf_cache.note(digest(recipe), tier="stacked", rows=rows, seconds=seconds)


@_restoring_state
def step_seconds(recipe: Recipe, trace_cache: TraceCache, rows: int, rounds: int = 5) -> float:
    """Time a stacked step of so many copies of the recipe's member."""
    runner = _stacked_runner(recipe, trace_cache, rows)
    runner.run(1)
    block = max(1, min(16, int(0.02 / runner.run(1))))  # several short steps in a row, with warm caches as in training
    return statistics.median(runner.run(block) / block for _ in range(rounds))


@_restoring_state
def lone_seconds(member: Member, rounds: int = 2) -> float:
    """Time a step of a copy of this member alone. On a CPU it uses torch's current number of threads."""
    runner = _Runner(SerialUnit(scratch_copy(member)))
    runner.run(1)
    return min(runner.run(1) for _ in range(rounds))


def _stacked_runner(recipe: Recipe, trace_cache: TraceCache, rows: int) -> _Runner:
    """Return a runner of a stack of so many copies of the recipe's member."""
    member = scratch_copy(recipe.member)
    copied = Recipe(member, recipe.steps, plan_optimizer(member))
    copied.shared = recipe.shared
    return _Runner(StackedUnit.around(Stack([copied], size=rows), trace_cache), thread_time)


@_restoring_state
def trial(recipe: Recipe, trace_cache: TraceCache) -> TrialResult:
    """Time steps of copies of the recipe's member, stacked and alone, in turns."""
    alone = _Runner(SerialUnit(scratch_copy(recipe.member)), thread_time)
    alone.run(1)
    first = alone.run(1)
    rows, rounds = (ROWS, ROUNDS) if first < LARGE_SECONDS else (LARGE_ROWS, LARGE_ROUNDS)
    together, two = _stacked_runner(recipe, trace_cache, rows), _stacked_runner(recipe, trace_cache, LEAST)
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
    median = statistics.median
    return TrialResult(median(stacked), median(solo), median(ratios), median(pair))


class _Runner:
    """Steps a unit over its data in order, again and again."""

    def __init__(self, unit: Unit, clock: Callable[[], float] | None = None) -> None:
        """Time `unit` with `clock`; None: wall-clock time.

        `thread_time` counts only this thread's time on its core, so that other work on the machine does not matter.
        """
        self.unit = unit
        self.clock = clock or perf_counter
        self.left = 0

    def run(self, batches: int) -> float:
        """Run so many batches and return the seconds that they took."""
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
