"""Which members can be one stack, and for those that cannot, why."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from shoal.engine.members.member import Member
from shoal.engine.proof.prove import prove_training
from shoal.engine.recipes.program import Program
from shoal.engine.recipes.recipe import Recipe, TraceCache
from shoal.engine.rules.op_context import NotStackable
from shoal.engine.tracing.patches import Untraceable
from shoal.engine.tracing.signature import difference, skeleton


@dataclass(slots=True, eq=False)
class Group:
    """Members that are one computation: they can be stacked exactly, or `reason` says why not."""

    members: list[Member]
    recipes: list[Recipe] = field(default_factory=list)
    reason: str = ""

    @property
    def stackable(self) -> bool:
        return not self.reason


def group(members: list[Member], trace_cache: TraceCache) -> list[Group]:
    """Members by what they compute, in the order of the first of each group."""
    groups: list[Group] = []
    by_key: dict[Hashable, Group] = {}
    for member in members:
        try:
            recipe = trace_cache.recipe(member)
        except Untraceable as refusal:
            groups.append(Group([member], reason=str(refusal)))
            continue
        if recipe.key not in by_key:
            by_key[recipe.key] = Group([])
            groups.append(by_key[recipe.key])
        by_key[recipe.key].members.append(member)
        by_key[recipe.key].recipes.append(recipe)
    for found in groups:
        if found.stackable:
            found.reason = _refusal(found, trace_cache)
    return [proven for found in groups for proven in _proven(found, trace_cache)]


def _proven(found: Group, trace_cache: TraceCache) -> list[Group]:
    """The group without those whose own step does something else than its graph: each of them is by itself."""
    if not found.recipes:
        return [found]
    reasons: dict[int, str] = {}
    if found.stackable:
        reasons = prove_training(found.recipes, trace_cache)
    if found.members[0].device.type == "cuda" and (reasons or not found.stackable):
        found.reason = found.reason or next(iter(reasons.values()))
        reasons = prove_training(found.recipes, trace_cache, solo=True)  # side by side on streams, then
    kept = Group(
        [member for member in found.members if member.index not in reasons],
        [recipe for recipe in found.recipes if recipe.member.index not in reasons],
        found.reason,
    )
    apart = [Group([m], reason=reasons[m.index]) for m in found.members if m.index in reasons]
    return [*([kept] if kept.members else []), *apart]


def _refusal(found: Group, trace_cache: TraceCache) -> str:
    """Try every step of the group with a member axis, on two members, before any training."""
    recipes = (found.recipes * 2)[: max(2, len(found.recipes))]
    for rows, graph in recipes[0].steps.items():
        leaves = graph.batch_spec.num_leaves
        try:
            Program(
                [recipe.steps[rows] for recipe in recipes],
                device=found.members[0].device,
                stacked_batch=[True] * leaves,
                deterministic=trace_cache.deterministic,
            )
        except NotStackable as refusal:
            return str(refusal)
    return ""


def why_apart(a: Group, b: Group) -> str:
    """Why two stackable groups are not one."""
    x, y = a.recipes[0], b.recipes[0]
    job, other = x.member.job, y.member.job
    for name in ("batch_size", "accumulate", "precision"):
        if getattr(job, name) != getattr(other, name):
            return f"{name} is {getattr(job, name)} against {getattr(other, name)}"
    if x.member.num_rows != y.member.num_rows:
        return f"{x.member.num_rows} rows an epoch against {y.member.num_rows}"
    for rows, graph in x.steps.items():
        if rows not in y.steps:
            return "other batch shapes"
        if skeleton(graph) != skeleton(y.steps[rows]):
            return difference(graph, y.steps[rows])
    if x.member.data.source.streamed != y.member.data.source.streamed:
        return "data read as it is needed against data kept on the device"
    return "a step of its own against a loss" if (job.step is None) != (other.step is None) else "other frozen weights"


def explain_reason(found: Group, groups: list[Group]) -> str:
    """Why a group is run as it is, in one line."""
    others = [other for other in groups if other is not found and other.stackable]
    if not found.stackable:
        return found.reason
    return "one computation" if not others else f"one computation; apart from others: {why_apart(found, others[0])}"
