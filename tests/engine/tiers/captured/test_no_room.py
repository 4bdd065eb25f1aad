"""Memory that is full while units are being built: fewer members ride, nobody is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoal
from shoal.engine.members.member import Member
from shoal.engine.planning.planner import Part
from shoal.engine.recipes.program import Program
from shoal.engine.runtime.planning_context import PlanningContext
from shoal.engine.runtime.run import Run
from shoal.engine.stack.stack import Stack
from shoal.engine.tiers.stacked.unit import StackedUnit
from shoal.engine.tiers.unit import Unit
from shoal.preparation.checks import prepare
from shoal.reporting.events import Event

G = torch.Generator().manual_seed(3)
X, Y = torch.randn(40, 5, generator=G), torch.randint(3, (40,), generator=G)


class Narrow(PlanningContext):
    """A board whose device holds units of so many members, and says so when it is too late."""

    most = 2
    knows = True
    """Whether it can tell what members take."""

    def bytes(self, members: Sequence[Member]) -> float:
        return float(len(members)) if self.knows else 1.0

    def units(self, members: Sequence[Member]) -> list[tuple[Unit, Part]]:
        if len(members) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB.")
        return super().units(members)


def ridden(count: int, most: int, knows: bool = True) -> tuple[list[Member], list[Event]]:
    jobs = [
        shoal.Job(model=lambda: nn.Linear(5, 3), data=(X, Y), loss=F.cross_entropy, batch_size=8, epochs=2, seed=i,
                  name=f"job {i}")
        for i in range(count)
    ]  # fmt: skip
    members = prepare(jobs, torch.device("cpu"))
    planning = Narrow(members, timed=False)
    planning.most, planning.knows = most, knows
    told: list[Event] = []
    Run(members, planning, notify=told.append).go()
    return members, told


@pytest.mark.parametrize("knows", [True, False])
def test_half_of_those_who_do_not_fit_wait(knows: bool) -> None:
    members, told = ridden(7, most=2, knows=knows)
    assert [member.status for member in members] == ["done"] * 7, [member.error for member in members]
    assert any(event.kind == "split" for event in told)
    for member, alone in zip(members, ridden(7, most=7)[0], strict=True):
        for a, b in zip(member.model.parameters(), alone.model.parameters(), strict=True):
            assert torch.equal(a, b)


def test_one_that_does_not_fit_alone_has_failed() -> None:
    members, _ = ridden(3, most=0)
    assert [member.status for member in members] == ["failed"] * 3
    assert all("memory was full" in (member.error or "") for member in members)


class Hungry(PlanningContext):
    """A board whose device never holds the wide network, and cannot tell what members take."""

    def bytes(self, members: Sequence[Member]) -> float:
        return 1.0

    def units(self, members: Sequence[Member]) -> list[tuple[Unit, Part]]:
        if any(member.name == "wide" for member in members):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB.")
        return super().units(members)


@pytest.mark.parametrize("place", [0, 2, 4])
def test_one_that_fills_the_memory_does_not_keep_the_others_apart(place: int) -> None:
    """Fewer run at once while it is tried; all of them do once it has failed."""
    settings: dict[str, Any] = {"data": (X, Y), "loss": F.cross_entropy, "batch_size": 8, "epochs": 2}
    jobs = [shoal.Job(model=lambda: nn.Linear(5, 3), name=f"{i}", seed=i, **settings) for i in range(4)]
    wide = shoal.Job(model=lambda: nn.Sequential(nn.Linear(5, 99), nn.Linear(99, 3)), name="wide", **settings)
    members = prepare([*jobs[:place], wide, *jobs[place:]], torch.device("cpu"))
    told: list[Event] = []
    Run(members, Hungry(members, timed=False), notify=told.append).go()
    assert {member.status for member in members if member.name != "wide"} == {"done"}
    leaving = [(i, event.member.name) for i, event in enumerate(told) if event.kind == "leave" and event.member]
    before = [name for _, name in leaving].index("wide")
    later = told[leaving[before][0] :]
    at_once = [event.data["members"] for event in later if event.kind == "turn"]
    assert max(at_once, default=0) == 4 - before, "those who are left train together"


class Full:
    """The first calls of a function, but for some of them, which find no memory."""

    def __init__(self, function: Callable[..., Any], fails: set[int]) -> None:
        self.function, self.fails, self.calls = function, fails, 0

    def __call__(self, *args: Any, **settings: Any) -> Any:
        self.calls += 1
        if self.calls in self.fails:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB.")
        return self.function(*args, **settings)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))


@pytest.mark.parametrize(("owner", "name"), [(StackedUnit, "_backward"), (Stack, "reserve"), (Program, "__call__")])
def test_full_in_the_middle_of_a_step(owner: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever stays and whoever is sent away goes on from before that step: random draws and statistics too."""
    jobs = [
        shoal.Job(model=net, data=(X, Y), loss=F.cross_entropy, batch_size=8, epochs=3, seed=i, name=f"job {i}",
                  hparams={"lr": 0.01 * (1 + i)})
        for i in range(5)
    ]  # fmt: skip

    def trained(fails: set[int]) -> list[Member]:
        members = prepare(jobs, torch.device("cpu"))
        planning = PlanningContext(members, timed=False, tiers={member.index: "stacked" for member in members})
        full = Full(getattr(owner, name), fails)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, lambda self, *args, **settings: full(self, *args, **settings))
            Run(members, planning).go()
        assert full.calls > max(fails, default=0)
        return members

    quiet, disturbed = trained(set()), trained({4, 9})
    for a, b in zip(quiet, disturbed, strict=True):
        assert (a.status, b.status, a.step) == ("done", "done", b.step), b.error
        assert [row["loss"] for row in a.history] == [row["loss"] for row in b.history]
        for name_, value in a.model.state_dict().items():
            assert torch.equal(value, b.model.state_dict()[name_]), name_
