"""Elastic runs: a member's bits do not depend on which others join, leave or wait, or on how often it is preempted."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau
from torch.utils import _pytree as pytree

import shoal
from shoal.engine.members.member import Member
from shoal.engine.planning.policy import Fifo, Policy, Priority, RoundRobin
from shoal.engine.runtime.planning_context import PlanningContext
from shoal.engine.runtime.run import Run
from shoal.engine.tiers.unit import Outcome
from shoal.preparation.checks import prepare
from shoal.reporting.events import Event

CPU = torch.device("cpu")
G = torch.Generator().manual_seed(5)
X, Y = torch.randn(83, 6, generator=G), torch.randint(3, (83,), generator=G)


def net(p: float = 0.3) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(p), nn.Linear(8, 3))


class Branching(nn.Module):
    """Python decides on a value: it cannot be traced, and trains alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out * 2 if float(out.detach().sum()) > 0 else F.dropout(out, 0.2, self.training)


def job(i: int, **changes: Any) -> shoal.Job:
    settings: dict[str, Any] = {
        "model": net, "data": (X, Y), "val": (X[:20], Y[:20]), "loss": F.cross_entropy, "seed": i, "name": f"job {i}",
        "optimizer": torch.optim.Adam, "hparams": {"lr": 0.01 * (1 + i)}, "batch_size": 16, "epochs": 3,
    }  # fmt: skip
    return shoal.Job(**(settings | changes))


def own_step(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    loss = F.cross_entropy(model(batch[0]), batch[1])
    return loss, {"double": loss.detach() * 2}


MIXED = [
    job(0),
    job(1, epochs=None, steps=7),
    job(2, epochs=5, schedule=lambda o: CosineAnnealingLR(o, 30)),
    job(3, epochs=None, steps=17, model=lambda: net(0.1)),
    job(4, epochs=1, optimizer=torch.optim.SGD, hparams={"lr": 0.1, "momentum": 0.9}),
    job(5, optimizer=torch.optim.SGD, hparams={"lr": 0.1}, clip_norm=0.3),
    job(6, accumulate=3, epochs=4),
    job(7, accumulate=3, epochs=None, steps=3),
    job(8, model=Branching),
    job(9, batch_size=32, epochs=4, keep="best", stop=shoal.EarlyStop("val_loss", patience=1)),
    job(10, data_seed=3, schedule=lambda o: ReduceLROnPlateau(o, patience=0), schedule_every="epoch"),
    job(11, data_seed=3, loss=None, step=own_step, val=None),
    job(12, precision="fp16", epochs=None, steps=11, schedule=lambda t: 0.9**t),
    job(13, epochs=2, model=Branching, accumulate=2, optimizer=torch.optim.RAdam),
    job(14, optimizer=torch.optim.LBFGS, hparams={"lr": 0.1}, epochs=1),
    job(15, epochs=4, hparams={"lr": 0.02, "weight_decay": 0.1}),
    job(16, epochs=4, average=shoal.EMA(decay=0.9)),
    job(17, epochs=None, steps=13, average=shoal.SWA(every=3)),
    job(18, precision="fp16", average=shoal.EMA(decay=0.8, use_buffers=True), keep="best"),
    job(19, model=Branching, average=shoal.EMA(decay=0.5, every=2)),
]


class Seats(PlanningContext):
    """Planning in which every member takes one byte."""

    def bytes(self, members: Sequence[Member]) -> float:
        return float(len(members))


def run_jobs(jobs: Sequence[shoal.Job], seats: float, policy: Policy | None = None, **more: Any) -> list[Member]:
    members = prepare(jobs, CPU)
    planning = Seats(members, timed=False)
    planning.budget = seats
    run = Run(members, planning, policy=policy, **more)
    run.turn_seconds = more.pop("turn_seconds", 1e-4)
    run.go()
    return members


@pytest.fixture(scope="module")
def alone() -> list[Member]:
    return [run_jobs([own], 1)[0] for own in MIXED]


def assert_same(a: Member, b: Member) -> None:
    assert (a.status, a.error, a.step, a.epoch, a.tier, a.batches) == (
        b.status, b.error, b.step, b.epoch, b.tier, b.batches,
    ), a.name  # fmt: skip
    ours, theirs = (
        pytree.tree_leaves(
            [m.model.state_dict(), m.optimizer_state, m.schedule_state, m.scaler_state, m.average, m.trained]
        )
        for m in (a, b)
    )
    for x, y in zip(ours, theirs, strict=True):
        assert torch.equal(x, y) if isinstance(y, Tensor) else x == y or x is y or (x != x and y != y), a.name
    assert torch.equal(a.rng.get_state(), b.rng.get_state()), a.name
    timeless = [[{k: v for k, v in row.items() if k != "seconds"} for row in m.history] for m in (a, b)]
    assert timeless[0] == timeless[1], a.name


@pytest.mark.parametrize("seats", [2, 5, 16])
def test_a_queue_longer_than_the_pack(seats: int, alone: list[Member]) -> None:
    for ours, theirs in zip(run_jobs(MIXED, seats), alone, strict=True):
        assert_same(ours, theirs)


@pytest.mark.parametrize("policy", [RoundRobin(slice_seconds=1e-3), Priority(slice_seconds=1e-3)])
def test_places_taken_away_and_given_back(policy: Policy, alone: list[Member]) -> None:
    told: list[Event] = []
    jobs = [replace(own, priority=i) for i, own in enumerate(MIXED)]
    for ours, theirs in zip(run_jobs(jobs, 3, policy, notify=told.append), alone, strict=True):
        assert_same(ours, theirs)
    if isinstance(policy, RoundRobin):
        assert sum(event.kind == "preempt" for event in told) > 5


class Rows(torch.utils.data.Dataset[Any]):
    """Reads row by row; one row cannot be read once training has begun."""

    armed = False

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, row: int) -> Any:
        if self.armed and row == 41:
            raise OSError("row 41 cannot be read")
        return X[row], Y[row]


