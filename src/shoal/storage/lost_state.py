"""Find Python state that checkpoints and clones cannot contain, so that one warning can say so before a run starts."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from shoal.engine.members.member import Member, draws
from shoal.engine.members.scratch import scratch_copy
from shoal.engine.python_state.preserve import preserved
from shoal.engine.python_state.saved_state import share, state_roots
from shoal.engine.python_state.state_keeper import SHARED
from shoal.engine.recipes.recipe import Recipe
from shoal.engine.tiers.serial import SerialUnit

STEPS = 2
"""The number of steps in a trial; a change in the first step may only show in the second."""


def watch_state(members: Sequence[Member], recipes: Mapping[int, Recipe]) -> None:
    """Record the Python state that members may change, before any of them trains.

    Args:
        recipes: The recipes of members whose step was traced and so changes no Python state. For these members, only an
            untraced optimizer or schedule may change some.
    """
    for member in members:
        member.saved_state.wanted = True
        if member.index not in recipes or recipes[member.index].optimizer.flags is None:
            member.saved_state.begin(member.job, member.model)
    share([member.saved_state for member in members])


def lost_state(members: Sequence[Member]) -> dict[str, dict[str, str]]:
    """Return, by job name, the state that training changes and that cannot be saved, with the reason.

    A few steps are tried for each kind of job.
    """
    lost: dict[str, dict[str, str]] = {}
    tried: dict[Hashable, dict[str, str]] = {}
    for member in members:
        if member.saved_state.job is None or member.status != "running":
            continue
        kind = _kind(member)
        if kind not in tried:
            tried[kind] = _try_steps(member)
        lost[member.name] = tried[kind]
    return {name: problems for name, problems in lost.items() if problems}


def describe_lost_state(lost: dict[str, dict[str, str]], what: str) -> str:
    """Return a one-line warning about lost state."""
    name, problems = next(iter(lost.items()))
    where, why = next(iter(problems.items()))
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    others = f", and {len(lost) - 1} more jobs" if len(lost) > 1 else ""
    fix = "give each job objects of its own" if why == SHARED else "keep it in numbers, tensors, lists or dicts"
    return f"job {name!r}{others}: its training changes {where}{more}, which cannot be saved ({why}); {what}; {fix}"


def _kind(member: Member) -> Hashable:
    """Return a key that is equal for jobs with the same code, which change the same state."""
    job = member.job
    functions = (job.step, job.loss, job.schedule, job.optimizer)
    shared = frozenset(member.saved_state.job.shared) if member.saved_state.job is not None else frozenset()
    return (
        type(member.model),
        shared,
        *(getattr(f, "__code__", None) or type(f) for f in functions),
    )


def _try_steps(member: Member) -> dict[str, str]:
    """Train a copy for two steps, return the state that cannot be saved, and restore everything."""
    job, keeper = member.job, member.saved_state.job
    assert keeper is not None
    with preserved(state_roots(job, member.model), skip=member.model) as state:
        if state.unrestorable:  # a step could not be undone
            keeper.capture()
            return dict(keeper.problems)
        try:
            scratch = scratch_copy(member)
            scratch.saved_state.wanted, scratch.saved_state.watched = True, member.saved_state.watched
            unit = SerialUnit(scratch)
            assert scratch.saved_state.job is not None
            scratch.saved_state.job.shared, scratch.place = keeper.shared, 0
            batches = min(STEPS * job.accumulate, member.num_batches)
            feed = iter([member.data.take(0, min(member.batch_size, member.num_rows))] * batches)
            with draws(scratch) as begin:
                for _ in range(batches):
                    begin()
                    unit._batch(feed)
            scratch.saved_state.capture()
        except Exception:  # training will raise and report the same error
            return {}
    return scratch.saved_state.problems
