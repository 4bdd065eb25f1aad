"""Networks, steps and metrics that write to what they are given. Each member sees its batch as it was read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.engine.equality import distance, numbers, whole
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.reference import solo

X, Y = numbers(0, 22, 5), whole(1, 3, 22)


class Scaling(nn.Module):
    """Scales its input in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3)).double()

    def forward(self, x: Tensor) -> Any:
        return self.net(x.mul_(1.5).add_(0.1))


class Branching(Scaling):
    """Cannot be stacked."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * (2 if float(x.sum()) > 1e9 else 1)


KINDS = [
    pytest.param(lambda i: Scaling(4), id="one stack"),
    pytest.param(lambda i: Scaling(4 + i // 2), id="two stacks"),
    pytest.param(lambda i: Branching(4), id="serial"),
]


def wrong_after(outputs: Tensor, targets: Tensor) -> float:
    """A metric that writes to the targets."""
    return float((outputs.argmax(1) == targets.add_(1).remainder_(3)).sum())


def total(outputs: Tensor, targets: Tensor) -> float:
    return float(outputs.detach().sum())


def job(i: int, model: Any, **changes: Any) -> shoal.Job:
    settings: dict[str, Any] = {"data": (X, Y), "loss": F.cross_entropy, "hparams": {"lr": 0.05}, "epochs": 2}
    return shoal.Job(model=lambda: model(i), name=f"{i}", seed=i, batch_size=8, **(settings | changes))


@pytest.fixture(autouse=True)
def _always_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_PACK", "always")


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize("model", KINDS)
@pytest.mark.parametrize("step", [None, mean_loss])
def test_jobs_that_read_one_dataloader(model: Any, step: Any) -> None:
    loader = DataLoader(TensorDataset(X, Y), batch_size=8)
    more = {"loss": None, "step": step} if step else {}
    jobs = [
        job(i, model, data=loader, val=(X, Y), metrics={"wrong": wrong_after, "total": total}, **more) for i in range(4)
    ]
    for result, one in zip(shoal.train(jobs, device="cpu"), jobs, strict=True):
        alone = solo(one)
        for name, value in alone.model.state_dict().items():
            assert distance(result.model.state_dict()[name], value) < 1e-9
        for row, expected in zip(result.history, alone.history, strict=True):
            assert [row[key] for key in expected if key != "seconds"] == pytest.approx(
                [expected[key] for key in expected if key != "seconds"]
            )
        assert alone.history[-1]["total"] == pytest.approx(total(alone.model(X.clone()), Y))


@pytest.mark.parametrize("model", KINDS)
def test_networks_asked_for_the_same_inputs(model: Any) -> None:
    results = shoal.train([job(i, model) for i in range(4)], device="cpu")
    expected = torch.stack([result.model(X.clone()) for result in results])
    assert distance(results.predict(X.clone()), expected) < 1e-9
    scores = results.evaluate((X.clone(), Y), metrics={"total": total})
    assert scores.column("total") == pytest.approx(
        {f"{i}": float(out.detach().sum()) for i, out in enumerate(expected)}
    )


@pytest.mark.parametrize("model", KINDS)
def test_members_of_a_pack(model: Any) -> None:
    torch.manual_seed(0)
    models = [model(i) for i in range(4)]
    pack = shoal.Pack(models, optimizer=torch.optim.SGD, hparams={"lr": 0.5}, loss=F.cross_entropy)
    x = X.clone()
    for _ in range(3):
        pack.step(x, Y)
    assert torch.equal(x, X)
    for id, plain in enumerate(models):
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(plain(X.clone()), Y).backward()
            optimizer.step()
        assert distance(pack.member(id).net[0].weight, plain.net[0].weight) < 1e-9
    assert distance(pack.eval(X.clone()), torch.stack([plain(X.clone()) for plain in models])) < 1e-9
