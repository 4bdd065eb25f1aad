"""Whether a step does the same when it runs again, which is asked without computing anything."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.engine.tracing import trace as tracing
from shoal.engine.tracing._calls import Calls, OtherCall, same_arguments
from shoal.engine.tracing.patches import Untraceable
from shoal.engine.tracing.trace import trace

BATCH = torch.randn(4, 3), torch.randn(4, 3)
Step = Callable[[nn.Module, Any], Any]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.2))


def records(step: Step, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often a step is recorded."""
    real, count = tracing._record, itertools.count()
    monkeypatch.setattr(tracing, "_record", lambda *args: (next(count), real(*args))[1])
    trace(network(), step, BATCH)
    return next(count)


def plain(model: nn.Module, batch: Any) -> Any:
    outputs = []
    with torch.no_grad():
        scale = batch[0].abs().mean()
    for _ in range(2):
        outputs.append(model(batch[0]) / (scale + 1.0))
        joined = torch.stack(outputs)  # of a list that becomes longer
    return F.mse_loss(joined[-1], batch[1]), {"scale": scale, "rows": len(batch[0])}


def from_numpy(model: nn.Module, batch: Any) -> Any:
    """Takes an array, about which nothing is known."""
    return sum(row.sum() for row in model(batch[0]) * torch.tensor(np.ones(3, np.float32))), {}


def test_a_step_that_does_the_same_is_recorded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert records(plain, monkeypatch) == 1


def test_a_step_that_cannot_be_answered_from_its_first_run_is_recorded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert records(from_numpy, monkeypatch) == 2


def by_the_clock(model: nn.Module, batch: Any) -> Any:
    return F.mse_loss(model(batch[0]), batch[1]) * (1 + 1e-9 * time.perf_counter_ns()), {}


def logs_the_clock(model: nn.Module, batch: Any) -> Any:
    return F.mse_loss(model(batch[0]), batch[1]), {"time": time.perf_counter_ns()}


def catches(model: nn.Module, batch: Any) -> Any:
    try:
        loss = F.mse_loss(model(batch[0]), batch[1]) * time.perf_counter_ns()
    except Exception:  # also what tells that the call is another one
        loss = F.mse_loss(model(batch[0]), batch[1])
    return loss, {}


@pytest.mark.parametrize("step", [by_the_clock, logs_the_clock, catches])
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_a_step_that_does_something_else_is_refused(step: Step, precision: str | None) -> None:
    with pytest.raises(Untraceable, match="two runs of the same step do different things"):
        trace(network(), step, BATCH, precision=precision)


def test_the_second_run_computes_nothing() -> None:
    weight, calls = torch.ones(2), Calls()

    def step(x: Tensor, factor: float) -> Tensor:
        with calls:
            return x.mul_(factor)

    step(weight, 2.0)
    calls.repeat()
    assert not calls.repeated
    assert step(weight, 2.0) is weight
    assert calls.repeated
    assert weight.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("factor", [3.0, 2, True])
def test_another_call_is_not_answered(factor: Any) -> None:
    weight, calls = torch.ones(2), Calls()
    with calls:
        torch.mul(weight, 2.0)
    calls.repeat()
    with calls, pytest.raises(OtherCall):
        torch.mul(weight, factor)
    assert not calls.repeated
    with calls, pytest.raises(OtherCall):
        torch.mul(weight, 2.0)


def test_what_is_the_same() -> None:
    x = torch.ones(2)
    args: list[Any] = [x, 1, 0.5, "a", None, torch.float32, torch.device("cpu"), ..., slice(0, None), {"k": [x, (1,)]}]
    assert same_arguments(args, [*args[:-1], {"k": [x, (1,)]}])
    assert same_arguments(float("nan"), float("nan"))
    for a, b in [(x, x.clone()), (0.0, -0.0), (1, True), ([1], (1,)), ([1], [1, 1]), ({"a": 1}, {"b": 1})]:
        assert not same_arguments(a, b)
    assert not same_arguments(object(), object())
