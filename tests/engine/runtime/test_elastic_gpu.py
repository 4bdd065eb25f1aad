"""Elastic runs on a GPU: seats that are taken again, full memory, and a device-side assert, for real."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

import shoal
from shoal.engine.members.member import Member
from shoal.engine.planning.policy import Policy, RoundRobin
from shoal.engine.runtime.planning_context import PlanningContext
from shoal.engine.runtime.run import Run
from shoal.engine.stack import transfer
from shoal.preparation.checks import prepare
from shoal.reference import solo
from shoal.reporting.events import Event

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
G = torch.Generator().manual_seed(5)
X, Y = torch.randn(83, 6, generator=G, dtype=torch.float64), torch.randint(3, (83,), generator=G)


def net(p: float = 0.3) -> nn.Module:
    # no bias before the norm: its gradient is zero but for rounding, which Adam makes large
    return nn.Sequential(
        nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(p), nn.Linear(8, 3)
    ).double()


def job(i: int, **changes: Any) -> shoal.Job:
    settings: dict[str, Any] = {
        "model": net, "data": (X, Y), "val": (X[:20], Y[:20]), "loss": F.cross_entropy, "seed": i, "name": f"job {i}",
        "optimizer": torch.optim.Adam, "hparams": {"lr": 0.001 * (1 + i)}, "batch_size": 16, "epochs": 1 + i % 4,
    }  # fmt: skip
    return shoal.Job(**(settings | changes))


class Seats(PlanningContext):
    """Planning in which every member takes one byte."""

    def bytes(self, members: Sequence[Member]) -> float:
        return float(len(members))


def run_jobs(jobs: Sequence[shoal.Job], seats: float, policy: Policy | None = None, notify: Any = None) -> list[Member]:
    members = prepare(jobs, torch.device("cuda", 0))
    planning = Seats(members, compile=False)
    planning.budget = seats
    run = Run(members, planning, policy=policy, notify=notify)
    run.turn_seconds = 1e-3
    run.go()
    return members


def assert_as_solo(member: Member, tolerance: float = 1e-9) -> None:
    alone = solo(member.job, "cuda")
    assert (member.status, member.step) == (alone.status, alone.steps), member.error
    for name, value in alone.model.state_dict().items():
        scale = max(float(value.double().abs().max()), 1e-12)
        apart = float((member.model.state_dict()[name].double().cpu() - value.double().cpu()).abs().max()) / scale
        assert apart < tolerance, (member.name, name, apart)


@pytest.mark.parametrize("seats", [2, 4])
def test_a_queue_longer_than_the_pack(seats: int) -> None:
    jobs = [job(i) if i % 3 else job(i, epochs=None, steps=3 + i) for i in range(10)]
    for member in run_jobs(jobs, seats):
        assert_as_solo(member)


def test_free_seats_are_taken_without_new_units() -> None:
    told: list[Event] = []
    run_jobs([job(i, epochs=1 + i % 2) for i in range(12)], 4, notify=told.append)
    joins = [event for event in told if event.kind == "join"]
    assert len(joins) == 12 and len({event.data["unit"] for event in joins}) < 12


@pytest.mark.parametrize("kinds", [False, True], ids=["one optimizer", "two"])
def test_several_leave_and_join_at_once(kinds: bool) -> None:
    """Five leave together, and five of those that wait join together, in another order of optimizers than they left."""
    told: list[Event] = []
    optimizers = [torch.optim.Adam, torch.optim.SGD, torch.optim.SGD, torch.optim.Adam]
    more = [{"optimizer": optimizers[(i + i // 6) % 4]} if kinds else {} for i in range(18)]
    jobs = [job(i, epochs=4 if i == 5 else 1 + i // 6, **more[i]) for i in range(18)]
    for member in run_jobs(jobs, 6, notify=told.append):
        assert_as_solo(member)
    joins = [event.data["unit"] for event in told if event.kind == "join"]
    assert len(joins) == 18 and len(set(joins)) < 18


def test_what_comes_and_goes_in_few_copies_is_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same members, whether their tensors are copied side by side or one by one."""
    jobs = [job(i, epochs=3) for i in range(6)]
    together = run_jobs(jobs, 3, RoundRobin(slice_seconds=5e-3))
    monkeypatch.setattr(transfer, "MOST_BYTES", 0)
    for ours, theirs in zip(together, run_jobs(jobs, 3, RoundRobin(slice_seconds=5e-3)), strict=True):
        held = pytree.tree_leaves([dict(ours.model.state_dict()), ours.optimizer_state["state"]])
        assert not any(value.is_cuda or value.is_pinned() for value in held)
        assert_as_solo(ours)
        assert_as_solo(theirs)


def test_places_taken_away_and_given_back() -> None:
    for member in run_jobs([job(i, epochs=3) for i in range(5)], 2, RoundRobin(slice_seconds=5e-3)):
        assert_as_solo(member)


