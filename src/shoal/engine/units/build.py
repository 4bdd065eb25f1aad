"""From members to a plan and its units: group, try, ask the planner, build."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from shoal.engine.members.member import Member
from shoal.engine.planning import memory, perf_cache
from shoal.engine.planning.planner import Curve, Device, Part, Plan, Request, Waiting, pays_after, plan
from shoal.engine.proof.group import Group, group, told
from shoal.engine.recipes.recipe import Recipe, TraceCache
from shoal.engine.tiers.serial import SerialUnit
from shoal.engine.tiers.stacked.unit import StackedUnit
from shoal.engine.tiers.unit import Executor, Unit
from shoal.engine.units.trials import LARGE_ROWS, Verdict, num_steps, refine, seconds_curve, verdicts

AMPLE = 0.05
"""The part of the budget below which packs are not looked at closely."""

Verdicts = dict[int, Verdict]
"""For members that were tried, by their places, what the trial said."""


def decide(
    groups: list[Group],
    device: str,
    tried: Verdicts | None = None,
    *,
    budget: int | None = None,
    tiers: Mapping[int, str] | None = None,
    running: Sequence[Part] = (),
) -> Plan:
    """A tier for every group: stacked where that is exact and does not lose, serial otherwise; then who rides now.

    `tiers`: those that members had in the run that is resumed; they have them again.
    """
    asked = requests(groups, tried, tiers, exact=_tight(groups, budget))
    return plan(asked, running, room(groups, device, budget))


def room(groups: list[Group], device: str, budget: int | None) -> Device:
    """The device as the planner sees it, with the members' data on it."""
    members = [member for found in groups for member in found.members]
    place = torch.device(device)
    taken = memory.data_bytes(members) + memory.fixed_bytes(place) if budget is not None else 0
    return Device(device, budget, place.type == "cuda", taken)


def _tight(groups: list[Group], budget: int | None) -> bool:
    """Whether memory could matter, so that it is worth a closer look."""
    if budget is None:
        return False
    rough = sum(memory.rough(g.recipes[0]) * len(g.members) for g in groups if g.recipes)
    return rough > AMPLE * budget


def requests(
    groups: list[Group],
    tried: Verdicts | None = None,
    tiers: Mapping[int, str] | None = None,
    *,
    exact: bool = True,
) -> list[Request]:
    """Every member as the planner sees it, group by group. `exact=False`: bytes by rule of thumb."""
    found: list[Request] = []
    keys: dict[str, int] = {}
    for number, own in enumerate(groups):
        reason = told(own, groups)
        recipes = {recipe.member.index: recipe for recipe in own.recipes}
        key = perf_cache.computation(own.recipes[0]) if own.recipes else f"untraced {number}"
        key = key if keys.setdefault(key, number) == number else f"{key}-{number}"
        for member in own.members:
            verdict = (tried or {}).get(member.index)
            tier = (tiers or {}).get(member.index, "")
            recipe = recipes.get(member.index)
            found.append(_request(member, recipe, key, reason, own.stackable, verdict, tier, exact))
    return found


def _request(
    member: Member,
    recipe: Recipe | None,
    key: str,
    reason: str,
    stackable: bool,
    verdict: Verdict | None,
    remembered: str,
    exact: bool,
) -> Request:
    lost = verdict.reason if verdict is not None else ""
    tier = "stacked" if stackable and not lost else "serial"
    why = lost if stackable and lost else reason
    if remembered != tier and (remembered == "serial" or (remembered == "stacked" and stackable)):
        tier, why = remembered, f"{reason}; {remembered} as in the run before"
    if recipe is None:
        state, working = Curve.line(0.0, float(memory.lone_bytes(member))), Curve(((1, 0.0),))
    else:
        state, working = memory.footprint(recipe, tier, exact=exact)
    entry = perf_cache.lookup(perf_cache.digest(recipe)) if recipe is not None else perf_cache.Entry()
    serial = entry.curve("seconds", "serial")
    return Request(
        index=member.index,
        name=member.name,
        key=key,
        kind=perf_cache.digest(recipe) if recipe is not None else key,
        reason=why,
        tier=tier,
        steps=max(0, num_steps(member) - member.step),
        alone=verdict.solo if verdict is not None else serial.at(1) if serial is not None else None,
        seconds=seconds_curve(recipe, verdict) if recipe is not None else None,
        state=state,
        working=working,
        most_rows=LARGE_ROWS if verdict is not None and verdict.large else None,
        compile_seconds=entry.compile_seconds.get(tier + perf_cache.COMPILED),
        compiled=entry.curve("seconds", tier + perf_cache.COMPILED),
    )


def build(plan: Plan, groups: list[Group], trace_cache: TraceCache) -> list[Unit]:
    """The units a plan asks for."""
    recipes = {recipe.member.index: recipe for found in groups for recipe in found.recipes}
    members: dict[int, Member] = {member.index: member for found in groups for member in found.members}
    units: list[Unit] = []
    for part in plan.parts:
        if part.tier == "stacked":
            units.append(StackedUnit([recipes[i] for i in part.members], trace_cache))
        else:
            for i in part.members:
                unit = SerialUnit(members[i])
                unit.traced = i in recipes
                units.append(unit)
    return units


