"""Units shared among forked processes: the same bits, and a worker's end is its members' alone."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.engine.members.member import Member
from shoal.engine.processes import child, sharing, workers
from shoal.engine.runtime.planning_context import PlanningContext
from shoal.engine.runtime.run import Run
from shoal.preparation.checks import prepare
from shoal.reporting.events import Event

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def jobs(count: int, **settings: object) -> list[shoal.Job]:
    g = torch.Generator().manual_seed(3)
    x, y = torch.randn(50, 6, generator=g), torch.randint(3, (50,), generator=g)
    given = {"epochs": 3, "batch_size": 16, "val": (x, y), "loss": F.cross_entropy, **settings}
    return [
        shoal.Job(
            model=lambda: nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.2), nn.ReLU(), nn.Linear(9, 3)),
            data=(x, y),
            optimizer=torch.optim.Adam,
            hparams={"lr": 0.01 * (1 + i)},
            seed=i,
            name=f"job {i}",
            **given,  # type: ignore[arg-type]
        )
        for i in range(count)
    ]


def trained(count: int, made: list[shoal.Job], notify: Callable[[Event], None] = lambda event: None) -> list[Member]:
    members = prepare(made, torch.device("cpu"))
    planning = PlanningContext(members)
    workers.run_shared(
        members, planning, count, lambda share, notify, **more: Run(share, planning, notify=notify, **more), notify
    )
    return members


def assert_equal(a: Member, b: Member) -> None:
    assert (a.status, a.error, a.step, a.epoch, a.tier) == (b.status, b.error, b.step, b.epoch, b.tier)
    for x, y in zip(a.model.state_dict().values(), b.model.state_dict().values(), strict=True):
        assert torch.equal(x, y)
    for key, state in a.optimizer_state["state"].items():
        for name, value in state.items():
            assert torch.equal(value, b.optimizer_state["state"][key][name]), name
    assert torch.equal(a.rng.get_state(), b.rng.get_state())
    timeless = [[{k: v for k, v in row.items() if k != "seconds"} for row in m.history] for m in (a, b)]
    assert timeless[0] == timeless[1]


@pytest.mark.parametrize("members", [1, 5, 8])
def test_the_same_bits_in_any_number_of_processes(members: int) -> None:
    alone = trained(1, jobs(members))
    for count in (2, 3):
        for a, b in zip(trained(count, jobs(members)), alone, strict=True):
            assert_equal(a, b)


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels do not tell children of their parent's end")
def test_a_child_whose_parent_was_killed_before_it_began_ends_at_once() -> None:
    pid = os.fork()
    if pid == 0:
        child._end_with_parent(os.getpid())  # its parent is another
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


def test_epochs_are_told_as_they_end() -> None:
    seen: list[tuple[int, int, str]] = []

    def notify(event: Event) -> None:
        if event.kind in ("epoch", "leave") and event.member is not None:
            seen.append((event.member.index, event.member.epoch, event.member.status))

    trained(2, jobs(6), notify)
    for index in range(6):
        own = [(epoch, status) for i, epoch, status in seen if i == index]
        assert own == [(1, "running"), (2, "running"), (3, "running"), (3, "done")]


def test_units_of_different_workers_have_different_numbers() -> None:
    told: list[Event] = []
    trained(2, jobs(8), told.append)
    units: dict[int, set[int]] = {}
    for event in told:
        if event.kind == "join" and event.member is not None:
            units.setdefault(event.data["unit"], set()).add(event.member.index)
    assert sorted(units) == [1, 2] and sorted(len(unit) for unit in units.values()) == [4, 4]


def test_a_killed_worker_ends_its_own_members_alone() -> None:
    home = os.getpid()

    def deadly(outputs: Tensor, targets: Tensor) -> float:
        if os.getpid() != home:
            os.kill(os.getpid(), signal.SIGKILL)
        return 0.0

    members = trained(2, jobs(6, metrics={"deadly": deadly}))
    ends = [member.status for member in members]
    assert ends.count("done") == 3 and ends.count("failed") == 3
    lost = next(member for member in members if member.status == "failed")
    assert lost.error == "its worker process was killed by SIGKILL (out of memory?), twice; train it again"
    alone = trained(1, jobs(6))
    for a, b in zip(members, alone, strict=True):
        if a.status == "done":
            for x, y in zip(a.model.state_dict().values(), b.model.state_dict().values(), strict=True):
                assert torch.equal(x, y)


def test_a_worker_that_is_killed_once_costs_nothing(tmp_path: Path) -> None:
    home, mark = os.getpid(), tmp_path / "killed"

    def deadly(outputs: Tensor, targets: Tensor) -> float:
        if os.getpid() != home and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return 0.0

    made = jobs(6, metrics={"deadly": deadly})
    for a, b in zip(trained(2, made), trained(1, made), strict=True):
        assert_equal(a, b)
    assert mark.exists()


def test_an_error_of_one_member_is_told_from_the_worker() -> None:
    def bad(outputs: Tensor, targets: Tensor) -> float:
        raise ValueError("no such metric")

    made = jobs(6)
    made[5].metrics = {"bad": bad}
    for count in (1, 2):
        members = trained(count, made)
        assert [m.status for m in members] == ["done"] * 5 + ["failed"]
        assert "no such metric" in (members[5].error or "")


def test_an_interrupt_brings_all_members_back() -> None:
    pressed: list[int] = []

    def notify(event: Event) -> None:
        if event.kind == "epoch" and event.data["epoch"] == 2 and not pressed:
            pressed.append(1)
            raise KeyboardInterrupt

    members = prepare(jobs(6, epochs=100_000), torch.device("cpu"))
    planning = PlanningContext(members, timed=False)
    with pytest.raises(KeyboardInterrupt):
        workers.run_shared(
            members, planning, 2, lambda share, notify, **more: Run(share, planning, notify=notify, **more), notify
        )
    assert {member.status for member in members} == {"cancelled"}
    assert all(member.optimizer_state["state"] for member in members)


def children() -> set[str]:
    """This process's children; other tests may have left some of their own (a reader, a compiler's pool)."""
    return {pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}


def test_no_worker_is_left_behind() -> None:
    before = children()
    trained(2, jobs(4))
    assert children() <= before


def test_what_could_not_be_traced_stays_in_this_process() -> None:
    homes: list[int] = []

    def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        homes.append(os.getpid())
        out = model(batch[0])
        if float(out.detach().sum()) > 1e9:
            out = out * 2
        return F.cross_entropy(out, batch[1])

    made = jobs(4, step=step, loss=None)
    members = trained(2, made)
    assert {member.tier for member in members} == {"serial"} and set(homes) == {os.getpid()}


def test_busy_cores_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < sharing.free_cores(2) < 2.1
    monkeypatch.delenv("SHOAL_WORKERS", raising=False)
    monkeypatch.setattr(sharing, "usable_cores", lambda: 4)
    monkeypatch.setattr(sharing, "free_cores", lambda count: 0.4)
    assert sharing.workers_for(None, torch.device("cpu"), 100.0) == 1


@pytest.mark.parametrize(
    ("threads", "seconds", "told", "count"),
    [(None, 100.0, None, 4), (None, 0.1, None, 1), (2, 100.0, None, 1), (2, 0.1, "3", 3), (None, 100.0, "1", 1)],
)
def test_how_many_workers(
    monkeypatch: pytest.MonkeyPatch, threads: int | None, seconds: float, told: str | None, count: int
) -> None:
    monkeypatch.setattr(sharing, "usable_cores", lambda: 4)
    monkeypatch.setattr(sharing, "free_cores", lambda count: 3.8)
    monkeypatch.delenv("SHOAL_WORKERS", raising=False)
    if told is not None:
        monkeypatch.setenv("SHOAL_WORKERS", told)
    assert sharing.workers_for(threads, torch.device("cpu"), seconds) == count
    assert sharing.workers_for(threads, torch.device("cuda"), seconds) == 1


@pytest.mark.parametrize("told", ["0", "many", "-1", "1.5"])
def test_a_number_of_workers_that_cannot_be(monkeypatch: pytest.MonkeyPatch, told: str) -> None:
    monkeypatch.setenv("SHOAL_WORKERS", told)
    with pytest.raises(ValueError, match=f"^SHOAL_WORKERS is '{told}'; set it to a whole number"):
        sharing.workers_for(None, torch.device("cpu"), 100.0)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_this_process_has_one_thread_too_while_others_train(two_threads: None) -> None:
    seen: set[int] = set()

    def note(event: Event) -> None:
        if event.kind == "turn":
            seen.add(torch.get_num_threads())

    trained(2, jobs(4), note)
    assert seen == {1} and torch.get_num_threads() == 2
    seen.clear()
    trained(1, jobs(4), note)
    assert seen == {2}


@pytest.mark.parametrize(("apart", "here", "count"), [(1.0, 0.6, 2), (1.0, 0.4, 1)])
def test_large_networks_stay_together_where_threads_do_more(
    monkeypatch: pytest.MonkeyPatch, two_threads: None, apart: float, here: float, count: int
) -> None:
    members = prepare(jobs(2), torch.device("cpu"))
    planning = PlanningContext(members, timed=False)
    planning._requests = {index: replace(asked, alone=0.1) for index, asked in planning._requests.items()}
    monkeypatch.delenv("SHOAL_WORKERS", raising=False)
    monkeypatch.setattr(sharing, "workers_for", lambda *_, **__: 2)
    monkeypatch.setattr(sharing, "predicted_seconds", lambda *_: 100.0)
    monkeypatch.setattr(sharing, "_parallel_step_seconds", lambda *_: apart)
    monkeypatch.setattr(sharing, "lone_seconds", lambda _: here)
    assert sharing.processes_for(members, planning, None) == count
    torch.set_num_threads(1)
    assert sharing.processes_for(members, planning, None) == 2


def test_steps_of_several_processes_are_timed() -> None:
    member = prepare(jobs(1), torch.device("cpu"))[0]
    before = [p.clone() for p in member.model.parameters()]
    assert 0 < sharing._parallel_step_seconds(member, 2) < 60
    assert all(torch.equal(a, b) for a, b in zip(before, member.model.parameters(), strict=True))
