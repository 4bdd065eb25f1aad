"""`shoal.explain`: what would ride together, what not and why, what it should cost; before any training."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from shoal.checks import prepare
from shoal.data.source import TensorSource
from shoal.job import Job
from shoal.pack import measure as trials
from shoal.pack.group import group
from shoal.pack.members import Member
from shoal.pack.optim import rule_for
from shoal.pack.plan import Part, Plan, decide
from shoal.pack.recipe import Kitchen, Recipe
from shoal.pack.stacked.unit import LEAST
from shoal.pack.trace import Trace
from shoal.results import finite
from shoal.tables import duration, render, size
from shoal.training import pick_device

MOST_MEMBERS = 64
"""Members in a timed stack; larger packs are told by its time for each member."""


@dataclass(slots=True, eq=False)
class Explanation:
    """A plan, with what it should cost. `print` it, or take `to_dict()`."""

    plan: Plan
    steps: dict[int, int]
    """Each job's optimizer steps, by its place."""
    data_bytes: int
    """The data sets, kept once for all jobs."""
    measured: bool

    @property
    def memory_bytes(self) -> float:
        """What all parts should take together, the data included."""
        return self.data_bytes + sum(part.predicted.get("memory_bytes", 0.0) for part in self.plan.parts)

    def to_dict(self) -> dict[str, Any]:
        """All of it as numbers and strings."""
        found = {**self.plan.to_json(), "data_bytes": self.data_bytes, "memory_bytes": self.memory_bytes}
        return {str(name): finite(value) for name, value in found.items()}

    def to_json(self) -> str:
        """`to_dict()` as text."""
        return json.dumps(self.to_dict(), indent=1)

    def __str__(self) -> str:
        head = ["", "tier", "jobs", "members", "memory", "a step alone", "packed", "gain"]
        shown = list(self._rows())
        table = render(head, [row for row, _ in shown], left=(0, 1, 2))
        return "\n".join([table, "", *(f"{row[0]}: {reason}" for row, reason in shown), *self._totals()])

    def _rows(self) -> Iterator[tuple[list[str], str]]:
        """A line for every part, those that run alone for one reason taken together."""
        merged: dict[tuple[str, str], list[Part]] = {}
        for i, part in enumerate(self.plan.parts):
            key = (part.tier, part.reason if part.tier == "serial" else f"{part.reason} {i}")
            merged.setdefault(key, []).append(part)
        for number, parts in enumerate(merged.values(), 1):
            names = [name for part in parts for name in part.names]
            told = ", ".join(names[:2]) + (f" ... {names[-1]}" if len(names) > 2 else "")
            numbers = [_total(parts, name) for name in ("memory_bytes", "alone_seconds", "step_seconds")]
            memory, alone, packed = numbers
            gain = "-" if alone is None or packed is None or len(names) < 2 else f"{alone / packed:.1f}x"
            cells = [
                "-" if memory is None else size(memory),
                *("-" if x is None else duration(x) for x in (alone, packed)),
            ]
            yield [str(number), parts[0].tier, told, str(len(names)), *cells, gain], parts[0].reason

    def _totals(self) -> Iterator[str]:
        yield f"data: {size(self.data_bytes)}, kept once; memory in all: about {size(self.memory_bytes)}"
        known = [part for part in self.plan.parts if {"alone_seconds", "step_seconds"} <= part.predicted.keys()]
        if known and len(known) == len(self.plan.parts):
            packed, alone = 0.0, 0.0
            for part in known:
                longest, every = max(self.steps[i] for i in part.members), sum(self.steps[i] for i in part.members)
                packed += part.predicted["step_seconds"] * longest
                alone += part.predicted["alone_seconds"] / len(part.members) * every
            yield f"training: about {duration(packed)} packed, {duration(alone)} one after another (validation aside)"
        elif not self.measured:
            yield "not timed: where a trial before training shows that stacking loses, jobs run alone"


