"""Events: what they look like to others, which listeners get them, and what a listener that raises costs."""

from __future__ import annotations

import io
import json
import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import shoal
from shoal.engine.members.member import Member
from shoal.preparation.checks import prepare
from shoal.reporting.events import KINDS, Event, JsonLines, Listeners, MembersRunning, new_event


def members(count: int = 2) -> list[Member]:
    x, y = torch.zeros(8, 2), torch.zeros(8, 1)
    jobs = [
        shoal.Job(model=lambda: nn.Linear(2, 1), data=(x, y), loss=nn.functional.mse_loss, epochs=2, name=f"job {i}")
        for i in range(count)
    ]
    return prepare(jobs, torch.device("cpu"))


def test_an_event_as_one_line_of_json() -> None:
    member = members()[1]
    row = {"loss": float("nan"), "lr": np.float32(0.5), "time": 3.0, "n": torch.tensor(7), "inf": -float("inf")}
    line = Event("epoch", 12.5, member, row).to_json()
    assert "\n" not in line
    assert json.loads(line) == {
        "kind": "epoch",
        "time": 12.5,
        "member": 1,
        "name": "job 1",
        "data": {"loss": "nan", "lr": 0.5, "time": 3.0, "n": 7, "inf": "-inf"},
    }
    assert json.loads(new_event("split", unit=3, reason="memory", sizes=(4, 4)).to_json())["data"]["sizes"] == [4, 4]
    assert "member" not in new_event("end").to_dict()


def test_a_kind_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'epcoh'; use one of start, join"):
        Event("epcoh")
    for kind in KINDS:
        assert new_event(kind).kind == kind


def test_an_event_on_its_way_between_processes() -> None:
    here, there = members(), members()
    sent = pickle.loads(pickle.dumps(new_event("leave", here[1], status="done").to_wire()))
    got = Event.from_wire(sent, {member.index: member for member in there})
    assert got.member is there[1] and got.kind == "leave" and got.data == {"status": "done"}
    assert Event.from_wire(new_event("end").to_wire(), {}).member is None


def test_a_listener_that_raises_is_told_once_and_dropped() -> None:
    heard: list[str] = []
    calls: list[str] = []

    def bad(event: Event) -> None:
        calls.append(event.kind)
        raise RuntimeError("no space left")

    listeners = Listeners([lambda e: heard.append(e.kind), bad, lambda e: heard.append(e.kind.upper())])
    with pytest.warns(shoal.ShoalWarning, match=r"bad raised RuntimeError: no space left at the event 'start'") as told:
        for kind in ("start", "note", "end"):
            listeners(new_event(kind))
    assert len(told) == 1 and calls == ["start"]
    assert heard == ["start", "START", "note", "NOTE", "end", "END"]
    assert listeners and not Listeners()


def test_an_interrupt_is_no_listener_s_error() -> None:
    def stop(event: Event) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Listeners([stop])(new_event("start"))


def test_json_lines_come_at_once() -> None:
    stream = io.StringIO()
    write = JsonLines(stream)
    for kind in ("start", "end"):
        write(new_event(kind))
    assert [json.loads(line)["kind"] for line in stream.getvalue().splitlines()] == ["start", "end"]


def test_members_running_on_average() -> None:
    a, b = members()
    running = MembersRunning()
    assert running.average() == 0.0
    for kind, when, member in (("start", 0, None), ("join", 0, a), ("join", 2, b), ("preempt", 4, a), ("join", 8, a)):
        running(Event(kind, float(when), member))
    running(Event("leave", 10.0, b))
    # a: 0 to 4 and 8 to 10; b: 2 to 10
    assert running.average() == pytest.approx((4 + 2 + 8) / 10)
    assert running.average(now=20.0) == pytest.approx((4 + 12 + 8) / 20)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50)), min_size=1, max_size=6), st.randoms())
def test_the_average_does_not_depend_on_how_processes_interleave(
    runners: list[tuple[int, int]], mix: random.Random
) -> None:
    class Fake:
        def __init__(self, index: int) -> None:
            self.index = index

    queues: list[list[Event]] = []
    for index, (start, length) in enumerate(runners):
        fake: Any = Fake(index)
        queues.append([Event("join", float(start), fake), Event("leave", float(start + length), fake)])
    running = MembersRunning()
    while queues := [queue for queue in queues if queue]:
        running(mix.choice(queues).pop(0))
    span = max(s + n for s, n in runners) - min(s for s, _ in runners)
    assert running.average() == pytest.approx(sum(n for _, n in runners) / span)
