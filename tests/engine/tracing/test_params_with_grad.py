"""Which parameters a loss reaches, where a backward pass cannot be tried."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from shoal.engine.tracing.params_with_grad import _used_params
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
def test_reached_is_what_gets_a_gradient(kind: type[nn.RNNBase], monkeypatch: pytest.MonkeyPatch) -> None:
    batch = torch.randn(5, 6, 3), torch.randint(2, (5,))
    recorded = trace(Network(kind), lambda model, batch: (F.cross_entropy(model(batch[0]), batch[1]), {}), batch)
    tried = _used_params(recorded)
    assert [name for name, used in zip(recorded.params, tried, strict=True) if not used] == [
        "frozen.weight", "frozen.bias", "unused.weight", "unused.bias",
    ]  # fmt: skip
    monkeypatch.setattr(torch.autograd, "grad", None)  # not called
    monkeypatch.setattr(FakeTensor, "is_cuda", True)
    assert _used_params(recorded) == tried
