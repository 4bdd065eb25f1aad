"""Units for a GPU: captured where they can be, each group in the form that was fastest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Literal

from shoal.engine.planning.planner import Part
from shoal.engine.proof.group import Group, explain_reason
from shoal.engine.recipes.recipe import Recipe, TraceCache
from shoal.engine.tiers.captured.chunk import Cache
from shoal.engine.tiers.serial import SerialUnit
from shoal.engine.tiers.unit import Unit
from shoal.engine.units._choose_form import choose, why_not
from shoal.engine.units.build import stacked_units


def arrange(
    groups: list[Group],
    trace_cache: TraceCache,
    compile: bool | Literal["auto"],
    recorded: Mapping[int, str] | None = None,
) -> tuple[list[Part], list[Unit]]:
    """Parts of the plan and their units, for members on a GPU.

    `recorded`: the forms that members had in the run that is resumed ("serial", "streams compiled"), by their places.
    They have them again where that is possible.
    """
    recorded = recorded or {}
    parts: list[Part] = []
    units: list[Unit] = []
    cache: Cache = trace_cache.executables
    for alike in groups:
        reason = explain_reason(alike, groups)
        for member in alike.members:
            before = recorded.get(member.index) == "serial"
            if before or not alike.recipes:
                why = f"{reason}; serial as in the run before" if before and alike.recipes else reason
                parts.append(Part("serial", [member.index], [member.name], why))
                units.append(SerialUnit(member))
        for form, recipes in _alike(alike.recipes, recorded):
            part, unit = _captured(alike, recipes, trace_cache, cache, compile, reason, form)
            parts.append(part)
            units += unit
    return parts, units


def _captured(
    alike: Group,
    recipes: list[Recipe],
    trace_cache: TraceCache,
    cache: Cache,
    compile: bool | Literal["auto"],
    reason: str,
    recorded: str,
) -> tuple[Part, list[Unit]]:
    members = [recipe.member for recipe in recipes]
    places, names = [m.index for m in members], [m.name for m in members]
    refused = why_not(recipes[0])
    chosen = None
    if not refused:
        chosen = choose(recipes, trace_cache, cache, compile, stackable=alike.stackable, recorded=recorded)
    if chosen is None:
        why = f"{reason}; not captured: {refused or 'the device refused'}"
        if not alike.stackable:
            return Part("serial", places, names, why), [SerialUnit(member) for member in members]
        return Part("stacked", places, names, why), stacked_units(recipes, trace_cache)
    form, unit = chosen
    predicted = {"step_seconds": form.seconds}
    if form.compiled:
        predicted["compile_seconds"] = form.compile_seconds
    return Part(form.tier, places, names, reason, predicted), [unit]


def _alike(recipes: list[Recipe], recorded: Mapping[int, str]) -> list[tuple[str, list[Recipe]]]:
    """Members that are captured together, with the form that they had in the run before.

    They read the same data, since a captured step gathers from one data set. Those that cannot be captured are apart,
    or the others would not be captured either. Members without a form get the one that most of the others had.
    """
    groups: dict[tuple[int, bool], list[Recipe]] = {}
    for recipe in recipes:
        if recorded.get(recipe.member.index) != "serial":
            groups.setdefault((id(recipe.member.data.source), bool(why_not(recipe))), []).append(recipe)
    parted: list[tuple[str, list[Recipe]]] = []
    for same in groups.values():
        forms = Counter(form for recipe in same if (form := recorded.get(recipe.member.index)))
        usual = forms.most_common(1)[0][0] if forms else ""
        by_form: dict[str, list[Recipe]] = {}
        for recipe in same:
            by_form.setdefault(recorded.get(recipe.member.index, usual), []).append(recipe)
        parted += by_form.items()
    return parted
