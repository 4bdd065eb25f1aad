"""The plan of a run as it is carried out: which units have run, in which form, and what they have cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from shoal.engine.members.member import Member
from shoal.engine.planning.planner import Part, Plan
from shoal.engine.tiers.unit import Unit

if TYPE_CHECKING:
    from shoal.engine.runtime.unit_runner import UnitRunner


class PlanRecord:
    """Adds to a plan what the run does, with measurements beside the predictions."""

    def __init__(
        self,
        device: torch.device,
        budget: int | None,
        forms_changed: Callable[[dict[int, str]], object] | None = None,
    ) -> None:
        """Begin with an empty plan. On a GPU, `forms_changed` is called with `forms` when they have changed."""
        self.plan = Plan(str(device), [], [], budget)
        self._device, self._forms_changed = device, forms_changed
        self._parts: dict[int, Part] = {}
        """The parts of the plan, by the number of the unit's runner."""
        self.forms: dict[int, str] = {}
        """For a GPU: how each member was last run, by index: a tier, and whether it is compiled."""

    def add(self, runner: UnitRunner, part: Part) -> None:
        """Add the part of a unit that starts to run."""
        same_members = (p for p in self.plan.parts if p.tier == part.tier and set(p.members) == set(part.members))
        existing = next(same_members, None)  # the same members, with another step
        self._parts[runner.number] = existing or part
        if existing is None:
            self.plan.parts.append(part)

    def add_member(self, runner: UnitRunner, member: Member) -> None:
        """Add a member that has joined a unit to its part."""
        part = self._parts[runner.number]
        if member.index not in part.members:
            part.members.append(member.index)
            part.names.append(member.name)

    def note_turn(self, runner: UnitRunner, seconds: float, batches: int) -> int | None:
        """Add the cost of a turn, and return the bytes in use, if known."""
        on_gpu = self._device.type == "cuda"
        used = torch.cuda.max_memory_reserved(self._device) if on_gpu else None
        part = self._parts.get(runner.number)
        if part is not None and seconds > 0:
            part.note(seconds, batches, used)
        if on_gpu and any(self.forms.get(member.index) != runner.unit.form for member in runner.members):
            self.note_forms([runner.unit])
        return used

    def note_forms(self, units: Sequence[Unit]) -> None:
        """Note in which form these units run."""
        previous = dict(self.forms)
        self.forms |= {member.index: unit.form for unit in units for member in unit.members}
        if self.forms != previous and self._forms_changed is not None:
            self._forms_changed(self.forms)
