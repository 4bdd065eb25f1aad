"""What is merged and nobody has trained stays as it was, to the bit."""

from typing import Any

import pytest
import torch
from tests.split.networks import make_job, mlp
from torch import Tensor, nn

import shoal
from shoal.split.core.parts import Slice
from shoal.split.core.state import merge_
from shoal.split.methods.averaging import LocalSGD


class Frozen(nn.Module):
    """With a bias that does not train, and a table."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(6, 8, 3)
        self.net.get_parameter("0.bias").requires_grad_(False)
        self.register_buffer("table", torch.rand(50, dtype=torch.float64))

    def forward(self, x: Tensor) -> Any:
        return self.net(x) + self.get_buffer("table").sum()


@pytest.mark.parametrize("workers", [3, 7])
def test_what_nobody_trains_keeps_its_bits(workers: int) -> None:
    """Seven equal numbers, added up and divided by seven, are often another number."""
    job = make_job(Frozen, steps=6)
    start = LocalSGD(job, 1).model.state_dict()
    for result in (shoal.split.local_sgd(job, workers, 2), shoal.split.ist(job, workers, 2)):
        found = result.model.state_dict()
        assert all(torch.equal(found[name], start[name]) for name in ("table", "net.0.bias"))
        assert not torch.equal(found["net.0.weight"], start["net.0.weight"])


def test_elements_on_which_all_owners_agree_keep_their_bits() -> None:
    start = torch.rand(4, 50, generator=torch.Generator().manual_seed(0))
    whole, rows = start.clone(), [torch.tensor([0, 1, 2]), torch.tensor([0, 1]), torch.tensor([0, 2])] * 3
    pieces = [(Slice("w", (kept,)), start[kept].clone(), 1.0) for kept in rows]
    pieces[0][1][0] += 1
    merge_(whole, pieces)
    assert torch.equal(whole[1:], start[1:])
    assert torch.allclose(whole[0], start[0] + 1 / 9)