def test_streams_too() -> None:
    images = torch.randn(40, 3, 8, 8, dtype=torch.float64, generator=G)

    def conv() -> nn.Module:
        layers = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)
        return nn.Sequential(*layers).double()

    jobs = [job(i, model=conv, data=(images, Y[:40]), val=None, epochs=1 + i % 3) for i in range(7)]
    for member in run_jobs(jobs, 3):
        assert_as_solo(member)


def test_memory_that_is_really_full() -> None:
    """The process may have little: the pack is split, nothing is lost."""
    x, y = torch.randn(512, 1024, dtype=torch.float64), torch.randint(10, (512,))

    def wide() -> nn.Module:
        layers = nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)
        return nn.Sequential(*layers).double()

    jobs = [
        replace(job(i, val=None), model=wide, data=(x, y), batch_size=128, epochs=2, name=f"wide {i}") for i in range(8)
    ]
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    members = prepare(jobs, torch.device("cuda", 0))
    planning = PlanningContext(members, compile=False)  # no budget: it will run into the wall
    told: list[Event] = []
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 1800e6) / total)
    try:
        Run(members, planning, notify=told.append).go()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert [member.status for member in members] == ["done"] * 8, [member.error for member in members]
    assert any(event.kind == "split" for event in told)
    for member in members[::3]:
        assert_as_solo(member, 1e-6)


ASSERTS = """
import torch, torch.nn.functional as F, shoal
from torch import nn
x, y = torch.randn(256, 8), torch.randint(4, (256,))
y = y.float()  # what is tried before the training has the rows with extreme labels, but only if they are whole numbers
wrong = y.clone(); wrong[100] = 9
def own(out, target):
    return -out.log_softmax(1)[torch.arange(len(target), device=out.device), target.long()].mean()
net = lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
jobs = [shoal.Job(model=net, data=(x, wrong if i == 3 else y), loss=own, batch_size=32, epochs=40,
                  seed=i, name=f"job {i}") for i in range(8)]
results = shoal.train(jobs, device="cuda", checkpoint_every="0.2s", compile=False)
print([r.status for r in results], results[3].error)
assert [r.status for r in results] == ["done"] * 3 + ["failed"] + ["done"] * 4
assert "assert" in results[3].error
"""


def test_a_device_side_assert_costs_its_member_and_a_resume(tmp_path: Path) -> None:
    script = tmp_path / "asserts.py"
    script.write_text(textwrap.dedent(ASSERTS))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


ASSERTS_WHILE_COMPILING = """
import math, os, sys, torch, torch.nn.functional as F, shoal
from pathlib import Path
from torch import nn
from shoal.engine.tiers.captured import background
from shoal.engine.units import _choose_form
folder = Path(sys.argv[1])
_choose_form._compile_estimate = lambda graph: 1e-9
_choose_form.ALL_FORMS = math.inf  # what compiles does so meanwhile
background._PROGRAM = ";".join([
    "import json, os, pathlib, sys, threading, time", "sys.path += json.loads(sys.argv[2])",
    "from shoal.engine.tiers.captured.background import _end_with_parent",
    f"(pathlib.Path({sys.argv[1]!r}) / str(os.getpid())).touch()",
    "threading.Thread(target=_end_with_parent, args=[int(sys.argv[1])], daemon=True).start()", "time.sleep(600)",
])

class Net(nn.Module):
    def __init__(self, limit):
        super().__init__()
        self.limit, self.layers = limit, nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("shifts", torch.zeros(2))

    def forward(self, x):
        self.count.add_(1)
        place = (self.count > self.limit).long() * 99
        return self.layers(x) + self.shifts[place.view(1)]

x, y = torch.randn(256, 8), torch.randint(4, (256,))
jobs = [shoal.Job(model=lambda i=i: Net(1500 if i == 3 else 10**9), data=(x, y), loss=F.cross_entropy, batch_size=32,
                  epochs=400, seed=i, name=f"job {i}") for i in range(6)]
results = shoal.train(jobs, device="cuda", checkpoint_every="0.2s")
print([(r.status, r.tier) for r in results], results[3].error)
assert [r.status for r in results] == ["done"] * 3 + ["failed"] + ["done"] * 2
started = [int(path.name) for path in folder.iterdir()]
assert started, "nothing was compiled meanwhile"
left = [pid for pid in started if Path(f"/proc/{pid}").exists()]
assert not left, f"these still run: {left}"
"""


def test_a_device_side_assert_while_a_step_is_compiled(tmp_path: Path) -> None:
    script, folder = tmp_path / "asserts.py", tmp_path / "compiling"
    folder.mkdir()
    script.write_text(ASSERTS_WHILE_COMPILING)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "SHOAL_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, str(script), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
