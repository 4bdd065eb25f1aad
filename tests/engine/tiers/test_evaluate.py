"""Validation of a stack: one program for all members, with the numbers of the reference loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.engine.members.row_order import assign_rows
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
    assign_rows(members)


def test_a_metric_that_raises_ends_its_own_member() -> None:
    def wrong(outputs: Tensor, targets: Tensor) -> float:
        raise ZeroDivisionError("nothing to divide")

    good, bad = shoal.train([job(0), job(1, metrics={"m": wrong})], device="cpu")
    assert (good.status, bad.status) == ("done", "failed")
    assert bad.error is not None
    assert bad.error.startswith("ZeroDivisionError: nothing to divide (metric 'm') (test_evaluate.py:")
    assert good.history[-1]["val_loss"] == pytest.approx(shoal.solo(job(0)).history[-1]["val_loss"], rel=1e-9)


@dataclass(frozen=True)
class Output:
    logits: Tensor
    penalty: Tensor
    name: str = "output"


class Penalised(nn.Module):
    """Gives logits and a penalty, a scalar, in a dict, a dataclass or a tuple with the state of a recurrent layer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.lstm, self.fc, self.kind = nn.LSTM(D, 6, batch_first=True).double(), nn.Linear(6, C).double(), kind

    def forward(self, x: Tensor) -> Any:
        out, state = self.lstm(x.unsqueeze(1))
        logits, penalty = self.fc(out[:, 0]), out.square().mean()
        if self.kind == "tuple":
            return logits, penalty, state
        return Output(logits, penalty) if self.kind == "dataclass" else {"logits": logits, "penalty": penalty, "n": 3}


def logits_of(outputs: Any) -> tuple[Tensor, Tensor]:
    if isinstance(outputs, Output):
        return outputs.logits, outputs.penalty
    return (outputs["logits"], outputs["penalty"]) if isinstance(outputs, dict) else outputs[:2]


@pytest.mark.parametrize("kind", ["dict", "dataclass", "tuple"])
def test_metrics_of_outputs_that_are_not_all_rows(kind: str) -> None:
    """The last batch of 23 rows is shorter, so that the state of an LSTM, [layers, rows, ...], is no one tensor."""

    def loss(outputs: Any, targets: Tensor) -> Tensor:
        logits, penalty = logits_of(outputs)
        return F.cross_entropy(logits, targets) + penalty

    metrics = {
        "accuracy": lambda outputs, targets: accuracy(logits_of(outputs)[0], targets),
        "penalty": lambda outputs, targets: logits_of(outputs)[1].mean(),
    }
    jobs = [job(seed, model=lambda: Penalised(kind), loss=loss, metrics=metrics) for seed in range(2)]
    results = shoal.train(jobs, device="cpu")
    for result in results:
        assert result.status == "done", result.error
        with torch.no_grad():
            batches = [logits_of(result.model(x)) for x in XV.split(8)]
        logits, penalties = torch.cat([a for a, _ in batches]), torch.stack([b for _, b in batches])
        assert result.last("accuracy") == pytest.approx(float(accuracy(logits, YV)), abs=1e-12)
        assert result.last("penalty") == pytest.approx(float(penalties.mean()), rel=1e-9)
    if kind == "dataclass":
        outputs = results.predict(XV, batch_size=8)
        assert type(outputs) is type(results[0].model(XV)) and outputs.logits.shape == (2, 23, C)
        for index, result in enumerate(results):
            with torch.no_grad():
                alone = [logits_of(result.model(x)) for x in XV.split(8)]
            assert torch.equal(outputs.logits[index], torch.cat([logits for logits, _ in alone]))
            assert torch.equal(logits_of(outputs)[1][index], torch.stack([penalty for _, penalty in alone]))
    if kind == "dict":
        outputs = results.predict(XV, batch_size=8)
        assert outputs["logits"].shape == (2, 23, C) and outputs["penalty"].shape == (2, 3) and outputs["n"] == 3


def test_outputs_that_are_padded_come_as_lists() -> None:
    def collate(items: list[int]) -> tuple[Tensor, Tensor]:
        rows = [torch.arange(item % 5 + 1) for item in items]
        padded = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
        return padded.clamp(min=0), padded.clamp(max=2)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    def shares(outputs: list[Tensor], targets: list[Tensor]) -> float:
        right = [(out.argmax(-1) == target)[target >= 0] for out, target in zip(outputs, targets, strict=True)]
        return float(torch.cat(right).double().mean())

    one = job(0, model=lambda: nn.Embedding(5, C).double(), data=list(range(12)), val=list(range(7)), collate=collate,
              loss=loss, metrics={"share": shares}, batch_size=3)  # fmt: skip
    (result,) = shoal.train([one], device="cpu")
    assert result.status == "done", result.error
    batches = [collate(list(rows)) for rows in (range(3), range(3, 6), range(6, 7))]
    outputs = [result.model(inputs) for inputs, _ in batches]
    assert result.last("share") == pytest.approx(shares(outputs, [targets for _, targets in batches]))


def test_a_metric_may_give_an_array_of_one_number() -> None:
    (result,) = shoal.train([job(0, metrics={"m": lambda outputs, targets: np.array([2.5])})], device="cpu")
    assert result.last("m") == 2.5
