"""Which parameters a loss gives a gradient to, against a real backward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.engine.tracing.params_with_grad import reached_by
from shoal.engine.tracing.trace import trace


class Network(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layers, self.frozen = kind(3, 4, 2, batch_first=True), nn.Linear(4, 4).requires_grad_(False)
        self.head, self.unused = nn.Linear(4, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.frozen(self.layers(x)[0][:, -1]))
        return out


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_reached_is_what_gets_a_gradient(kind: type[nn.RNNBase]) -> None:
    batch = torch.randn(5, 6, 3), torch.randint(2, (5,))
    recorded = trace(Network(kind), lambda model, batch: (F.cross_entropy(model(batch[0]), batch[1]), {}), batch)
    assert [name for name, used in zip(recorded.params, recorded.used, strict=True) if not used] == [
        "frozen.weight", "frozen.bias", "unused.weight", "unused.bias",
    ]  # fmt: skip


class Detached(nn.Module):
    """Parameters that reach the loss, and others that do so without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d, self.e = (nn.Parameter(torch.randn(3)) for _ in range(5))
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("kept", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = x * self.b
        sign = torch.sign(self.c) * (self.e > 0)
        self.kept.add_(self.d.detach())
        return self.norm(x * self.a + sign)


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_reached_is_what_a_backward_pass_gives(precision: str | None) -> None:
    model, batch = Detached(), (torch.randn(5, 3), torch.randn(5, 3))
    step: Any = lambda model, batch: (F.mse_loss(model(batch[0]), batch[1]), {})  # noqa: E731
    recorded = trace(model, step, batch, precision=precision)
    step(model, batch)[0].backward()
    assert recorded.used == [param.grad is not None for param in model.parameters()]
    assert 0 < sum(recorded.used) < len(recorded.used)


def test_a_loss_without_operators() -> None:
    weight = torch.ones((), requires_grad=True)
    assert reached_by(weight) == {id(weight)}
    assert reached_by(torch.ones(())) == reached_by(1.0) == set()


class Counted(nn.Module):
    """Its `w` is in the loss, and the derivative that torch has for it there is none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.w = nn.Linear(3, 1), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) + torch.norm(self.w, p=0)
        return out


def test_a_parameter_that_is_reached_without_a_gradient_is_not_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_PACK", "always")
    data = torch.randn(8, 3), torch.randn(8, 1)
    hparams = {"lr": 0.1, "weight_decay": 0.5}
    jobs = [
        shoal.Job(
            model=Counted, data=data, loss=F.mse_loss, optimizer=torch.optim.AdamW, hparams=hparams, epochs=2, seed=seed
        )
        for seed in range(2)
    ]
    for job, result in zip(jobs, shoal.train(jobs, device="cpu", threads=1), strict=True):
        assert (result.tier, result.status) == ("stacked", "done")
        torch.testing.assert_close(result.model.state_dict(), shoal.solo(job).model.state_dict())
