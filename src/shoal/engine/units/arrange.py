"""Build the units of members on a GPU: captured if possible, each group in its fastest form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Literal

from shoal.data.source import TensorSource
from shoal.engine.planning.planner import Part
from shoal.engine.proof.group import Group, explain_reason
from shoal.engine.recipes.recipe import Recipe, TraceCache
from shoal.engine.tiers.captured.chunk import Cache
from shoal.engine.tiers.captured.loader_unit import LoaderUnit
from shoal.engine.tiers.serial import SerialUnit
from shoal.engine.tiers.unit import Unit
from shoal.engine.units._choose_form import choose
from shoal.engine.units.build import stacked_units

READ_AS_TRAINING_GOES = "its data is read as training goes"
DETERMINISTIC = "deterministic=True: each job runs by itself, so that no other job changes its bits"


def arrange(
    groups: list[Group],
    trace_cache: TraceCache,
    compile: bool | Literal["auto"],
    recorded: Mapping[int, str] | None = None,
) -> tuple[list[Part], list[Unit]]:
    """Return the parts of the plan and their units, for members on a GPU.

    Args:
        recorded: The forms that members had in the run that is resumed ("serial", "streams compiled"), by member index.
            They get them again if possible.
    """
    recorded = recorded or {}
    parts: list[Part] = []
    units: list[Unit] = []
    cache: Cache = trace_cache.executables
    for group in groups:
        reason = explain_reason(group, groups)
        for member in group.members:
            was_serial = recorded.get(member.index) == "serial"
            if was_serial or not group.recipes:
                why = f"{reason}; serial as in the run before" if was_serial and group.recipes else reason
                parts.append(Part("serial", [member.index], [member.name], why))
                units.append(SerialUnit(member))
        for form, recipes in _group_for_capture(group.recipes, recorded):
            part, unit = _arrange_group(group, recipes, trace_cache, cache, compile, reason, form)
            parts.append(part)
            units += unit
    return parts, units


def _arrange_group(
    group: Group,
    recipes: list[Recipe],
    trace_cache: TraceCache,
    cache: Cache,
    compile: bool | Literal["auto"],
    reason: str,
    recorded: str,
) -> tuple[Part, list[Unit]]:
    """Return the part and the units of members that are captured together, or the reason in the part if they are
    not."""
    members = [recipe.member for recipe in recipes]
    indices, names = [m.index for m in members], [m.name for m in members]
    obstacle = why_not(recipes[0])
    stackable = group.stackable and not trace_cache.deterministic
    if group.stackable and not stackable:
        reason = DETERMINISTIC
    if members[0].batched and not obstacle:
        if stackable:
            return Part("stacked", indices, names, reason), stacked_units(recipes, trace_cache, LoaderUnit)
        obstacle = READ_AS_TRAINING_GOES
    chosen = None
    if not obstacle:
        chosen = choose(recipes, trace_cache, cache, compile, stackable=stackable, recorded=recorded)
    if chosen is None:
        why = f"{reason}; not captured: {obstacle or 'the device refused'}"
        if not stackable:
            return Part("serial", indices, names, why), [SerialUnit(member) for member in members]
        return Part("stacked", indices, names, why), stacked_units(recipes, trace_cache)
    form, unit = chosen
    predicted = {"step_seconds": form.seconds}
    if form.compiled:
        predicted["compile_seconds"] = form.compile_seconds
    return Part(form.tier, indices, names, reason, predicted), [unit]


def _group_for_capture(recipes: list[Recipe], recorded: Mapping[int, str]) -> list[tuple[str, list[Recipe]]]:
    """Group members that are captured together, with the form that they had in the run before.

    They read the same data, since a captured step gathers rows from one data set. Members that cannot be captured are
    separated, so that the others can be. Members without a recorded form get the one that most of the others had.
    """
    groups: dict[tuple[int, bool], list[Recipe]] = {}
    for recipe in recipes:
        if recorded.get(recipe.member.index) != "serial":
            groups.setdefault((id(recipe.member.data.source), bool(why_not(recipe))), []).append(recipe)
    by_data_and_form: list[tuple[str, list[Recipe]]] = []
    for group in groups.values():
        forms = Counter(form for recipe in group if (form := recorded.get(recipe.member.index)))
        most_common_form = forms.most_common(1)[0][0] if forms else ""
        by_form: dict[str, list[Recipe]] = {}
        for recipe in group:
            by_form.setdefault(recorded.get(recipe.member.index, most_common_form), []).append(recipe)
        by_data_and_form += by_form.items()
    return by_data_and_form


def why_not(recipe: Recipe) -> str:
    """Return why a member's steps cannot be captured; empty if they can."""
    member, job = recipe.member, recipe.member.job
    if not isinstance(member.data.source, TensorSource) and not member.batched:
        return READ_AS_TRAINING_GOES
    if job.accumulate > 1:
        return "it accumulates gradients"
    if job.average is not None:
        return "it averages its weights"
    if recipe.optimizer.flags is None:
        return f"{recipe.optimizer.kind.__name__} has no rule"
    runner = recipe.optimizer.runner
    if job.schedule is not None and job.schedule_every == "step" and (runner is None or not runner.can_table()):
        return "its schedule cannot be foreseen"
    if len({tuple(trace.log_names) for trace in recipe.steps.values()}) > 1:
        return "its batches log different names"
    return ""
