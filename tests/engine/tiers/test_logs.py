"""What a step logs is only told: it ends nobody, whatever it is."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal

G = torch.Generator().manual_seed(4)
X, Y = torch.randn(40, 4, generator=G), torch.randint(3, (40,), generator=G)


def step(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Logs infinities of both signs, as the batch has it."""
    x, y = batch
    return F.cross_entropy(model(x), y), {"sign": x.sum() / 0.0, "size": x.abs().sum()}


def test_logs_that_are_not_finite_are_what_adding_them_gives() -> None:
    settings: dict[str, Any] = {"model": lambda: nn.Linear(4, 3).double(), "step": step, "epochs": 2}
    jobs = [
        shoal.Job(**settings, data=(X.double(), Y), seed=i, batch_size=7 + i, hparams={"lr": 0.1}) for i in range(3)
    ]
    results = shoal.train(jobs, device="cpu")
    for job, result in zip(jobs, results, strict=True):
        alone = shoal.solo(job, device="cpu")
        assert result.status == alone.status == "done"
        for ours, theirs in zip(result.history, alone.history, strict=True):
            assert not math.isfinite(ours["sign"]) and math.isclose(ours["size"], theirs["size"], rel_tol=1e-9)
