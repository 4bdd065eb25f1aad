"""The decision as plain data: which members ride together, on which tier, and why."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shoal.pack.group import Group, group, told
from shoal.pack.members import Member
from shoal.pack.recipe import Kitchen
from shoal.pack.serial import SerialUnit
from shoal.pack.stacked.unit import StackedUnit
from shoal.pack.unit import Unit


@dataclass(slots=True)
class Part:
    """Members that advance together."""

    tier: str
    members: list[int]
    """Places in the user's list."""
    names: list[str]
    reason: str
    """Why this tier, in one line."""
    predicted: dict[str, float] = field(default_factory=dict)
    measured: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Plan:
    """What rides together and what does not. Made before the first step; what it did cost is filled in afterwards."""

    device: str
    parts: list[Part]

    def to_json(self) -> dict[str, Any]:
        """The plan as numbers and strings."""
        names = ("tier", "members", "names", "reason", "predicted", "measured")
        return {"device": self.device, "parts": [{name: getattr(p, name) for name in names} for p in self.parts]}


def decide(groups: list[Group], device: str) -> Plan:
    """A tier for every group: stacked where that is exact, serial otherwise."""
    parts = []
    for found in groups:
        tier = "stacked" if found.stackable else "serial"
        reason = told(found, groups)
        names, places = [m.name for m in found.members], [m.index for m in found.members]
        if tier == "serial":
            parts += [Part(tier, [i], [n], reason) for i, n in zip(places, names, strict=True)]
        else:
            parts.append(Part(tier, places, names, reason))
    return Plan(device, parts)


def build(plan: Plan, groups: list[Group], kitchen: Kitchen) -> list[Unit]:
    """The units a plan asks for."""
    recipes = {recipe.member.index: recipe for found in groups for recipe in found.recipes}
    members: dict[int, Member] = {member.index: member for found in groups for member in found.members}
    units: list[Unit] = []
    for part in plan.parts:
        if part.tier == "stacked":
            units.append(StackedUnit([recipes[i] for i in part.members], kitchen))
        else:
            units += [SerialUnit(members[i]) for i in part.members]
    return units


def arrange(members: list[Member]) -> tuple[Plan, list[Unit]]:
    """Group, decide, build."""
    kitchen = Kitchen()
    groups = group(members, kitchen)
    plan = decide(groups, str(members[0].device))
    return plan, build(plan, groups, kitchen)
