"""Progress: what is counted from events, what is shown of it and how often, and what it costs."""

from __future__ import annotations

import io
import math
import re
import signal
import sys
import types
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import shoal
from shoal.engine.members.member import Member
from shoal.preparation.checks import prepare
from shoal.reporting import progress
from shoal.reporting._tally import Tally, batches_at, done, length
from shoal.reporting.events import Event, new_event
from shoal.reporting.progress import Lines, Live, Notebook, Progress, line, picture, progress_for, rows

X, Y = torch.zeros(30, 2), torch.zeros(30, 1)


def members(count: int = 2, **changes: Any) -> list[Member]:
    base: dict[str, Any] = {"model": lambda: nn.Linear(2, 1), "data": (X, Y), "loss": nn.functional.mse_loss}
    base |= {"batch_size": 8, "hparams": {"lr": 0.1}} | ({} if "steps" in changes else {"epochs": 2})
    return prepare([shoal.Job(**(base | changes), name=f"job {i}") for i in range(count)], torch.device("cpu"))


class Clock:
    """Time that moves when it is told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def join(member: Member, unit: Any = 1, tier: str = "stacked", **more: Any) -> Event:
    return new_event("join", member, tier=tier, unit=unit, size=1, **more)


def turn(count: int, batches: int, seconds: float = 1.0, unit: Any = 1, bytes: int | None = None) -> Event:
    return new_event("turn", unit=unit, tier="stacked", members=count, batches=batches, seconds=seconds, bytes=bytes)


def epoch(member: Member, loss: float = 1.0) -> Event:
    member.epoch += 1
    member.step += -(-member.num_batches // member.job.accumulate)
    member.history.append({"epoch": member.epoch, "step": member.step, "loss": loss})
    return new_event("epoch", member, **member.history[-1])


def leave(member: Member, status: str = "done") -> Event:
    member.status = status
    return new_event("leave", member, status=status, error=None, steps=member.step, seconds=0.0)


def test_batches_of_a_step_with_a_smaller_last_group() -> None:
    (member,) = members(1, accumulate=3)  # 4 batches an epoch: groups of 3 and 1
    assert [batches_at(member, step) for step in range(5)] == [0, 3, 4, 7, 8]
    (short,) = members(1, steps=3, accumulate=3)
    assert length(short) == 7 and done(short) == 0


def test_epochs_and_ends_count_without_turns() -> None:
    a, b = members()
    tally = Tally([a, b])
    assert tally.share == 0.0
    tally(epoch(a, 0.5))
    assert tally.share == 0.25 and tally.loss_range() == (0.5, 0.5)
    tally(leave(a))
    tally(leave(b, "cancelled"))
    assert tally.share == 0.5, "a cancelled job has not done its whole length"
    assert line(tally) == " 50%, 2/2 ended, loss 0.5 to 0.5, 1 cancelled"


def test_turns_move_a_pack_on_and_epochs_set_it_right() -> None:
    clock, (a, b) = Clock(), members()
    tally = Tally([a, b], clock)
    for event in (new_event("start", jobs=2, device="cpu", plan={"parts": []}), join(a), join(b), turn(2, 3)):
        tally(event)
    assert tally.share == pytest.approx(6 / 16) and tally.running == 2
    tally(turn(2, 1))
    tally(epoch(a))
    tally(epoch(b))
    assert tally.share == 0.5
    tally(turn(2, 1))
    a.step = b.step = 5
    tally(new_event("preempt", b, by="job 9"))
    assert tally.running == 1 and len(tally.waiting) == 1 and tally.share == pytest.approx(10 / 16)
    tally(leave(a, "diverged"))
    assert not tally.packs and tally.counts == {"diverged": 1} and tally.left == 3
    tally(join(b, unit=2))
    tally(turn(1, 3, unit=2))
    assert tally.share == 1.0


def test_speed_gain_memory_and_the_time_left() -> None:
    clock, (a, b) = Clock(), members(epochs=25)  # 100 batches each
    tally = Tally([a, b], clock)
    plan = {"parts": [{"members": [0, 1], "predicted": {"alone_seconds": 0.4, "memory_bytes": 3e6}}]}
    for event in (new_event("start", jobs=2, device="cpu", plan=plan), join(a), join(b)):
        tally(event)
    for _ in range(4):
        clock.now += 2.0
        tally(turn(2, 10, seconds=1.0, bytes=2_000_000))
    (row,) = rows(tally)
    assert row.speed == pytest.approx(20.0) and row.gain == pytest.approx(20 * 0.2)
    assert row.left == pytest.approx(60 / 5), "by the clock: 40 batches in 8 seconds"
    assert row.cells() == ["1", "stacked", "2", "20", "4.0x", "2 MB (3 MB predicted)", "12 s"]
    text = line(tally)
    assert text == " 40%, 0/2 ended, 2 running in 1 pack, 20 steps/s, 4.0x alone, 2 MB (3 MB predicted), 12 s left"


def test_steps_are_the_optimizer_s() -> None:
    (a,) = members(1, accumulate=2)
    tally = Tally([a])
    tally(join(a))
    tally(turn(1, 4, seconds=2.0))
    assert rows(tally)[0].speed == 1.0


def test_the_time_left_weighs_members_by_what_they_cost() -> None:
    clock, (a, b) = Clock(), members(epochs=25)
    tally = Tally([a, b], clock)
    plan = {
        "parts": [
            {"members": [0], "predicted": {"alone_seconds": 0.01}},
            {"members": [1], "predicted": {"alone_seconds": 0.1}},
        ]
    }
    tally(new_event("start", jobs=2, device="cpu", plan=plan))
    tally(join(a, unit=1))
    clock.now += 1.0
    tally(turn(1, 50))  # half a second's worth in one second; left: half a second's and ten seconds' worth
    assert tally.seconds_left() == pytest.approx((0.5 + 10) / 0.5)


def test_a_resumed_run_starts_from_what_is_done() -> None:
    a, b, c = members(3)
    tally = Tally([a, b, c])
    a.status, a.step, a.epoch = "done", 8, 2
    b.step, b.epoch = 4, 1
    tally(new_event("start", jobs=3, device="cpu", plan=None))
    assert tally.ended == {0: "done"} and tally.share == pytest.approx(12 / 24)
    assert tally.worked == 0


def test_members_that_come_later_and_packs_that_split() -> None:
    a, b, late = members(3)
    tally = Tally([a, b])
    tally(join(a))
    tally(join(b))
    tally(new_event("note", late, text="a clone of job 0"))
    assert len(tally.members) == 3 and tally.note == "job 2: a clone of job 0"
    tally(new_event("split", unit=1, reason="out of memory", sizes=[1, 1]))
    assert not tally.packs and len(tally.waiting) == 3
    tally(join(a, unit=2))
    tally(join(b, unit=3))
    assert [len(pack) for pack in tally.packs.values()] == [1, 1] and tally.share == 0.0 and tally.left == 24
    tally(leave(late, "cancelled"))
    tally(join(late, unit=2))
    assert tally.counts["cancelled"] == 0 and tally.left == 24 and tally.running == 3


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_sums_over_a_pack_are_those_over_its_members(data: st.DataObject) -> None:
    crowd = [types.SimpleNamespace(index=i, name=str(i), num_batches=4, usual_batches=4, step=0, epoch=0,
                                   status="running", history=[])
             for i in range(5)]  # fmt: skip
    for member in crowd:
        member.job = types.SimpleNamespace(epochs=50, steps=None, accumulate=1)
    tally = Tally(crowd)  # type: ignore[arg-type]
    homes: dict[int, int] = {}
    left = dict.fromkeys(range(5), 200)
    for _ in range(data.draw(st.integers(0, 40))):
        member: Any = data.draw(st.sampled_from(crowd))
        what = data.draw(st.sampled_from(["join", "turn", "turn", "preempt", "leave", "epoch"]))
        i, unit = member.index, data.draw(st.integers(0, 1))
        if what == "turn":
            members = [j for j, home in homes.items() if home == unit]
            tally(turn(len(members), 3, unit=unit))
            for j in members:
                left[j] -= 3
                crowd[j].step += 3
        elif what == "join":
            member.status = "running"
            homes[i] = unit
            left[i] = 200 - member.step
            tally(join(member, unit=unit))
        elif what == "preempt" and i in homes:
            del homes[i]
            tally(new_event("preempt", member, by="x"))
        elif what == "leave" and member.status == "running":
            homes.pop(i, None)
            left[i] = 0
            tally(leave(member, "failed"))
        elif what == "epoch" and member.status == "running":
            member.step = min(200, member.step + 1)
            left[i] = 200 - member.step
            tally(new_event("epoch", member, loss=0.0))
        assert tally.left == sum(left.values())
        assert tally.running == len(homes) == sum(len(pack) for pack in tally.packs.values())
        for pack in tally.packs.values():
            pack.seconds_left(0.0)
            assert all(pack.left[j] == left[j] and tally.unit_of[j] is pack for j in pack.left)
        assert len(tally.ended) == sum(m.status != "running" for m in crowd) == sum(tally.counts.values())


def test_many_packs_in_few_rows() -> None:
    crowd = members(40)
    tally = Tally(crowd)
    for i, member in enumerate(crowd):
        tally(join(member, unit=i, tier="serial" if i < 15 else "stacked"))
    found = rows(tally, most=10)
    assert [row.pack for row in found[-2:]] == ["15 more", "15 alone"] and len(found) == 12
    assert sum(row.members for row in found) == 40
    assert rows(tally, most=25)[-1].tier == "serial"


def test_plain_lines_are_seconds_apart(capsys: pytest.CaptureFixture[str]) -> None:
    crowd = members(3)
    told = Lines(crowd)
    clock = told.tally.clock = Clock()
    told._due = clock() + told.every
    for _ in range(4):
        told(turn(1, 1))
        clock.now += 1.0
    assert capsys.readouterr().err == ""
    clock.now += 1.0
    told(turn(1, 1))
    told(turn(1, 1))
    assert capsys.readouterr().err == "shoal:   0%, 0/3 ended\n"
    for member in crowd:
        told(leave(member))
    assert capsys.readouterr().err == "shoal: 100%, 3/3 ended\n", "the end is told at once, and once"


def test_an_interrupted_run_says_how_to_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(event: Event) -> None:
        if event.kind == "epoch" and event.member is not None and event.member.epoch == 2:
            signal.raise_signal(signal.SIGINT)

    def train(**more: Any) -> str:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a program started in the background ignores it
        jobs = [member.job for member in members(2, epochs=4)]
        with pytest.raises(KeyboardInterrupt):
            shoal.train(jobs, device="cpu", threads=1, progress=True, events=interrupt, **more)
        return capsys.readouterr().err.splitlines()[-1]

    last = train(out=tmp_path)
    assert re.fullmatch(
        r"shoal:  50%, loss [\d.]+ to [\d.]+, interrupted; the checkpoints are in out='.*'; "
        r"run the same lines again to resume",
        last,
    )
    assert "2/2 ended" in train() and "2 cancelled" in train()


def test_a_live_table_on_a_terminal() -> None:
    from rich.console import Console

    crowd = members(2)
    out = io.StringIO()
    with Live(crowd, Console(file=out, force_terminal=True, width=100)) as told:
        told(join(crowd[0]))
        told(join(crowd[1], unit="[red]2", tier="serial"))
        told(turn(1, 4, bytes=5_000_000))
        told(epoch(crowd[0], 0.25))
    text = out.getvalue()
    for part in ("training", "pack", "steps/s", "stacked", "[red]2", "5 MB", "loss 0.25 to 0.25", "2 running"):
        assert part in text, part


def test_drawing_waits_where_it_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Lines(members(1))
    clock = told.tally.clock = Clock()
    drawn = []

    def slow() -> None:
        drawn.append(clock())
        clock.now += 1.0

    monkeypatch.setattr(told, "show", slow)
    told._due = clock()
    for _ in range(100):
        told(turn(1, 1))
        clock.now += 1.0
    assert drawn == [100.0, 150.0, 200.0], "a picture that takes a second comes every 50 seconds at most"


def kernel() -> Any:
    """IPython as it is in a notebook's kernel."""
    module: Any = types.ModuleType("IPython")
    module.get_ipython = lambda: types.SimpleNamespace(kernel=object())
    return module


