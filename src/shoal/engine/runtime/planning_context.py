"""What is known about members before they run, the plan that follows from it, and units for those that run now.

`shoal.train`, resumed and live runs and `shoal.explain` all use it: requests for the pure planner, `queue.admit` to
decide which members run now, and units for those.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from torch import nn

from shoal.engine.members.member import Member
from shoal.engine.planning import memory, perf_cache
from shoal.engine.planning.planner import (
    Part,
    Plan,
    Request,
    Waiting,
    plan,
    predict,
    stack_bytes,
    stacks,
    total_bytes,
)
from shoal.engine.planning.policy import Fifo, Policy, Ticket
from shoal.engine.planning.queue import admit
from shoal.engine.proof.group import Group, group, set_apart
from shoal.engine.python_state.watch import Watch
from shoal.engine.recipes.recipe import Recipe, TraceCache
from shoal.engine.runtime._renewal import Renewals
from shoal.engine.runtime.plan_record import PlanRecord
from shoal.engine.tiers.unit import Executor, Unit
from shoal.engine.tracing.patches import Untraceable
from shoal.engine.units.build import build, in_step, requests, try_out
from shoal.engine.units.looping import looped, looped_groups
from shoal.utils.set_up_times import timed
from shoal.utils.tables import size

if TYPE_CHECKING:
    from shoal.engine.runtime.unit_runner import UnitRunner


class PlanningContext:
    """Holds what is known about members before they run (recipes, groups, times), and the plan of the run."""

    def __init__(
        self,
        members: Sequence[Member],
        *,
        timed: bool = True,
        deterministic: bool = False,
        compile: bool | Literal["auto"] = "auto",
        budget: int | None = None,
        tiers: Mapping[int, str] | None = None,
        thorough: bool = False,
        may_loop: bool = False,
        may_share: bool = False,
        may_share_weights: bool = False,
        most_threads: int = 0,
        forms_changed: Callable[[dict[int, str]], object] | None = None,
    ) -> None:
        """Trace, time and group these members.

        Args:
            members: All members, before any of them runs.
            timed: Whether measured times may decide tiers.
            deterministic, may_share_weights: See `TraceCache`.
            compile: Whether steps on a GPU may be compiled.
            budget: The most bytes that may be used; None: any number.
            tiers: The tiers that members had in the run that is resumed, by index; they get them again.
            thorough: Compute also what no decision needs: bytes if memory is ample, and times of short jobs.
            may_loop: Whether members for which packing does not pay train in a loop without being traced; on a CPU.
            may_share: Whether members may train in other processes, for which they must be traced.
            most_threads: See `Executor`.
            forms_changed: Called with tiers by `note_tiers`, and on a GPU with `forms` when they have changed.
        """
        self.device = members[0].device
        self.timed, self.compile, self.tiers, self.thorough = timed, compile, dict(tiers or {}), thorough
        self.gpu = self.device.type == "cuda"
        self._may_loop, self._may_share = may_loop and timed and not self.gpu, may_share
        self.budget: float = math.inf if budget is None else budget
        self._forms_changed = forms_changed
        self.trace_cache = TraceCache(deterministic=deterministic, share=may_share_weights)
        self._brief_traces = TraceCache()  # for looped members, which are never stacked
        self.watch = Watch()
        """Watches the Python state that members' steps read, for members that may run with a recipe."""
        self.changed: set[int] = set()
        """Members whose steps have changed since the run began."""
        self.renewals = Renewals(self)
        self.executor: Executor = Executor(most_threads)
        memory.keep_heap()
        if self.gpu:
            from shoal.engine.tiers.captured.executor import CapturedExecutor

            self.executor = CapturedExecutor()
        self.record = PlanRecord(self.device, budget, forms_changed)
        self.groups: list[Group] = []
        self.recipes: dict[int, Recipe] = {}
        self._requests: dict[int, Request] = {}
        self.taken = 0
        """Bytes that are in use whatever runs: the data, and the device's libraries."""
        self.add(members)

    @property
    def plan(self) -> Plan:
        """The plan of the run, as far as it was carried out."""
        return self.record.plan

    def add(self, members: Sequence[Member]) -> None:
        """Trace, time and group more members."""
        with timed("traces"):
            loop_reasons = looped([*members, *self._stacked()], self.tiers) if self._may_loop else {}
            looping = [member for member in members if member.index in loop_reasons and not self.thorough]
            groups = self._groups([member for member in members if member not in looping])
            groups = [part for group in groups for part in set_apart(group, loop_reasons)]
            groups += looped_groups(looping, loop_reasons, self._brief_traces if self._may_share else None)
        with timed("trials"):
            may_time = self.timed and not self.gpu
            trial_results = try_out(groups, self.trace_cache, short_too=self.thorough) if may_time else {}
        with timed("costs"):
            new_requests = requests(
                groups, trial_results, self.tiers, exact=self.thorough or self._memory_is_tight(groups)
            )
        self._add_groups(groups, new_requests)
        for member in members:
            member.saved_state.watched = member.index not in self.recipes
        all_members = [member for group in self.groups for member in group.members]
        self.taken = memory.data_bytes(all_members) + memory.workspace_bytes(self.device)

    def _stacked(self) -> list[Member]:
        """Return members that run in stacks, which similar members may join."""
        return [
            member
            for group in self.groups
            for member in group.members
            if group.recipes and member.status == "running" and self.request(member).tier == "stacked"
        ]

    def note_tiers(self, members: Sequence[Member]) -> None:
        """Report the tiers of these members, if they are known; on a GPU that is when units are built."""
        if not self.gpu and self._forms_changed is not None:
            self._forms_changed({member.index: self.request(member).tier for member in members})

    def replace(self, member: Member) -> None:
        """Replace the member that has the same index by this one."""
        self.watch.drop({member.index})
        self._drop({member.index})
        self.add([member])

    def _groups(self, members: Sequence[Member]) -> list[Group]:
        for member in members:
            self._watch_step(member)
        return group(list(members), self.trace_cache)

    def _watch_step(self, member: Member) -> None:
        """Watch what a member's step reads in Python, from here on."""
        code = {"step": member.job.step, "loss": member.job.loss}
        copied = isinstance(member.job.model, nn.Module)
        self.watch.add(member.index, code, member.model, private=copied)

    def _has_same_step(self, member: Member) -> bool:
        """Return whether a member's step is still the one that was traced."""
        traced = self.recipes.get(member.index)
        try:
            return traced is not None and self.trace_cache.recipe(member).same_steps(traced)
        except Untraceable:
            return False

    def _add_groups(self, groups: list[Group], new_requests: Sequence[Request]) -> None:
        self._requests |= {request.index: request for request in new_requests}
        self.recipes |= {recipe.member.index: recipe for group in groups for recipe in group.recipes}
        self.groups += groups
        serial = {request.index for request in new_requests if request.tier == "serial" and not self.gpu}
        self.watch.drop(serial | {m.index for group in groups if not group.recipes for m in group.members})

    def renew(self, members: Sequence[Member], unstacked: Mapping[int, str]) -> set[int]:
        """Trace members again whose steps read something that has changed; return those whose step differs now.

        Args:
            unstacked: Why some of them can no longer be stacked, by index.
        """
        self.watch.drop(member.index for member in members)
        for member in members:
            self.trace_cache.forget(member.model)
        for member in members:
            if member.index not in unstacked:
                self._watch_step(member)
        changed = {m.index for m in members if m.index in unstacked or not self._has_same_step(m)}
        groups = group([m for m in members if m.index in changed and m.index not in unstacked], self.trace_cache)
        groups += [Group([m], reason=unstacked[m.index]) for m in members if m.index in unstacked]
        self._drop(changed)
        old = {index: self._requests[index] for index in changed}
        tiers = {index: request.tier for index, request in old.items()}
        new_requests = requests(groups, {}, tiers, exact=self._memory_is_tight(groups))
        self._add_groups(
            groups, [replace(r, most_rows=old[r.index].most_rows, alone=old[r.index].alone) for r in new_requests]
        )
        self.changed |= changed
        return changed

    def _drop(self, indices: set[int]) -> None:
        """Remove members from their groups."""
        remaining = {member.index for group in self.groups for member in group.members} - indices
        self.groups = _restricted(self.groups, remaining)
        self.recipes = {index: recipe for index, recipe in self.recipes.items() if index not in indices}

    def _memory_is_tight(self, groups: list[Group]) -> bool:
        """Return whether memory could be short, so that exact bytes are worth computing."""
        rough = sum(memory.rough_bytes(group.recipes[0]) * len(group.members) for group in groups if group.recipes)
        return self.budget < math.inf and rough > 0.2 * self.budget  # it counts all results of a step

    def request(self, member: Member) -> Request:
        return self._requests[member.index]

    # --- what it costs ----------------------------------------------------------------------------------------------

    def bytes(self, members: Sequence[Member]) -> float:
        """Return the bytes in use if these members run, including the data and the device's libraries."""
        costs = [stack_bytes(stack) for stack in stacks(map(self.request, members))]
        return self.taken + total_bytes(costs, together=self.gpu)

    def ticket(self, member: Member, now: float) -> Ticket:
        """Return the ticket of a waiting member, for policies."""
        request, job = self.request(member), member.job
        step = predict([request]).get("step_seconds", math.nan)
        return Ticket(
            index=member.index, name=member.name, owner=job.owner, priority=job.priority, arrived=now, since=now,
            seconds=step * request.steps, bytes=int(sum(stack_bytes([request]))), running=False,
            device_seconds=member.seconds,
        )  # fmt: skip

    def propose(self, members: Sequence[Member], policy: Policy | None = None) -> Plan:
        """Return the plan for these members, none of which has begun: which run now, in which tier, and which wait."""
        now, by_index = time.monotonic(), {member.index: member for member in members}
        tickets = [self.ticket(member, now) for member in members]
        admission = admit(tickets, policy or Fifo(), lambda some: self.fits([by_index[t.index] for t in some]), now)
        chosen = [member for member in members if member.index in set(admission.join)]
        waiting = [self._waiting(member, chosen) for member in members if member.index not in set(admission.join)]
        parts = plan(map(self.request, chosen))
        return Plan(str(self.device), parts, waiting, self.plan.budget, self.bytes(chosen))

    def fits(self, members: Sequence[Member]) -> bool:
        """Return whether these members may run at once."""
        return self.budget == math.inf or self.bytes(members) <= self.budget

    def _waiting(self, member: Member, running: Sequence[Member]) -> Waiting:
        need, missing = self.bytes([member]), self.bytes([*running, member]) - self.budget
        never = need > self.budget
        reason = self.too_large(member) if never else f"waits for {size(max(0.0, missing))} of memory"
        return Waiting(member.index, member.name, reason, never, need)

    def too_large(self, member: Member) -> str:
        """Return why a member does not fit, even alone."""
        return f"needs about {size(self.bytes([member]))} and {size(self.budget)} may be used; raise memory="

    def predicted(self, member: Member) -> dict[str, float]:
        """Return what is predicted for a member."""
        alone = self.request(member).alone
        return {} if alone is None else {"alone_seconds": alone}

    # --- units ------------------------------------------------------------------------------------------------------

    def joinable_units(
        self, runners: Sequence[UnitRunner], members: Sequence[Member]
    ) -> list[tuple[UnitRunner, Recipe]]:
        """Return which units these members may join together; members that may join none are left out."""
        joining: list[tuple[UnitRunner, Recipe]] = []
        for member in members:
            for runner in (runner for runner in runners if runner.members):
                recipe = self.recipe_to_join(runner, member, [other for target, other in joining if target is runner])
                if recipe is not None:
                    joining.append((runner, recipe))
                    break
        return joining

    def recipe_to_join(self, runner: UnitRunner, member: Member, beside: Sequence[Recipe] = ()) -> Recipe | None:
        """Return the recipe with which a member may join a unit together with `beside`; None if it may not."""
        request, recipe, unit = self.request(member), self.recipes.get(member.index), runner.unit
        if recipe is None or (not self.gpu and request.tier != unit.tier):
            return None
        others = [*unit.members, *(other.member for other in beside)]
        all_requests = [request, *(self.request(other) for other in others)]
        if len(others) >= min((other.most_rows for other in all_requests if other.most_rows), default=math.inf):
            return None
        return recipe if unit.accepts(recipe, beside) else None

    def units(self, members: Sequence[Member]) -> list[tuple[Unit, Part]]:
        """Build new units for these members, with their parts of the plan."""
        with timed("units"):
            return [built for indices in in_step(members) for built in self._units(indices)]

    def _units(self, indices: set[int]) -> list[tuple[Unit, Part]]:
        groups = _restricted(self.groups, indices)
        if self.gpu:
            from shoal.engine.units.arrange import arrange

            parts: list[Part] = []
            units: list[Unit] = []
            for some_groups, compile in self._to_compile(groups):
                new_parts, new_units = arrange(some_groups, self.trace_cache, compile, self.tiers)
                parts, units = parts + new_parts, units + new_units
            self.record.note_forms(units)
        else:
            parts = plan(self.request(member) for group in groups for member in group.members)
            units = build(parts, groups, self.trace_cache)
        by_member = {index: part for part in parts for index in part.members}
        return [(unit, by_member[unit.members[0].index]) for unit in units]

    def _to_compile(self, groups: list[Group]) -> list[tuple[list[Group], bool | Literal["auto"]]]:
        """Separate groups by whether to compile: steps that have changed may change again, so it seldom pays."""
        indices = {member.index for group in groups for member in group.members}
        parts = ((indices - self.changed, self.compile), (indices & self.changed, self.compile is True))
        return [(_restricted(groups, part), compile) for part, compile in parts if part]

    def run_alone(self, member: Member, reason: str) -> Part:
        """Let a member train by itself from now on, and return its part of the plan."""
        self._drop({member.index})
        self.groups.append(Group([member], reason=reason))
        self._requests |= {request.index: request for request in requests(self.groups[-1:], exact=False)}
        return plan([self.request(member)])[0]

    def note_full_memory(self, members: Sequence[Member]) -> None:
        """Store that memory was full while these members ran, so that the next run plans fewer of them."""
        recipes = [self.recipes[member.index] for member in members if member.index in self.recipes]
        for kind in {perf_cache.digest(recipe) for recipe in recipes} if self.budget < math.inf else ():
            perf_cache.note(kind, tier="stacked", rows=len(members), bytes=int(self.budget))


def _restricted(groups: list[Group], indices: set[int]) -> list[Group]:
    """Return the groups with only these members; groups without any are left out."""
    only = [
        Group(
            [member for member in group.members if member.index in indices],
            [recipe for recipe in group.recipes if recipe.member.index in indices],
            group.reason,
        )
        for group in groups
    ]
    return [group for group in only if group.members]
