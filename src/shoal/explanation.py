"""`shoal.explain`, which shows before any training what would be stacked, what not and why, and the expected cost."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from shoal.engine.members.member import Member
from shoal.engine.planning.joined_data import join_data
from shoal.engine.planning.memory import StepBytes, data_bytes, memory_budget, step_bytes
from shoal.engine.planning.planner import LEAST, Part, Plan, Request, gain, predict, total_bytes
from shoal.engine.runtime.planning_context import PlanningContext
from shoal.engine.units.build import costs
from shoal.engine.units.trials import lone_seconds, num_steps
from shoal.jobs.job import Job
from shoal.preparation.checks import prepare
from shoal.settings import parse_bytes, pick_device
from shoal.utils.numpy_values import finite
from shoal.utils.tables import duration, render, size
from shoal.utils.torch_flags import torch_flags, training_mode

MOST_NAMED = 5
"""How many waiting jobs are named one by one."""


@dataclass(slots=True, eq=False)
class Explanation:
    """A plan with its expected cost. Print it for a table, or call `to_dict()`."""

    plan: Plan
    steps: dict[int, int]
    """Each job's number of optimizer steps, by the job's index."""
    data_bytes: int
    """The size of the data sets, which are in memory once for all jobs."""
    measured: bool

    @property
    def memory_bytes(self) -> float:
        """The expected peak memory of all parts together, including the data and the device's libraries."""
        return self.plan.memory_bytes

    def to_dict(self) -> dict[str, Any]:
        """Return everything as numbers and strings."""
        numbers = {**self.plan.to_json(), "data_bytes": self.data_bytes, "memory_bytes": self.memory_bytes}
        return dict(finite(numbers))

    def to_json(self) -> str:
        """Return `to_dict()` as JSON."""
        return json.dumps(self.to_dict(), indent=1)

    def __str__(self) -> str:
        head = ["", "tier", "jobs", "members", "memory", "a step alone", "packed", "gain"]
        rows = list(self._rows())
        table = render(head, [row for row, _ in rows], left=(0, 1, 2))
        reasons = [f"{row[0]}: {reason}" for row, reason in rows]
        return "\n".join([table, "", *reasons, *self._compiling(), *self._waiting(), *self._totals()])

    def _rows(self) -> Iterator[tuple[list[str], str]]:
        """Yield a table row and a reason for every part; parts that run alone for the same reason share one row."""
        merged: dict[tuple[str, str], list[Part]] = {}
        for i, part in enumerate(self.plan.parts):
            key = (part.tier, part.reason if part.tier == "serial" else f"{part.reason} {i}")
            merged.setdefault(key, []).append(part)
        for number, parts in enumerate(merged.values(), 1):
            names = [name for part in parts for name in part.names]
            job_names = ", ".join(names) if len(names) < 4 else f"{names[0]}, {names[1]} ... {names[-1]}"
            numbers = [_total(parts, name) for name in ("memory_bytes", "alone_seconds", "step_seconds")]
            memory, alone, packed = numbers
            if parts[0].tier == "serial":  # nothing is packed
                packed = None
            gain = "-" if alone is None or not packed or len(names) < 2 else f"{alone / packed:.1f}x"
            cells = [
                "-" if memory is None else size(memory),
                *("-" if x is None else duration(x) for x in (alone, packed)),
            ]
            yield [str(number), parts[0].tier, job_names, str(len(names)), *cells, gain], _advice(parts[0])

    def _compiling(self) -> Iterator[str]:
        """Yield a line for each part that may be compiled, with the cost and when it pays off."""
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
        """Yield lines about jobs that wait for memory."""
        if not self.plan.waiting:
            return
        running = sum(len(part.members) for part in self.plan.parts)
        yield f"within {size(self.plan.budget or 0)}: {running} run at once, {len(self.plan.waiting)} wait"
        for job in self.plan.waiting[:MOST_NAMED]:
            yield f"  {job.name}: {job.reason}"
        if len(self.plan.waiting) > MOST_NAMED:
            yield f"  and {len(self.plan.waiting) - MOST_NAMED} more"

    def _totals(self) -> Iterator[str]:
        """Yield lines with the expected total memory and time."""
        parts = _total(self.plan.parts, "memory_bytes")
        less = " (less than the sum: not all jobs run at the same time)" if (parts or 0) > self.memory_bytes else ""
        data = f"{size(self.data_bytes)}, one copy in memory" if self.data_bytes else "read as it is needed"
        yield f"data: {data}; total memory: about {size(self.memory_bytes)}{less}"
        timed_parts = [part for part in self.plan.parts if {"alone_seconds", "step_seconds"} <= part.predicted.keys()]
        if timed_parts and len(timed_parts) == len(self.plan.parts) and not self.plan.waiting:
            packed, alone = 0.0, 0.0
            for part in timed_parts:
                longest, every = max(self.steps[i] for i in part.members), sum(self.steps[i] for i in part.members)
                packed += part.predicted["step_seconds"] * longest
                alone += part.predicted["alone_seconds"] / len(part.members) * every
            times = [f"{duration(packed)} packed"] if any(part.tier != "serial" for part in timed_parts) else []
            times.append(f"{duration(alone)} one after another")
            yield f"training: about {', '.join(times)} (without validation, and if no other program uses the cores)"
        elif not self.measured:
            yield "not timed: if a trial before training shows that stacking is slower, jobs run unstacked"


