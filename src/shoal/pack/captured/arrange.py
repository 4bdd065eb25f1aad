"""Units for a GPU: captured where they can be, each group in the form that was fastest."""

from __future__ import annotations

from typing import Literal

from shoal.pack.captured.choose import choose, why_not
from shoal.pack.captured.chunk import Cache
from shoal.pack.group import Group, told
from shoal.pack.plan import Part
from shoal.pack.recipe import Kitchen, Recipe
from shoal.pack.serial import SerialUnit
from shoal.pack.stacked.unit import StackedUnit
from shoal.pack.unit import Unit


def arrange(groups: list[Group], kitchen: Kitchen, compile: bool | Literal["auto"]) -> tuple[list[Part], list[Unit]]:
    """Parts of the plan and their units, for members on a GPU."""
    parts: list[Part] = []
    units: list[Unit] = []
    cache: Cache = kitchen.executables
    for found in groups:
        reason = told(found, groups)
        if not found.recipes:
            for member in found.members:
                parts.append(Part("serial", [member.index], [member.name], reason))
                units.append(SerialUnit(member))
            continue
        for recipes in _alike(found.recipes):
            part, unit = _captured(found, recipes, kitchen, cache, compile, reason)
            parts.append(part)
            units += unit
    return parts, units


def _captured(
    found: Group, recipes: list[Recipe], kitchen: Kitchen, cache: Cache, compile: bool | Literal["auto"], reason: str
) -> tuple[Part, list[Unit]]:
    members = [recipe.member for recipe in recipes]
    places, names = [m.index for m in members], [m.name for m in members]
    refused = why_not(recipes[0])
    chosen = None if refused else choose(recipes, kitchen, cache, compile, stackable=found.stackable)
    if chosen is None:
        why = f"{reason}; not captured: {refused or 'the device refused'}"
        if not found.stackable:
            return Part("serial", places, names, why), [SerialUnit(member) for member in members]
        return Part("stacked", places, names, why), [StackedUnit(recipes, kitchen)]
    form, unit = chosen
    predicted = {"step_seconds": form.seconds}
    if form.compiled:
        predicted["compile_seconds"] = form.compile_seconds
    return Part(form.tier, places, names, reason, predicted), [unit]


def _alike(recipes: list[Recipe]) -> list[list[Recipe]]:
    """Members that read the same data, since a captured step gathers from one data set; and those that cannot be
    captured by themselves, or the others would not be either."""
    groups: dict[tuple[int, bool], list[Recipe]] = {}
    for recipe in recipes:
        groups.setdefault((id(recipe.member.data.source), bool(why_not(recipe))), []).append(recipe)
    return list(groups.values())