def arrange(
    members: list[Member],
    *,
    timed: bool = True,
    compile: bool | Literal["auto"] = "auto",
    budget: int | None = None,
    tiers: Mapping[int, str] | None = None,
) -> tuple[Plan, list[Unit], Executor]:
    """Group, try, decide, build. Without `timed` no clock has a say: stacked wherever that is exact.

    `budget`: bytes that may be used; members that do not fit are in `plan.waiting`, and have no unit.
    `tiers`: those of the run that is resumed, by members' places.
    """
    trace_cache = TraceCache()
    groups = group(members, trace_cache)
    if members[0].device.type == "cuda":
        from shoal.engine.tiers.captured.executor import CapturedExecutor
        from shoal.engine.units.arrange import arrange as arrange_captured

        seated, waiting = _seated(groups, str(members[0].device), budget)
        parts, units = arrange_captured(seated, trace_cache, compile, tiers)
        _fill(parts, seated)
        return Plan(str(members[0].device), parts, waiting, budget), units, CapturedExecutor()
    tried = try_out(groups, trace_cache) if timed else {}
    plan = decide(groups, str(members[0].device), tried, budget=budget, tiers=tiers)
    return plan, build(plan, groups, trace_cache), Executor()


def _seated(groups: list[Group], device: str, budget: int | None) -> tuple[list[Group], list[Waiting]]:
    """The groups with only those members that fit now, and the others."""
    if budget is None or not _tight(groups, budget):
        return groups, []
    made = plan(requests(groups), (), room(groups, device, budget))
    out = {w.index for w in made.waiting}
    seated = [
        Group(
            [m for m in found.members if m.index not in out],
            [r for r in found.recipes if r.member.index not in out],
            found.reason,
        )
        for found in groups
    ]
    return [found for found in seated if found.members], made.waiting


def _fill(parts: list[Part], groups: list[Group]) -> None:
    """What captured parts should take, and what is known of their steps alone."""
    recipes = {recipe.member.index: recipe for found in groups for recipe in found.recipes}
    for part in parts:
        own = [recipes[index] for index in part.members if index in recipes]
        if not own:
            continue
        kinds, count = Counter(map(perf_cache.digest, own)), len(own)
        first = {perf_cache.digest(recipe): recipe for recipe in own}
        compiled = "compile_seconds" in part.predicted
        costs = [
            (*memory.footprint(recipe, part.tier, compiled=compiled), kinds[kind] / count)
            for kind, recipe in first.items()
        ]
        state = sum(state.at(count) * share for state, _, share in costs)
        part.key = perf_cache.computation(own[0])
        part.predicted |= {
            "state_bytes": state,
            "memory_bytes": state + max(working.at(count) for _, working, _ in costs),
        }
        part.predicted |= _compiling(perf_cache.lookup(perf_cache.digest_of(own)), part.tier, count)


def _compiling(known: perf_cache.Entry, tier: str, members: int) -> dict[str, float]:
    """What compiling a captured step takes and when it pays, where both forms of it have been tried."""
    name = tier + perf_cache.COMPILED
    plain, compiled = (known.seconds.get(form, {}).get(members) for form in (tier, name))
    if plain is None or compiled is None:
        return {}
    found = {"compile_seconds": known.compile_seconds.get(name, 0.0)}
    pays = pays_after(found["compile_seconds"], plain, compiled)
    return found if pays is None else found | {"compile_pays_after_steps": float(pays)}


def try_out(groups: list[Group], trace_cache: TraceCache) -> Verdicts:
    """What trials say about every group that can be stacked."""
    tried: Verdicts = {}
    for found in groups:
        if not found.stackable:
            continue
        said = verdicts(found.recipes, trace_cache)
        stacked = [r for r in found.recipes if r.member.index in said and not said[r.member.index].reason]
        if stacked:  # the pack's own size is tried with the optimizer that most of them have
            kinds = Counter(recipe.optimizer.key for recipe in stacked)
            usual = next(r for r in stacked if r.optimizer.key == kinds.most_common(1)[0][0])
            refine(usual, trace_cache, len(stacked), said[usual.member.index])
        tried |= said
    return tried


# --- what the run loop asks -------------------------------------------------------------------------------------------


def predicted(request: Request, members: int = 1) -> tuple[float, int]:
    """For a job that waits: (seconds of the work left, NaN where unknown; bytes it takes), in a part of so many."""
    from shoal.engine.planning.planner import cost, predictions

    found = predictions(request, members)
    step = found.get("step_seconds")
    seconds = float("nan") if step is None else step / members * request.steps
    now, before = sum(cost(request, members)), sum(cost(request, members - 1)) if members > 1 else 0.0
    return seconds, int(now - before)
