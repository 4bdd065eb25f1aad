"""A member's optimizer as a stack sees it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.engine.equality import assert_as_alone, numbers, whole
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

import shoal


def grouped_anew(optimizer: torch.optim.Optimizer) -> ExponentialLR:
    """A schedule that gives half of the parameters a group of their own."""
    params = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["params"] = params[:1]
    optimizer.add_param_group({"params": params[1:], "lr": 0.5})
    return ExponentialLR(optimizer, 0.9)


@pytest.mark.parametrize("changes", [{}, {"average": shoal.EMA(0.9)}])
def test_a_schedule_that_changes_the_groups(monkeypatch: pytest.MonkeyPatch, changes: Any) -> None:
    monkeypatch.setenv("SHOAL_PACK", "always")
    jobs = [
        shoal.Job(
            model=lambda: nn.Linear(5, 3).double(), data=(numbers(0, 12, 5), whole(1, 3, 12)), loss=F.cross_entropy,
            schedule=grouped_anew, epochs=2, batch_size=5, seed=seed, name=f"{seed}", **changes,
        )
        for seed in range(3)
    ]  # fmt: skip
    results = assert_as_alone(jobs, tier="serial")
    assert [group["lr"] for group in results[0].optimizer_state["param_groups"]] == pytest.approx(
        [0.001 * 0.9**6, 0.5 * 0.9**6]
    )
