"""Turn members into requests for the planner, and the planner's parts into units."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from shoal.engine.members.batch_stream import pace
from shoal.engine.members.member import Member
from shoal.engine.planning import memory, perf_cache
from shoal.engine.planning.planner import Curve, Part, Request
from shoal.engine.proof.group import Group, explain_reason
from shoal.engine.recipes.recipe import Recipe, TraceCache
from shoal.engine.tiers.serial import SerialUnit
from shoal.engine.tiers.stacked.unit import StackedUnit
from shoal.engine.tiers.unit import Unit
from shoal.engine.units.trials import (
    LARGE_ROWS,
    TrialResult,
    can_be_timed,
    lone_seconds,
    num_steps,
    refine,
    seconds_curve,
    trial_results,
    worth_a_trial,
)

TrialResults = dict[int, TrialResult]
"""The results of trials, by member index."""


def try_out(groups: list[Group], trace_cache: TraceCache, *, short_too: bool = False) -> TrialResults:
    """Run trials for every group that can be stacked, and return their results.

    Args:
        short_too: Also time jobs that are too short for a trial to decide their tier, and jobs that are not stacked.
    """
    results: TrialResults = {}
    for group in groups:
        if not group.stackable:
            for recipe in group.recipes if short_too else ():
                _time_alone(recipe)
            continue
        group_results = trial_results(group.recipes, trace_cache, short_too=short_too)
        stacked = [
            r for r in group.recipes if r.member.index in group_results and not group_results[r.member.index].reason
        ]
        if stacked:  # the size of the pack is timed with the most common optimizer
            kinds = Counter(recipe.optimizer.key for recipe in stacked)
            representative = next(r for r in stacked if r.optimizer.key == kinds.most_common(1)[0][0])
            refine(representative, trace_cache, len(stacked), group_results[representative.member.index])
        results |= group_results
    return results


def _time_alone(recipe: Recipe) -> None:
    """Time a member's step alone and store it, unless it is known or cannot be timed."""
    key = perf_cache.digest(recipe)
    if not can_be_timed(recipe) or perf_cache.lookup(key).curve("seconds", "serial") is not None:
        return
    try:
        perf_cache.note(key, tier="serial", rows=1, seconds=lone_seconds(recipe.member))
    except Exception:  # the same error will end this member in training
        return


def requests(
    groups: list[Group],
    trial_results: TrialResults | None = None,
    tiers: Mapping[int, str] | None = None,
    *,
    exact: bool = True,
) -> list[Request]:
    """Return the planner's request for each member, group by group.

    Args:
        groups: Members that may be stacked together.
        trial_results: The results of trials.
        tiers: The tiers that members had in the run that is resumed, by member index; they get them again.
        exact: Compute bytes from a step on fake tensors; otherwise estimate them, which is faster.
    """
    result: list[Request] = []
    keys: dict[str, int] = {}
    cost_cache: dict[object, dict[str, Any]] = {}
    """Costs by kind of member, so that each kind is computed once."""
    for number, group in enumerate(groups):
        reason = explain_reason(group, groups)
        recipes = {recipe.member.index: recipe for recipe in group.recipes}
        key = perf_cache.computation(group.recipes[0]) if group.recipes else f"untraced {number}"
        key = key if keys.setdefault(key, number) == number else f"{key}-{number}"
        for member in group.members:
            trial_result, recipe = (trial_results or {}).get(member.index), recipes.get(member.index)
            deciding = trial_result if recipe is not None and worth_a_trial(recipe) else None
            tier, why = _tier(group, reason, deciding, (tiers or {}).get(member.index, ""))
            kind = (perf_cache.digest(recipe), tier, trial_result) if recipe is not None else member.index
            if kind not in cost_cache:
                cost_cache[kind] = costs(member, recipe, tier, trial_result=trial_result, exact=exact)
                if cost_cache[kind].get("alone") is None:
                    cost_cache[kind]["alone"] = group.seconds
            result.append(
                Request(
                    index=member.index,
                    name=member.name,
                    key=key,
                    reason=why,
                    tier=tier,
                    loses=trial_result is not None and bool(trial_result.reason),
                    steps=max(0, num_steps(member) - member.step),
                    most_rows=LARGE_ROWS if deciding is not None and deciding.large else None,
                    **cost_cache[kind],
                )
            )
    return result


def _tier(group: Group, reason: str, trial_result: TrialResult | None, recorded: str) -> tuple[str, str]:
    """Return a member's tier and the reason: stacked if that is exact and not slower, otherwise serial."""
    slower = trial_result.reason if trial_result is not None and group.stackable else ""
    tier = "stacked" if group.stackable and not slower else "serial"
    if recorded != tier and (recorded == "serial" or (recorded == "stacked" and group.stackable)):
        return recorded, f"{reason}; {recorded} as in the run before"
    return tier, slower or reason


def costs(
    member: Member,
    recipe: Recipe | None,
    tier: str,
    *,
    trial_result: TrialResult | None = None,
    exact: bool = True,
    compiled: bool = False,
) -> dict[str, Any]:
    """Return the known costs of a member on this tier, as fields of a `Request`."""
    if recipe is None:
        return {"kind": f"untraced {member.index}", "state": Curve.line(0.0, float(memory.lone_bytes(member)))}
    state, working = memory.footprint(recipe, tier, exact=exact, compiled=compiled)
    entry = perf_cache.lookup(perf_cache.digest(recipe))
    serial = entry.curve("seconds", "serial")
    return {
        "kind": perf_cache.digest(recipe),
        "alone": trial_result.solo if trial_result is not None else serial.at(1) if serial is not None else None,
        "seconds": seconds_curve(recipe, trial_result, tier),
        "state": state,
        "working": working,
        "compile_seconds": entry.compile_seconds.get(tier + perf_cache.COMPILED),
        "compiled": entry.curve("seconds", tier + perf_cache.COMPILED),
    }


def in_step(members: Iterable[Member]) -> list[set[int]]:
    """Return the sets of members that may be in one unit, as member indices.

    Members that accumulate gradients or read a stream must be at the same batch of their epochs.
    """
    by_pace: dict[Hashable, set[int]] = {}
    for member in members:
        by_pace.setdefault(pace(member), set()).add(member.index)
    return list(by_pace.values())


def build(parts: Iterable[Part], groups: list[Group], trace_cache: TraceCache) -> list[Unit]:
    """Build the units of these parts."""
    recipes = {recipe.member.index: recipe for group in groups for recipe in group.recipes}
    members: dict[int, Member] = {member.index: member for group in groups for member in group.members}
    units: list[Unit] = []
    for part in parts:
        if part.tier == "stacked":
            units += stacked_units([recipes[i] for i in part.members], trace_cache)
            continue
        for i in part.members:
            unit = SerialUnit(members[i])
            unit.traced = i in recipes
            units.append(unit)
    return units


def stacked_units(
    recipes: Sequence[Recipe], trace_cache: TraceCache, unit_class: type[StackedUnit] = StackedUnit
) -> list[Unit]:
    """Build the stacks of members of one recipe, as units of this class.

    It is one stack, except that members that accumulate gradients or share a stream get one for each position in the
    epoch (see `StackedUnit.accepts`).
    """
    by_pace: dict[Hashable, list[Recipe]] = {}
    for recipe in recipes:
        by_pace.setdefault(pace(recipe.member), []).append(recipe)
    return [unit_class(same_pace, trace_cache) for same_pace in by_pace.values()]
