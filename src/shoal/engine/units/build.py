"""From members to requests for the planner, and from its parts to units."""

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
    Verdict,
    can_be_timed,
    lone_seconds,
    num_steps,
    refine,
    seconds_curve,
    verdicts,
    worth_a_trial,
)

Verdicts = dict[int, Verdict]
"""What a trial said of members, by their places."""


def try_out(groups: list[Group], trace_cache: TraceCache, *, short_too: bool = False) -> Verdicts:
    """What trials say about every group that can be stacked.

    `short_too`: also time jobs that are so short that no trial decides their tier, and jobs that are not stacked.
    """
    tried: Verdicts = {}
    for alike in groups:
        if not alike.stackable:
            for recipe in alike.recipes if short_too else ():
                _time_alone(recipe)
            continue
        said = verdicts(alike.recipes, trace_cache, short_too=short_too)
        stacked = [r for r in alike.recipes if r.member.index in said and not said[r.member.index].reason]
        if stacked:  # the pack's own size is tried with the optimizer that most of them have
            kinds = Counter(recipe.optimizer.key for recipe in stacked)
            usual = next(r for r in stacked if r.optimizer.key == kinds.most_common(1)[0][0])
            refine(usual, trace_cache, len(stacked), said[usual.member.index])
        tried |= said
    return tried


def _time_alone(recipe: Recipe) -> None:
    key = perf_cache.digest(recipe)
    if not can_be_timed(recipe) or perf_cache.lookup(key).curve("seconds", "serial") is not None:
        return
    try:
        perf_cache.note(key, tier="serial", rows=1, seconds=lone_seconds(recipe.member))
    except Exception:  # whatever it is will show in training, where it ends its own member
        return


def requests(
    groups: list[Group],
    tried: Verdicts | None = None,
    tiers: Mapping[int, str] | None = None,
    *,
    exact: bool = True,
) -> list[Request]:
    """Every member as the planner sees it, group by group.

    Args:
        groups: Members that may be stacked together.
        tried: What trials said.
        tiers: Those that members had in the run that is resumed; they get them again.
        exact: Whether bytes are worked out from a step without data; else by rule of thumb, at once.
    """
    asked: list[Request] = []
    keys: dict[str, int] = {}
    known: dict[object, dict[str, Any]] = {}
    """What members of one kind have in common is looked up once."""
    for number, alike in enumerate(groups):
        reason = explain_reason(alike, groups)
        recipes = {recipe.member.index: recipe for recipe in alike.recipes}
        key = perf_cache.computation(alike.recipes[0]) if alike.recipes else f"untraced {number}"
        key = key if keys.setdefault(key, number) == number else f"{key}-{number}"
        for member in alike.members:
            verdict, recipe = (tried or {}).get(member.index), recipes.get(member.index)
            deciding = verdict if recipe is not None and worth_a_trial(recipe) else None
            tier, why = _tier(alike, reason, deciding, (tiers or {}).get(member.index, ""))
            kind = (perf_cache.digest(recipe), tier, verdict) if recipe is not None else member.index
            if kind not in known:
                known[kind] = costs(member, recipe, tier, verdict=verdict, exact=exact)
                if known[kind].get("alone") is None:
                    known[kind]["alone"] = alike.seconds
            asked.append(
                Request(
                    index=member.index,
                    name=member.name,
                    key=key,
                    reason=why,
                    tier=tier,
                    loses=verdict is not None and bool(verdict.reason),
                    steps=max(0, num_steps(member) - member.step),
                    most_rows=LARGE_ROWS if deciding is not None and deciding.large else None,
                    **known[kind],
                )
            )
    return asked


def _tier(alike: Group, reason: str, verdict: Verdict | None, recorded: str) -> tuple[str, str]:
    """A member's tier and why: stacked where that is exact and does not lose, serial otherwise."""
    lost = verdict.reason if verdict is not None and alike.stackable else ""
    tier = "stacked" if alike.stackable and not lost else "serial"
    if recorded != tier and (recorded == "serial" or (recorded == "stacked" and alike.stackable)):
        return recorded, f"{reason}; {recorded} as in the run before"
    return tier, lost or reason


def costs(
    member: Member,
    recipe: Recipe | None,
    tier: str,
    *,
    verdict: Verdict | None = None,
    exact: bool = True,
    compiled: bool = False,
) -> dict[str, Any]:
    """What is known of a member's costs on this tier, as fields of a Request."""
    if recipe is None:
        return {"kind": f"untraced {member.index}", "state": Curve.line(0.0, float(memory.lone_bytes(member)))}
    state, working = memory.footprint(recipe, tier, exact=exact, compiled=compiled)
    entry = perf_cache.lookup(perf_cache.digest(recipe))
    serial = entry.curve("seconds", "serial")
    return {
        "kind": perf_cache.digest(recipe),
        "alone": verdict.solo if verdict is not None else serial.at(1) if serial is not None else None,
        "seconds": seconds_curve(recipe, verdict, tier),
        "state": state,
        "working": working,
        "compile_seconds": entry.compile_seconds.get(tier + perf_cache.COMPILED),
        "compiled": entry.curve("seconds", tier + perf_cache.COMPILED),
    }


def in_step(members: Iterable[Member]) -> list[set[int]]:
    """Members that may be in one unit, by their places in the list: those that accumulate gradients, or read a stream,
    have to be at the same batch of their epochs."""
    sets: dict[Hashable, set[int]] = {}
    for member in members:
        sets.setdefault(pace(member), set()).add(member.index)
    return list(sets.values())


def build(parts: Iterable[Part], groups: list[Group], trace_cache: TraceCache) -> list[Unit]:
    """The units of these parts."""
    recipes = {recipe.member.index: recipe for alike in groups for recipe in alike.recipes}
    members: dict[int, Member] = {member.index: member for alike in groups for member in alike.members}
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


def stacked_units(recipes: Sequence[Recipe], trace_cache: TraceCache) -> list[Unit]:
    """Stacks of members of one recipe: one of all, but of those that accumulate, or share a stream, one for each place
    in the epoch, since they have to be in step (see `StackedUnit.accepts`)."""
    in_step: dict[Hashable, list[Recipe]] = {}
    for recipe in recipes:
        in_step.setdefault(pace(recipe.member), []).append(recipe)
    return [StackedUnit(some, trace_cache) for some in in_step.values()]
