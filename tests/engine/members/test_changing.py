"""Clones whose step trains other weights than before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.test_clone_changes import cloned, job
from torch import Tensor, nn

import shoal


class TwoHeads(nn.Module):
    """With a second head, which only some steps use."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.other = nn.Linear(6, 8).double(), nn.Linear(8, 3).double(), nn.Linear(8, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.body(x)))
        return out


def _both_heads(model: Any, batch: Any) -> Tensor:
    hidden = torch.tanh(model.body(batch[0]))
    return F.cross_entropy(model.head(hidden), batch[1]) + F.cross_entropy(model.other(hidden), batch[1])


def _both_heads_by_number(model: Any, batch: Any) -> Tensor:
    loss = _both_heads(model, batch)
    return loss if float(loss.detach()) < 1e9 else loss * 2  # no stack


@pytest.mark.parametrize(("step", "tier"), [(_both_heads, "stacked"), (_both_heads_by_number, "serial")])
def test_a_clone_whose_step_is_the_first_to_use_some_weights(step: Any, tier: str) -> None:
    """Their moments and counts of steps begin there; their average was there from the beginning."""
    source = job("a", model=TwoHeads, average=shoal.EMA(decay=0.8), optimizer=torch.optim.Adam)
    result = cloned(source, 10, ("a", "b", {"loss": None, "step": step}))["b"]
    with torch.random.fork_rng():
        torch.manual_seed(source.seed)
        model, order = TwoHeads(), torch.Generator().manual_seed(source.order_seed)
        optimizer, average, steps = torch.optim.Adam(model.parameters(), lr=0.01), dict[str, Tensor](), 0
        for _ in range(5):
            for rows in torch.split(torch.randperm(50, generator=order), 8):
                optimizer.zero_grad()
                batch = source.data[0][rows], source.data[1][rows]
                loss = F.cross_entropy(model(batch[0]), batch[1]) if steps < 10 else _both_heads(model, batch)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                steps += 1
                now = {name: p.detach().clone() for name, p in model.named_parameters()}
                average = {name: average[name].lerp(p, 1 - 0.8) if average else p for name, p in now.items()}
    assert (result.status, result.tier) == ("done", tier)
    for name, value in result.model.state_dict().items():
        torch.testing.assert_close(value, average[name], rtol=0, atol=1e-9)
