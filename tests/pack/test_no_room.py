"""Memory that is full while units are being built: fewer members ride, nobody is lost."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoal
from shoal.checks import prepare
from shoal.events import Event
from shoal.pack.board import Board
from shoal.pack.members import Member
from shoal.pack.planner import Part
from shoal.pack.run import Run
from shoal.pack.unit import Unit

G = torch.Generator().manual_seed(3)
X, Y = torch.randn(40, 5, generator=G), torch.randint(3, (40,), generator=G)


class Narrow(Board):
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
    board = Narrow(members, timed=False)
    board.most, board.knows = most, knows
    told: list[Event] = []
    Run(members, board, tell=told.append).go()
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
