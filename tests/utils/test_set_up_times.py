"""Where the time goes that is not training."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoal
from shoal.utils.set_up_times import collected, timed


def test_what_is_inside_something_else_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 2.0, 5.0, 6.0, 10.0, 10.5])  # outer, inner, its end, outer's end, inner again, its end
    monkeypatch.setattr("shoal.utils.set_up_times.perf_counter", lambda: next(clock))
    with collected() as times:
        with timed("outer") as outer, timed("inner"):
            pass
        with timed("inner"):
            pass
    assert outer.seconds == 6.0 and times.seconds == {"inner": 3.5, "outer": 3.0}


def test_nobody_has_to_listen() -> None:
    with timed("something") as span:
        pass
    assert span.seconds >= 0


def test_a_plan_tells_what_its_set_up_took() -> None:
    x, y = torch.randn(40, 4), torch.randint(3, (40,))
    jobs = [
        shoal.Job(model=lambda: nn.Linear(4, 3), data=(x, y), loss=F.cross_entropy, epochs=1, seed=i) for i in range(2)
    ]
    plan = shoal.train(jobs, device="cpu", threads=1).plan
    assert plan is not None and {"jobs", "traces", "costs", "units"} <= plan.set_up.keys()
    assert all(seconds >= 0 for seconds in plan.set_up.values())
    assert plan.to_json()["set_up_seconds"] == plan.set_up
