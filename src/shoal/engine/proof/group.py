"""Group members that can be one stack, and find the reasons why others cannot."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from shoal.engine.members.member import Member
from shoal.engine.proof.prove import prove_training
from shoal.engine.recipes.frozen import share
from shoal.engine.recipes.program import Program
from shoal.engine.recipes.recipe import Recipe, TraceCache
from shoal.engine.rules.op_context import NotStackable
from shoal.engine.tracing.patches import Untraceable
from shoal.engine.tracing.signature import difference, skeleton


@dataclass(slots=True, eq=False)
class Group:
    """Members with the same computation: they can be stacked exactly, or `reason` says why not."""

    members: list[Member]
    recipes: list[Recipe] = field(default_factory=list)
    reason: str = ""
    seconds: float | None = None
    """The seconds of one member's step, if it was timed before tracing."""

    @property
    def stackable(self) -> bool:
        return not self.reason


def group(members: list[Member], trace_cache: TraceCache) -> list[Group]:
    """Group members by what they compute, in the order of the first of each group."""
    recipes: list[Recipe | str] = []
    for member in members:
        try:
            recipes.append(trace_cache.recipe(member))
        except Untraceable as refusal:
            recipes.append(str(refusal))
    if trace_cache.share:
        _share_frozen([recipe for recipe in recipes if isinstance(recipe, Recipe)], trace_cache)
    groups: list[Group] = []
    by_key: dict[Hashable, Group] = {}
    for member, recipe in zip(members, recipes, strict=True):
        if isinstance(recipe, str):
            groups.append(Group([member], reason=recipe))
            continue
        if recipe.key not in by_key:
            by_key[recipe.key] = Group([])
            groups.append(by_key[recipe.key])
        by_key[recipe.key].members.append(member)
        by_key[recipe.key].recipes.append(recipe)
    for same_key in groups:
        if same_key.stackable:
            same_key.reason = _refusal(same_key, trace_cache)
    return [proven for same_key in groups for proven in _split_unproven(same_key, trace_cache)]


def _share_frozen(recipes: list[Recipe], trace_cache: TraceCache) -> None:
    alike: dict[Hashable, list[Recipe]] = {}
    for recipe in recipes:
        alike.setdefault(recipe.key, []).append(recipe)
    for same_key in alike.values():
        share(same_key, trace_cache)


def _split_unproven(candidates: Group, trace_cache: TraceCache) -> list[Group]:
    """Separate members whose own step does something else than its graph; each of them becomes its own group."""
    if not candidates.recipes:
        return [candidates]
    reasons: dict[int, str] = {}
    if candidates.stackable:
        reasons = prove_training(candidates.recipes, trace_cache)
    if candidates.members[0].device.type == "cuda" and (reasons or not candidates.stackable):
        candidates.reason = candidates.reason or next(iter(reasons.values()))
        reasons = prove_training(candidates.recipes, trace_cache, solo=True)  # they may still run on parallel streams
    proven = Group(
        [member for member in candidates.members if member.index not in reasons],
        [recipe for recipe in candidates.recipes if recipe.member.index not in reasons],
        candidates.reason,
    )
    apart = [Group([m], reason=reasons[m.index]) for m in candidates.members if m.index in reasons]
    return [*([proven] if proven.members else []), *apart]


def _refusal(candidates: Group, trace_cache: TraceCache) -> str:
    """Return why a step of the group cannot get a member axis, tried on two members; empty if it can."""
    recipes = (candidates.recipes * 2)[: max(2, len(candidates.recipes))]
    for rows, graph in recipes[0].steps.items():
        leaves = graph.batch_spec.num_leaves
        try:
            Program(
                [recipe.steps[rows] for recipe in recipes],
                device=candidates.members[0].device,
                stacked_batch=[True] * leaves,
                deterministic=trace_cache.deterministic,
                shared=recipes[0].shared,
            )
        except NotStackable as refusal:
            return str(refusal)
    return ""


def set_apart(alike: Group, reasons: Mapping[int, str]) -> list[Group]:
    """Return the group without these members, and each of them as its own group with its reason."""
    if not reasons.keys() & {member.index for member in alike.members}:
        return [alike]
    recipes = {recipe.member.index: [recipe] for recipe in alike.recipes}
    alone = [m for m in alike.members if m.index in reasons]
    rest = [m for m in alike.members if m.index not in reasons]
    left = [Group(rest, [r for m in rest for r in recipes.get(m.index, [])], alike.reason)] if rest else []
    return [*left, *(Group([m], recipes.get(m.index, []), alike.reason or reasons[m.index]) for m in alone)]


def why_apart(a: Group, b: Group) -> str:
    """Return why two stackable groups are not one."""
    x, y = a.recipes[0], b.recipes[0]
    job, other = x.member.job, y.member.job
    if x.member.batched and y.member.batched:
        if x.member.data.source is not y.member.data.source:
            return "another DataLoader"
        if job.order_seed != other.order_seed:
            return f"the DataLoader is read in another order (data_seed {job.order_seed} against {other.order_seed})"
    for name in ("batch_size", "accumulate", "precision"):
        if getattr(job, name) != getattr(other, name):
            return f"{name} is {getattr(job, name)} against {getattr(other, name)}"
    if not x.member.batched and not y.member.batched and x.member.num_rows != y.member.num_rows:
        return f"{x.member.num_rows} rows an epoch against {y.member.num_rows}"
    for rows, graph in x.steps.items():
        if rows not in y.steps:
            return "other batch shapes"
        if skeleton(graph) != skeleton(y.steps[rows]):
            return difference(graph, y.steps[rows])
    if x.member.data.source.streamed != y.member.data.source.streamed:
        return "data read as it is needed against data held on the device"
    return "a step of its own against a loss" if (job.step is None) != (other.step is None) else "other frozen weights"


def explain_reason(group: Group, groups: list[Group]) -> str:
    """Return in one line why a group runs the way it does."""
    if not group.stackable:
        return group.reason
    other = next((other for other in groups if other is not group and other.stackable), None)
    return "one computation" if other is None else f"one computation; apart from others: {why_apart(group, other)}"
