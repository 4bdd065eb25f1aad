"""The decision as plain data: which members ride together, on which tier, and why."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from shoal.pack.group import Group, group, told
from shoal.pack.measure import LARGE_ROWS, Verdict, verdicts
from shoal.pack.members import Member
from shoal.pack.recipe import Kitchen
from shoal.pack.serial import SerialUnit
from shoal.pack.stacked.unit import StackedUnit
from shoal.pack.unit import Executor, Unit


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


Verdicts = dict[int, Verdict]
"""For members that were tried, by their places, what the trial said."""


def decide(groups: list[Group], device: str, tried: Verdicts | None = None) -> Plan:
    """A tier for every group: stacked where that is exact and does not lose, serial otherwise."""
    parts = []
    for found in groups:
        reason = told(found, groups)
        said = {m.index: (tried or {}).get(m.index) for m in found.members}
        alone = [m for m in found.members if not found.stackable or _refused(said[m.index])]
        for member in alone:
            verdict = said[member.index]
            why = verdict.reason if verdict is not None and found.stackable else reason
            predicted = {} if verdict is None else {"step_seconds": verdict.solo}
            parts.append(Part("serial", [member.index], [member.name], why, predicted))
        together = [m for m in found.members if m not in alone]
        if together:
            known = [v for m in together if (v := said[m.index]) is not None]
            size = LARGE_ROWS if known and known[0].large else len(together)
            for start in range(0, len(together), size):
                some = together[start : start + size]
                predicted = {"step_seconds": known[0].stacked * len(some)} if known else {}
                parts.append(Part("stacked", [m.index for m in some], [m.name for m in some], reason, predicted))
    return Plan(device, parts)


def _refused(verdict: Verdict | None) -> bool:
    return verdict is not None and bool(verdict.reason)


def build(plan: Plan, groups: list[Group], kitchen: Kitchen) -> list[Unit]:
    """The units a plan asks for."""
    recipes = {recipe.member.index: recipe for found in groups for recipe in found.recipes}
    members: dict[int, Member] = {member.index: member for found in groups for member in found.members}
    units: list[Unit] = []
    for part in plan.parts:
        if part.tier == "stacked":
            units.append(StackedUnit([recipes[i] for i in part.members], kitchen))
        else:
            for i in part.members:
                unit = SerialUnit(members[i])
                unit.traced = i in recipes
                units.append(unit)
    return units


def arrange(
    members: list[Member], *, timed: bool = True, compile: bool | Literal["auto"] = "auto"
) -> tuple[Plan, list[Unit], Executor]:
    """Group, try, decide, build. Without `timed` no clock has a say: stacked wherever that is exact."""
    kitchen = Kitchen()
    groups = group(members, kitchen)
    if members[0].device.type == "cuda":
        from shoal.pack.captured.arrange import arrange as arrange_captured
        from shoal.pack.captured.executor import CapturedExecutor

        parts, units = arrange_captured(groups, kitchen, compile)
        return Plan(str(members[0].device), parts), units, CapturedExecutor()
    tried: Verdicts = {}
    for found in groups if timed else []:
        if found.stackable:
            tried |= verdicts(found.recipes, kitchen)
    plan = decide(groups, str(members[0].device), tried)
    return plan, build(plan, groups, kitchen), Executor()
