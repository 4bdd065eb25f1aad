"""`shoal.explain`: what would ride together, what not and why, what it should cost; before any training."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn.parameter import is_lazy

from shoal.data.source import TensorSource
from shoal.engine.members.member import Member
from shoal.engine.planning import memory as bytes_of
from shoal.engine.planning.liveness import nbytes, optimizer_bytes
from shoal.engine.planning.planner import LEAST, Part, Plan, plan
from shoal.engine.proof.group import Group, group
from shoal.engine.recipes.recipe import Recipe, TraceCache
from shoal.engine.units import trials
from shoal.engine.units.build import arrange, requests, room, try_out
from shoal.jobs.job import Job
from shoal.preparation.checks import prepare
from shoal.results import finite
from shoal.training import parse_bytes, pick_device
from shoal.utils.tables import duration, render, size
from shoal.utils.torch_flags import training_mode

MOST_MEMBERS = 64
"""Members in a timed stack; larger packs are told by its time for each member."""
MOST_TOLD = 5
"""Waiting jobs told by name."""


@dataclass(slots=True, eq=False)
class Explanation:
    """A plan, with what it should cost. `print` it, or take `to_dict()`."""

    plan: Plan
    steps: dict[int, int]
    """Each job's optimizer steps, by its place."""
    data_bytes: int
    """The data sets, kept once for all jobs."""
    measured: bool
    fixed_bytes: int = 0
    """What the device's libraries take, whoever rides."""

    @property
    def memory_bytes(self) -> float:
        """The most that all parts should take together, the data and the device's libraries included.

        On a CPU parts take turns, so that only one of them is in the middle of a step.
        """
        known = [part.predicted for part in self.plan.parts]
        total = sum(one.get("memory_bytes", 0.0) for one in known)
        if not self.plan.device.startswith("cuda"):
            working = [one.get("memory_bytes", 0.0) - one.get("state_bytes", 0.0) for one in known]
            total += max(working, default=0.0) - sum(working)
        return self.data_bytes + self.fixed_bytes + total

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
        reasons = [f"{row[0]}: {reason}" for row, reason in shown]
        return "\n".join([table, "", *reasons, *self._compiling(), *self._waiting(), *self._totals()])

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
            gain = "-" if alone is None or not packed or len(names) < 2 else f"{alone / packed:.1f}x"
            cells = [
                "-" if memory is None else size(memory),
                *("-" if x is None else duration(x) for x in (alone, packed)),
            ]
            yield [str(number), parts[0].tier, told, str(len(names)), *cells, gain], _told(parts)

    def _compiling(self) -> Iterator[str]:
        for part in self.plan.parts:
            if "compile_seconds" not in part.predicted:
                continue
            steps = part.predicted.get("compile_pays_after_steps")
            when = "does not pay" if steps is None else f"pays off after {steps:.0f} steps"
            longest = max(self.steps.get(i, 0) for i in part.members)
            yield (
                f"{part.names[0]}{' ...' if len(part.names) > 1 else ''}: compiling takes about "
                f"{duration(part.predicted['compile_seconds'])} and {when}; these jobs have {longest}"
            )

    def _waiting(self) -> Iterator[str]:
        if not self.plan.waiting:
            return
        running = sum(len(part.members) for part in self.plan.parts)
        yield f"within {size(self.plan.budget or 0)}: {running} ride, {len(self.plan.waiting)} wait for a place"
        for job in self.plan.waiting[:MOST_TOLD]:
            yield f"  {job.name}: {job.reason}"
        if len(self.plan.waiting) > MOST_TOLD:
            yield f"  and {len(self.plan.waiting) - MOST_TOLD} more"

    def _totals(self) -> Iterator[str]:
        yield f"data: {size(self.data_bytes)}, kept once; memory in all: about {size(self.memory_bytes)}"
        known = [part for part in self.plan.parts if {"alone_seconds", "step_seconds"} <= part.predicted.keys()]
        if known and len(known) == len(self.plan.parts) and not self.plan.waiting:
            packed, alone = 0.0, 0.0
            for part in known:
                longest, every = max(self.steps[i] for i in part.members), sum(self.steps[i] for i in part.members)
                packed += part.predicted["step_seconds"] * longest
                alone += part.predicted["alone_seconds"] / len(part.members) * every
            yield (
                f"training: about {duration(packed)} packed, {duration(alone)} one after another (validation aside, "
                "and what other programs take of the cores)"
            )
        elif not self.measured:
            yield "not timed: where a trial before training shows that stacking loses, jobs run alone"