def test_a_notebook_without_widgets(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, str]] = []

    class Handle:
        def update(self, bundle: dict[str, str], raw: bool) -> None:
            seen.append(bundle)

    def display(bundle: dict[str, str], raw: bool, display_id: bool) -> Handle:
        seen.append(bundle)
        return Handle()

    page: Any = types.ModuleType("IPython.display")
    page.display = display
    monkeypatch.setitem(sys.modules, "IPython", kernel())
    monkeypatch.setitem(sys.modules, "IPython.display", page)
    crowd = members(1)
    with progress_for(crowd, True) as told:
        assert isinstance(told, Notebook)
        told(join(crowd[0]))
        told(leave(crowd[0]))
    assert len(seen) == 3
    assert "1/1 ended" in seen[-1]["text/plain"] and seen[-1]["text/html"].startswith("<pre>")


def test_where_we_are_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    crowd = members(1)
    quiet = progress_for(crowd, False)
    assert type(quiet) is Progress
    with quiet as told:
        told(join(crowd[0]))
    assert type(progress_for(crowd, True)) is Lines and type(progress_for(crowd, None)) is Progress
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))  # as tools that run notebooks do
    assert type(progress_for(crowd, True)) is Lines and type(progress_for(crowd, None)) is Progress
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert type(progress_for(crowd, True)) is Live and type(progress_for(crowd, None)) is Live
    assert type(progress_for(crowd, False)) is Progress
    with pytest.raises(ValueError, match="progress is 'yes'"):
        progress_for(crowd, "yes")  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "rich.live", None)
    assert type(progress_for(crowd, True)) is Lines
    monkeypatch.setitem(sys.modules, "IPython", kernel())
    monkeypatch.setitem(sys.modules, "IPython.display", None)
    assert type(progress_for(crowd, True)) is Lines and type(progress_for(crowd, None)) is Lines