@training_mode()
def explain(
    jobs: Sequence[Job],
    device: str | torch.device = "auto",
    *,
    measure: bool = True,
    memory: int | str | None = None,
    compile: bool | Literal["auto"] = False,
) -> Explanation:
    """Return what `shoal.train` would do with these jobs, without training them.

    The planner is the one that `train` uses. On a CPU, `train` may also distribute the packs among processes.

    Args:
        jobs: As for `shoal.train`; the same mistakes raise the same JobError.
        device: As for `shoal.train`.
        measure: Time a few steps on copies, alone and packed, to predict the gain. On a GPU each pack is built and
            captured as in training, which also measures its memory. Your models, data and random state are left
            unchanged.
        memory: The memory limit: bytes, or a size such as "20GB". It decides how packs are sized and which jobs wait.
            None means 90 % of the free memory.
        compile: As for `shoal.train`: whether compiled steps are tried too, on a GPU; that may take minutes.
    """
    memory_limit = None if memory is None else parse_bytes(memory)
    chosen = pick_device(device)
    # One thread on a CPU, as `train` plans with: several threads would disturb the timing.
    with torch_flags(chosen, 1 if chosen.type == "cpu" else None):
        return _explain(jobs, chosen, measure, memory_limit, compile)


def _explain(
    jobs: Sequence[Job], device: torch.device, measure: bool, memory_limit: int | None, compile: bool | Literal["auto"]
) -> Explanation:
    members = prepare(jobs, device)
    if device.type == "cuda":
        join_data(members)
    budget = memory_budget(members[0].device, memory_limit)
    planning = PlanningContext(
        members, timed=measure, compile=compile, budget=budget, thorough=True, may_loop=True, may_share_weights=True
    )
    plan = planning.propose(members)
    if measure and planning.gpu:
        rehearse(planning, plan, members)
    by_index = {member.index: member for member in members}
    for part in plan.parts:
        part.predicted |= _breakdown(part, planning, [by_index[index] for index in part.members])
    steps = {member.index: num_steps(member) for member in members}
    return Explanation(plan, steps, data_bytes(members), measure)


def rehearse(planning: PlanningContext, plan: Plan, members: Sequence[Member]) -> None:
    """On a GPU: build what a plan proposes as training would, and add the measurements to the plan.

    The units are not used afterwards.
    """
    by_index = {member.index: member for member in members}
    running = [by_index[index] for part in plan.parts for index in part.members]
    plan.parts = list({id(part): part for _, part in planning.units(running)}.values())
    planning.executor.forget()
    for part in plan.parts:
        part_members = [by_index[index] for index in part.members]
        requests = [_as_built(member, part, planning) for member in part_members]
        try:
            alone = lone_seconds(part_members[0], rounds=9)
            requests = [replace(request, alone=alone) for request in requests]
        except Exception:  # the same error will end this member in training
            pass
        part.predicted = predict(requests) | part.predicted
        part.predicted |= gain(part.predicted)
    planning.executor.forget()
    figures = [part.predicted for part in plan.parts]
    costs_by_part = [(p["state_bytes"], p["memory_bytes"] - p["state_bytes"]) for p in figures]
    plan.memory_bytes = planning.taken + total_bytes(costs_by_part, together=planning.gpu)


def _as_built(member: Member, part: Part, planning: PlanningContext) -> Request:
    """Return a member's request, with the costs of the form that its part was given."""
    recipe = planning.recipes.get(member.index)
    values = costs(member, recipe, part.tier, compiled="compile_seconds" in part.predicted)
    return replace(planning.request(member), tier=part.tier, **values)


def _breakdown(part: Part, planning: PlanningContext, members: Sequence[Member]) -> dict[str, float]:
    """Return the components of the part's memory; a stack of one member counts its padding row, as in training."""
    rows = max(len(members), LEAST) if part.tier == "stacked" else len(members)
    each = [step_bytes(member, planning.recipes.get(member.index)) for member in members]
    return {f"{name}_bytes": rows * sum(getattr(one, name) for one in each) / len(each) for name in StepBytes._fields}


def _advice(part: Part) -> str:
    """Return why the part runs as it does, and what to do if stacking is slower."""
    if not part.loses or part.tier == "serial":
        return f"do not pack: {part.reason}" if part.loses else part.reason
    factor = part.predicted.get("gain", 0.0)
    return f"{part.reason}; stacking loses here ({factor:.2f}x): do not pack, if it matters; the jobs are short"


def _total(parts: list[Part], name: str) -> float | None:
    """Return the sum of a predicted value over the parts, or None if a part lacks it."""
    values = [part.predicted.get(name) for part in parts]
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
