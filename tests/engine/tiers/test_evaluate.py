"""Validation of a stack: one program for all members, with the numbers of the reference loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.engine.members.row_order import deal
from shoal.engine.recipes.program import Program
from shoal.engine.recipes.recipe import TraceCache
from shoal.engine.tiers.evaluate import evaluate
from shoal.engine.tiers.stacked.unit import StackedUnit
from shoal.preparation.checks import prepare

N, D, C = 40, 5, 3
X = torch.randn(N, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, C, (N,), generator=torch.Generator().manual_seed(2))
XV, YV = X[:23] + 0.1, Y[:23]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(D, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.4), nn.Linear(8, C)).double()


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    assert outputs.shape == (len(YV), C) and targets.shape == (len(YV),)
    return (outputs.argmax(1) == targets).double().mean()


def job(seed: int, **changes: Any) -> shoal.Job:
    settings: dict[str, Any] = {"model": net, "data": (X, Y), "val": (XV, YV), "loss": F.cross_entropy, "epochs": 3}
    return shoal.Job(
        **(settings | {"hparams": {"lr": 0.01}, "batch_size": 8, "seed": seed, "name": f"{seed}"} | changes)
    )


class Noisy(nn.Module):
    """Draws in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(D, C).double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(F.dropout(x, 0.3))
        return out


class Moody(nn.Module):
    """In eval mode each of these does another thing."""

    def __init__(self, kind: int) -> None:
        super().__init__()
        self.fc, self.kind = nn.Linear(D, C).double(), kind

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(x)
        return out if self.training else (out.tanh() if self.kind else out.sin())


def weighted(scale: float) -> Any:
    def step(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Any]]:
        outputs = model(batch[0])
        loss = F.cross_entropy(outputs, batch[1]) * scale
        return loss, {"scale": scale, "size": outputs.square().mean()}

    return step


CASES: dict[str, list[dict[str, Any]]] = {
    "loss": [{}, {}, {}],
    "metrics": [{"metrics": {"accuracy": accuracy}}] * 3,
    "metrics of one": [{}, {"metrics": {"accuracy": accuracy}}, {}],
    "losses of their own": [{"loss": nn.CrossEntropyLoss(label_smoothing=s)} for s in (0.0, 0.1, 0.2)],
    "own steps": [{"loss": None, "step": weighted(s), "metrics": {"accuracy": accuracy}} for s in (0.5, 1.0, 2.0)],
    "other data": [{"val": (XV, YV)}, {"val": (XV + 1, YV)}, {"val": (XV[:5], YV[:5])}],
    "noise": [{"model": Noisy}] * 3,
    "unlike in eval mode": [{"model": lambda k=k: Moody(k)} for k in (0, 1, 0)],
    "val_every": [{"val_every": 2}, {}, {"val_every": 3}],
}


@pytest.mark.parametrize("name", CASES)
def test_history_as_in_the_reference_loop(name: str) -> None:
    jobs = [job(seed, **changes) for seed, changes in enumerate(CASES[name])]
    for result, this in zip(shoal.train(jobs, device="cpu"), jobs, strict=True):
        wanted = shoal.solo(this).history
        assert result.tier == "stacked", result.tier
        assert [list(row) for row in result.history] == [list(row) for row in wanted]
        for row, other in zip(result.history, wanted, strict=True):
            for key in row.keys() - {"seconds"}:
                assert row[key] == pytest.approx(other[key], rel=1e-9, abs=1e-12), (this.name, key)


def test_one_program_call_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    members = prepare([job(seed, metrics={"accuracy": accuracy}) for seed in range(4)], torch.device("cpu"))
    trace_cache = TraceCache()
    unit = StackedUnit([trace_cache.recipe(member) for member in members], trace_cache)
    calls: list[int] = []
    run = Program.__call__
    monkeypatch.setattr(Program, "__call__", lambda self, *a: (calls.append(self.members), run(self, *a))[1])
    before = [buffer.clone() for buffer in unit.stack.buffers]
    found = evaluate(unit, [0, 1, 3])
    assert calls == [2, 4, 4, 2, 4] and sorted(found) == [0, 1, 3], (
        "23 rows are three batches of 8; each shape is proven"
    )
    calls.clear()
    assert evaluate(unit, [0, 1, 3]) == found
    assert calls == [4, 4, 4]
    assert all(torch.equal(a, b) for a, b in zip(before, unit.stack.buffers, strict=True))
    deal(members)


def test_a_metric_that_raises_ends_its_own_member() -> None:
    def wrong(outputs: Tensor, targets: Tensor) -> float:
        raise ZeroDivisionError("nothing to divide")

    good, bad = shoal.train([job(0), job(1, metrics={"m": wrong})], device="cpu")
    assert (good.status, bad.status) == ("done", "failed")
    assert bad.error is not None and bad.error.startswith("ZeroDivisionError: nothing to divide (test_evaluate.py:")
    assert good.history[-1]["val_loss"] == pytest.approx(shoal.solo(job(0)).history[-1]["val_loss"], rel=1e-9)