def test_members_that_end_badly_do_not_touch_the_others(alone: list[Member], monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(out: Tensor, target: Tensor) -> Tensor:
        if len(out) == 3:
            raise ValueError("three rows")
        return F.cross_entropy(out, target)

    monkeypatch.setattr("shoal.data.dataset.MAX_BYTES", 0)  # read as training goes
    bad = [
        job(20, hparams={"lr": 1e30}, optimizer=torch.optim.SGD),
        job(21, loss=raises),
        job(22, data=Rows(), val=None),
    ]
    members = prepare([*MIXED[:13], *bad], CPU)
    monkeypatch.setattr(Rows, "armed", True)
    Run(members, Seats(members, timed=False)).go()
    for ours, theirs in zip(members[:13], alone[:13], strict=True):
        assert_same(ours, theirs)
    assert [member.status for member in members[13:]] == ["diverged", "failed", "failed"]
    assert members[14].error is not None and "ValueError: three rows (test_elastic.py:" in members[14].error
    assert members[15].error is not None and "row 41 cannot be read" in members[15].error


def test_memory_that_is_full_sends_half_away_and_nothing_is_lost(alone: list[Member]) -> None:
    members = prepare(MIXED, CPU)
    planning = Seats(members, timed=False)
    told: list[Event] = []
    run = Run(members, planning, notify=told.append)
    limit, real = 5, planning.executor._turn

    def turn(unit: Any, batches: int) -> Any:
        if sum(len(runner.members) for runner in run.runners) > limit:
            return Outcome(0.0, full="Tried to allocate 20.00 MiB")
        return real(unit, batches)

    planning.executor._turn = turn  # type: ignore[method-assign]
    run.go()
    for ours, theirs in zip(members, alone, strict=True):
        assert_same(ours, theirs)
    assert any(event.kind == "split" for event in told)


def test_a_member_that_does_not_fit_anywhere_fails_alone() -> None:
    members = prepare([job(0), job(1)], CPU)
    planning = Seats(members, timed=False)
    planning.budget = 0.5
    Run(members, planning).go()
    assert [m.status for m in members] == ["failed", "failed"]
    assert members[0].error is not None and "raise memory=" in members[0].error


def test_what_did_not_fit_is_taken_on_with_more_memory(tmp_path: Path) -> None:
    jobs = [job(0), job(1)]
    assert [r.status for r in shoal.train(jobs, device="cpu", out=tmp_path, memory=10)] == ["failed", "failed"]
    assert [r.status for r in shoal.train(jobs, device="cpu", out=tmp_path)] == ["done", "done"]


def _note(run: Run, member: Member, states: list[dict[str, Any]]) -> None:
    if run.runners and run.runners[0].members and run.runners[0].unit.at_step_boundary:
        run.runners[0].unit.write_back()
        states.append(pytree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, member.state()))


def snapshots(members: list[Member]) -> list[dict[str, Any]]:
    """The first member's state after every turn."""
    states: list[dict[str, Any]] = []
    run = Run(members, Seats(members, timed=False), between=lambda: _note(run, members[0], states))
    run.turn_seconds = 1e-4
    run.go()
    return states


def test_a_state_goes_on_in_another_member_at_any_batch(alone: list[Member]) -> None:
    """Snapshots taken at every turn, carried over to fresh members, end with the same bits."""
    for place in (0, 2, 3, 6, 8, 10, 12, 13, 14):
        states = snapshots(prepare([MIXED[place]], CPU))
        assert states
        for state in (states[0], states[len(states) // 2], states[-1]):
            other = prepare([MIXED[place]], CPU)
            other[0].load_state(copy.deepcopy(state))  # the member owns what it is given
            Run(other, Seats(other, timed=False)).go()
            assert_same(other[0], alone[place])


def test_fifo_order() -> None:
    told: list[Event] = []
    run_jobs([job(i, epochs=1) for i in range(6)], 1, Fifo(), notify=told.append)
    assert [e.member.index for e in told if e.kind == "join" and e.member is not None] == list(range(6))