@training_mode()
def explain(
    jobs: Sequence[Job],
    device: str | torch.device = "auto",
    *,
    measure: bool = True,
    memory: int | str | None = None,
    compile: bool | Literal["auto"] = False,
) -> Explanation:
    """Say what `shoal.train` would do with these jobs, without training them.

    Args:
        jobs: As for `shoal.train`; the same mistakes raise the same JobError.
        device: As for `shoal.train`.
        measure: Time a few steps on copies, alone and packed, for the gain to expect; on a GPU each pack is built and
            captured as in training, which also says what memory it takes. Models, data and random numbers of yours
            are left as they are.
        memory: Bytes that may be used, or a size such as "20GB": how packs are sized then, and who waits. None: what is
            free.
        compile: As for `shoal.train`: whether compiled steps are tried too, on a GPU; that may take minutes.
    """
    given = None if memory is None else parse_bytes(memory)
    members = prepare(jobs, pick_device(device))
    steps, on_gpu = {member.index: trials.num_steps(member) for member in members}, members[0].device.type == "cuda"
    fixed = bytes_of.fixed_bytes(members[0].device)
    if measure and on_gpu:
        made = _rehearsed(members, bytes_of.memory_budget(members[0].device, given), compile)
        return Explanation(made, steps, bytes_of.data_bytes(members), True, fixed)
    trace_cache = TraceCache()
    groups = group(members, trace_cache)
    recipes = _by_index(groups)
    timed = measure and not on_gpu
    asked = requests(groups, try_out(groups, trace_cache) if timed else {})
    place = str(members[0].device)
    made = plan(asked, (), room(groups, place, bytes_of.memory_budget(members[0].device, given)))
    by_index = {member.index: member for member in members}
    for part in made.parts:
        _predict(part, by_index, recipes, trace_cache, timed)
    return Explanation(made, steps, bytes_of.data_bytes(members), timed, fixed)


def _rehearsed(members: list[Member], budget: int, compile: bool | Literal["auto"]) -> Plan:
    """The plan on a GPU, with what trials of these very packs showed; nothing of them is kept but that."""
    recipes = _by_index(group(members, TraceCache()))
    made, units, executor = arrange(members, compile=compile, budget=budget)
    del units
    executor.forget()
    by_index = {member.index: member for member in members}
    for part in made.parts:
        predicted = part.predicted
        _tell_apart(part, by_index, recipes)
        try:
            alone = trials.plain_seconds(by_index[part.members[0]])
        except Exception:  # whatever it is will show in training, where it ends its own member
            continue
        predicted["alone_seconds"] = alone * len(part.members)
        if predicted.get("step_seconds"):
            predicted["gain"] = predicted["alone_seconds"] / predicted["step_seconds"]
    executor.forget()
    return made


def _by_index(groups: list[Group]) -> dict[int, Recipe]:
    return {recipe.member.index: recipe for found in groups for recipe in found.recipes}


def _predict(
    part: Part, members: dict[int, Member], recipes: dict[int, Recipe], trace_cache: TraceCache, timed: bool
) -> None:
    """What the parts of the memory are, and the times of this very pack."""
    first, count = members[part.members[0]], len(part.members)
    recipe = recipes.get(first.index)
    rows = max(count, LEAST) if part.tier == "stacked" else count
    kinds = _tell_apart(part, members, recipes)
    if not timed or recipe is None or not isinstance(first.data.source, TensorSource):
        return
    try:
        found = [
            (trials.trial(recipes[member.index], trace_cache, min(count, MOST_MEMBERS)), share)
            for member, share in kinds
        ]
    except Exception:  # whatever it is will show in training, where it ends its own member
        return
    alone, stacked = (sum(getattr(one, name) * share for one, share in found) for name in ("solo", "stacked"))
    part.predicted["alone_seconds"] = alone * count
    part.predicted["step_seconds"] = alone * count if part.tier == "serial" else stacked * rows
    gain = part.predicted["alone_seconds"] / part.predicted["step_seconds"]
    part.predicted["gain"] = gain
    if part.tier == "stacked" and count > 1 and gain < trials.LOSES:
        part.reason += f"; stacking loses here ({gain:.2f}x): do not pack, if it matters; the jobs are short"


def _tell_apart(part: Part, members: dict[int, Member], recipes: dict[int, Recipe]) -> list[tuple[Member, float]]:
    """What the parts of the memory are, for the members' kinds, which are given back."""
    kinds, count = _kinds(part, members, recipes), len(part.members)
    rows = max(count, LEAST) if part.tier == "stacked" else count
    each = [(memory(member, recipes.get(member.index)), share) for member, share in kinds]
    for name in each[0][0]:
        part.predicted[f"{name}_bytes"] = rows * sum(own[name] * share for own, share in each)
    return kinds


def _kinds(part: Part, members: dict[int, Member], recipes: dict[int, Recipe]) -> list[tuple[Member, float]]:
    """A member for each optimizer in a part, with the share of those that have it."""
    kinds: dict[Hashable, list[int]] = {}
    for index in part.members:
        kinds.setdefault(recipes[index].optimizer.key if index in recipes else None, []).append(index)
    return [(members[own[0]], len(own) / len(part.members)) for own in kinds.values()]


def memory(member: Member, recipe: Recipe | None) -> dict[str, float]:
    """What one member's memory is made of, in bytes; activations are those of its largest batch, all kept."""
    known = [t for t in (*member.model.parameters(), *member.model.buffers()) if not is_lazy(t)]
    weights = sum(nbytes(t) for t in known)
    gradients = sum(nbytes(t) for t in known if t.requires_grad)
    parts = {"weights": weights, "gradients": gradients, "optimizer": 2 * gradients, "activations": 0}
    if recipe is not None:
        parts["optimizer"] = optimizer_bytes(recipe)
        parts["activations"] = bytes_of.activation_bytes(recipe.steps[max(recipe.steps)])
    return {name: float(value) for name, value in parts.items()}


def _told(parts: list[Part]) -> str:
    """The reason, with the plain answer where jobs that could ride together do not."""
    reason = parts[0].reason
    lost = parts[0].tier == "serial" and "the speed of solo steps" in reason
    return f"do not pack: {reason}" if lost else reason


def _total(parts: list[Part], name: str) -> float | None:
    values = [part.predicted.get(name) for part in parts]
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