def test_words() -> None:
    assert [progress.number(x) for x in (0.213, 31.4, 12345.6)] == ["0.21", "31.4", "12,346"]
    assert [progress.percent(x) for x in (0.0, 0.996, 0.29, 1.0)] == ["  0%", " 99%", " 29%", "100%"]
    assert progress.memory(None, None) == "" and progress.memory(None, 2e9) == "2 GB predicted"
    assert math.isnan(Tally([]).share) is False


@pytest.mark.slow
def test_an_event_costs_under_20_microseconds_among_ten_thousand_members() -> None:
    from rich.console import Console

    crowd = members(2)
    many = [types.SimpleNamespace(index=i, name=str(i), num_batches=4, usual_batches=4, step=0, epoch=0,
                                  status="running", history=[],
                                  job=crowd[0].job) for i in range(10_000)]  # fmt: skip
    told = Live(many, Console(file=io.StringIO(), force_terminal=True, width=100))  # type: ignore[arg-type]
    events = [join(member, unit=member.index // 100) for member in many]  # type: ignore[arg-type]
    events += [turn(100, 1, unit=unit) for unit in range(100)] * 100
    events += [new_event("epoch", member, loss=1.0) for member in many]  # type: ignore[arg-type]
    with told:
        cost = math.inf
        for _ in range(3):
            start = perf_counter()
            for event in events:
                told(event)
            cost = min(cost, (perf_counter() - start) / len(events))
        start = perf_counter()
        told.show()
        one = perf_counter() - start
    print(f"{cost * 1e6:.1f} microseconds an event, pictures included; one picture {one * 1e3:.1f} ms")
    assert cost < 20e-6
    assert picture(told.tally) is not None
