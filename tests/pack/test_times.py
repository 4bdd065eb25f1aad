"""Where the time goes that is not training."""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch import nn

import shoal
from shoal.pack.times import collected, timed


def test_what_is_inside_something_else_counts_once() -> None:
    with collected() as times:
        with timed("outer") as outer:
            time.sleep(0.02)
            with timed("inner"):
                time.sleep(0.03)
        with timed("inner"):
            pass
    assert times.seconds["inner"] >= 0.03 and times.seconds["outer"] < outer.seconds - 0.03 + 1e-6
    assert abs(times.seconds["inner"] + times.seconds["outer"] - outer.seconds) < 0.01


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