def explain(jobs: Sequence[Job], device: str | torch.device = "auto", *, measure: bool = True) -> Explanation:
    """Say what `shoal.train` would do with these jobs, without training them.

    Args:
        jobs: As for `shoal.train`; the same mistakes raise the same JobError.
        device: As for `shoal.train`.
        measure: Time a few steps on copies, alone and packed (on a CPU), for the gain to expect. Models, data and
            random numbers of yours are left as they are.
    """
    members = prepare(jobs, pick_device(device))
    kitchen = Kitchen()
    groups = group(members, kitchen)
    recipes = {recipe.member.index: recipe for found in groups for recipe in found.recipes}
    timed = measure and members[0].device.type == "cpu"
    tried: dict[int, trials.Verdict] = {}
    for found in groups:
        if timed and found.stackable:
            tried |= trials.verdicts(found.recipes, kitchen)
    plan = decide(groups, str(members[0].device), tried)
    for part in plan.parts:
        _predict(part, {member.index: member for member in members}, recipes, kitchen, timed)
    steps = {member.index: trials.num_steps(member) for member in members}
    return Explanation(plan, steps, _data_bytes(members), timed)


def _predict(part: Part, members: dict[int, Member], recipes: dict[int, Recipe], kitchen: Kitchen, timed: bool) -> None:
    """Fill in what a part should cost."""
    first, count = members[part.members[0]], len(part.members)
    recipe = recipes.get(first.index)
    rows = max(count, LEAST) if part.tier == "stacked" else 1
    part.predicted |= {f"{name}_bytes": rows * value for name, value in memory(first, recipe).items()}
    if not timed or recipe is None or not isinstance(first.data.source, TensorSource):
        return
    try:
        found = trials.trial(recipe, kitchen, min(count, MOST_MEMBERS))
    except Exception:  # whatever it is will show in training, where it ends its own member
        return
    part.predicted["alone_seconds"] = found.solo * count
    part.predicted["step_seconds"] = found.solo if part.tier == "serial" else found.stacked * rows
    gain = part.predicted["alone_seconds"] / part.predicted["step_seconds"]
    part.predicted["gain"] = gain
    if part.tier == "stacked" and count > 1 and gain < trials.LOSES:
        part.reason += f"; stacking loses here ({gain:.2f}x): do not pack, if it matters; the jobs are short"


def memory(member: Member, recipe: Recipe | None) -> dict[str, float]:
    """What one member takes while it trains, in bytes; activations are those of its largest batch, all kept."""
    tensors = [*member.model.parameters(), *member.model.buffers()]
    known = [t for t in tensors if not is_lazy(t)]
    weights = sum(_bytes(t) for t in known)
    gradients = sum(_bytes(t) for t in known if t.requires_grad)
    parts = {"weights": weights, "gradients": gradients, "optimizer": 2 * gradients, "activations": 0}
    if recipe is not None:
        parts["optimizer"] = _optimizer_bytes(member, recipe)
        parts["activations"] = max(activation_bytes(graph) for graph in recipe.steps.values())
    return {**{name: float(value) for name, value in parts.items()}, "memory": float(sum(parts.values()))}


def _optimizer_bytes(member: Member, recipe: Recipe) -> int:
    """State of the optimizer, from its rule; classes without one are taken to keep two numbers a weight."""
    plan, params = recipe.optimizer, list(member.model.parameters())
    if plan.flags is None:
        return 2 * sum(_bytes(p) for p in params if p.requires_grad)
    total = 0
    for positions, flags in zip(plan.groups, plan.flags, strict=True):
        rule = rule_for(plan.kind, flags)
        for p in (params[position] for position in positions):
            state = rule.init(torch.empty((1, *p.shape), dtype=p.dtype, device="meta"))
            total += sum(_bytes(t) for t in state.values()) if p.requires_grad else 0
    return total


def activation_bytes(graph: Trace) -> int:
    """All that a step computes and that is no view of something else: what backward may need at most."""
    total = 0
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None or any(r.alias_info is not None for r in schema.returns):
            continue
        total += sum(_bytes(v) for v in pytree.tree_leaves(node.meta.get("val")) if isinstance(v, Tensor))
    return total


def _data_bytes(members: list[Member]) -> int:
    """Every tensor of the data once."""
    seen: dict[tuple[Any, ...], int] = {}
    for member in members:
        for view in (member.data, member.val):
            if view is not None and isinstance(view.source, TensorSource):
                seen |= {(leaf.data_ptr(), tuple(leaf.shape)): _bytes(leaf) for leaf in view.source.leaves}
    return sum(seen.values())


def _total(parts: list[Part], name: str) -> float | None:
    values = [part.predicted.get(name) for part in parts]
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _bytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * tensor.element_size()
