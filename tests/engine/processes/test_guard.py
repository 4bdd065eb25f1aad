"""Runs in a child process: a member that loses the device's context fails alone, and the others continue."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from io import BytesIO
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.engine.members.member import Member
from shoal.engine.members.resuming import beginning
from shoal.engine.processes.guard import NotGuarded, run_guarded
from shoal.engine.processes.parent import ParentHandle, take
from shoal.engine.runtime.planning_context import PlanningContext
from shoal.engine.runtime.run import Run
from shoal.preparation.checks import prepare
from shoal.reference import solo
from shoal.reporting.events import Event
from shoal.storage.run_folder import RunFolder

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
CPU = torch.device("cpu")
G = torch.Generator().manual_seed(8)
X, Y = torch.randn(60, 5, generator=G), torch.randint(3, (60,), generator=G)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out if float(out.detach().sum()) < 1e9 else -out


def jobs(bad: int | None) -> list[shoal.Job]:
    def asserts(out: Tensor, target: Tensor) -> Tensor:
        if len(target) == 4:  # the short last batch
            raise RuntimeError("CUDA error: device-side assert triggered")
        return F.cross_entropy(out, target)

    return [
        shoal.Job(
            model=Branching, data=(X, Y), loss=asserts if i == bad else F.cross_entropy, batch_size=8, epochs=3, seed=i,
            name=f"job {i}", optimizer=torch.optim.Adam,
        )
        for i in range(5)
    ]  # fmt: skip


def guarded(made: list[shoal.Job], path: Path, notify: Any = lambda event: None) -> list[Member]:
    members = prepare(made, CPU)
    with RunFolder(path) as folder:
        folder.claim(members)

        def requeue(member: Member) -> None:
            if not folder.restore(member):
                beginning(member)

        def make(share: Any, planning: PlanningContext, notify: Any, **more: Any) -> Run:
            return Run(share, planning, folder=folder, save_every=0.01, notify=notify, **more)

        run_guarded(
            members,
            CPU,
            lambda share: PlanningContext(share, timed=False, may_share_weights=True),
            make,
            requeue,
            notify,
        )
    return members


def late_reader(self: Connection, size: int, read: Callable[[int, int], bytes] = os.read) -> BytesIO:
    """`Connection._recv`, where a reader in another thread is held up between its look at the pipe's number and
    its reading, as happens on a busy machine."""
    handle, found = self.fileno(), BytesIO()
    if threading.current_thread() is not threading.main_thread():
        time.sleep(0.02)
    while found.tell() < size:
        chunk = read(handle, size - found.tell())
        if not chunk:
            raise EOFError
        found.write(chunk)
    return found


def test_who_listens_late_takes_nothing_from_the_next_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "_recv", late_reader)
    for again in range(2):
        members = guarded(jobs(bad=2), tmp_path / str(again))
        assert [member.status for member in members] == ["done", "done", "failed", "done", "done"]


def test_a_lost_context_costs_its_member_and_a_resume(tmp_path: Path) -> None:
    told: list[Event] = []
    members = guarded(jobs(bad=2), tmp_path / "bad", told.append)
    assert [member.status for member in members] == ["done", "done", "failed", "done", "done"]
    assert members[2].error is not None and "device-side assert" in members[2].error
    assert any(event.kind == "note" for event in told)
    for a, b in zip(members, guarded(jobs(bad=None), tmp_path / "good"), strict=True):
        if a.status == "done":
            for x, y in zip(a.model.state_dict().values(), b.model.state_dict().values(), strict=True):
                assert torch.equal(x, y)
            assert [row["loss"] for row in a.history] == [row["loss"] for row in b.history]


def test_a_process_that_has_trained_on_a_cpu_is_not_guarded(
    tmp_path: Path, autograd_of_a_gpu_machine: list[int]
) -> None:
    """Its children could not run a backward pass, so that every job would fail there."""
    torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]
    with pytest.raises(NotGuarded):
        guarded(jobs(None), tmp_path)


class Frozen(nn.Module):
    """Two frozen layers with one weight, one of which a step may write to, and a layer that is trained."""

    def __init__(self, *, writes: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.first, self.second, self.last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.teacher = nn.Linear(5, 5)
        self.second.weight = self.first.weight
        for layer in (self.first, self.second, self.teacher):
            layer.requires_grad_(False)
            layer.weight.copy_(torch.randn(5, 5, generator=generator))
            layer.bias.zero_()
        self.writes = writes

    def forward(self, x: Tensor) -> Tensor:
        if self.writes:
            with torch.no_grad():
                self.teacher.weight.mul_(0.9)
        out: Tensor = self.last(self.second(self.first(x)) + self.teacher(x))
        return out


@pytest.mark.parametrize("writes", [False, True])
def test_frozen_weights_that_did_not_change_are_not_sent(
    writes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def note(member: Member, state: dict[str, Any]) -> None:
        kept.append(set(state.get("unsent", ())))
        take(member, state)

    kept: list[set[str]] = []
    monkeypatch.setattr("shoal.engine.processes.workers.take", note)
    made = [
        shoal.Job(
            model=lambda: Frozen(writes=writes), data=(X, Y), loss=F.cross_entropy, batch_size=8, epochs=2, seed=i,
            name=f"job {i}", hparams={"lr": 0.1},
        )
        for i in range(3)
    ]  # fmt: skip
    members = guarded(made, tmp_path)
    never = {"first.weight", "first.bias", "second.weight", "second.bias", "teacher.bias"}
    assert kept[-1] == never | (set() if writes else {"teacher.weight"})
    for member in members:
        assert member.status == "done"
        expected = solo(member.job)
        for name, value in expected.model.state_dict().items():
            torch.testing.assert_close(member.model.state_dict()[name], value)
        assert member.model.second.weight is member.model.first.weight


def test_frozen_weights_that_were_moved_and_changed_are_sent() -> None:
    """As in a job that trains alone on another device, whose teacher is written through `.data`."""
    made = [
        shoal.Job(model=lambda: nn.Linear(5, 512), data=(X, Y), loss=F.cross_entropy, batch_size=8, epochs=1, name=name)
        for name in "ab"
    ]
    for wide in (False, True):
        for member in prepare(made, CPU):
            member.model.requires_grad_(False)
            handle = ParentHandle(Pipe()[0], frozen=[member])
            for _ in range(8):
                weight = member.model.double().weight if wide else member.model.to("cpu").weight
                assert isinstance(weight, nn.Parameter)
                weight.data = weight.data * 0.9
                member.model.float()
            sent = handle._without_frozen(member, {"whole": {"model": member.model.state_dict()}})
            assert "weight" in sent["whole"]["model"] and "weight" not in sent.get("unsent", ())
