"""Residual blocks distributed whole."""

import copy

import pytest
import torch
from tests.split.drawn import Residual
from torch import Tensor, nn

from shoal.errors import SplitError
from shoal.models import GPT, MLP, Encoder, ResNet18
from shoal.split.core.state import named_state
from shoal.split.subnets.assignment import assign_units
from shoal.split.subnets.narrow import narrow
from shoal.split.subnets.units import find_units


def test_blocks_of_a_resnet_are_those_with_an_identity_shortcut() -> None:
    units = find_units(ResNet18(width=2), (torch.rand(2, 3, 8, 8),), blocks=True)
    assert units.groups["blocks"].size == 5 and units.groups["blocks"].kind == "block"
    assert units.blocks is not None
    assert units.blocks.modules == ("stages.0", "stages.1", "stages.3", "stages.5", "stages.7")
    assert "stem.weight" in units.whole and "stages.2.conv1.weight" in units.whole


NETWORKS: dict[str, tuple[nn.Module, Tensor]] = {
    "resnet": (ResNet18(width=2), torch.rand(2, 3, 8, 8)),
    "gpt": (GPT(16, 8, 3, 2, 8), torch.zeros(2, 8, dtype=torch.long)),
    "encoder": (Encoder(6, 8, layers=3, heads=2, dropout=0.0), torch.rand(2, 5, 6)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_every_block_has_one_owner_and_the_rest_is_shared(name: str) -> None:
    model, x = NETWORKS[name]
    units = find_units(model, (x,), blocks=True)
    assert units.blocks is not None
    hands = assign_units(units, [2.0, 1.0], seed=0, round=0)
    held = [units.slices(hand) for hand in hands]
    inside = frozenset[str]().union(*units.blocks.tensors)
    for tensor in named_state(model):
        assert sum(tensor in slices for slices in held) == (1 if tensor in inside else 2), tensor
    for hand, slices in zip(hands, held, strict=True):
        part = narrow(model, units, hand)
        assert type(part) is type(model)
        assert list(named_state(part)) == list(slices)
        torch.autograd.backward(part(x).square().sum())
        part.eval()(x)


def test_a_part_is_the_network_with_the_identity_for_the_others() -> None:
    blocks = [Residual(4, 5) for _ in range(4)]
    model = nn.Sequential(nn.Linear(3, 4), *blocks, nn.Linear(4, 2)).double()
    x = torch.rand(6, 3, dtype=torch.float64)
    units = find_units(model, (x,), blocks=True)
    keep = {"blocks": torch.tensor([1, 2])}
    plain = nn.Sequential(model[0], model[2], model[3], model[5])
    assert torch.allclose(narrow(model, units, keep, scale=False)(x), copy.deepcopy(plain)(x), rtol=1e-12)
    h = model[0](x)
    for block in (model[2], model[3]):
        h = h + 2 * (copy.deepcopy(block)(h) - h)
    assert torch.allclose(narrow(model, units, keep, scale=True)(x), model[5](h), rtol=1e-12)
    everything = narrow(model, units, {"blocks": torch.arange(4)}, scale=True)
    assert torch.equal(everything(x), copy.deepcopy(model)(x))


class Shared(nn.Module):
    """Two blocks over one inner layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Residual(4, 5), Residual(4, 5), Residual(4, 5)
        self.b.up = self.a.up
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.c(self.b(self.a(x))))
        return y


@pytest.mark.parametrize(
    ("model", "x", "line"),
    [
        (MLP(4, 5, 2), torch.rand(2, 4), "MLP has 0 residual blocks that can be distributed"),
        (Shared(), torch.rand(6, 4), "shares a.up.weight"),
        (nn.Sequential(nn.Linear(4, 4), Residual(4, 5), nn.Linear(4, 2)), torch.rand(6, 4), "1 residual block that"),
    ],
)
def test_too_few_blocks_in_one_line(model: nn.Module, x: Tensor, line: str) -> None:
    with pytest.raises(SplitError, match=line) as raised:
        find_units(model, (x,), blocks=True)
    assert "\n" not in str(raised.value)


def test_more_workers_than_blocks_in_one_line() -> None:
    model, x = NETWORKS["gpt"]
    with pytest.raises(SplitError, match="4 workers, but layer 'blocks' has 3 units"):
        assign_units(find_units(model, (x,), blocks=True), [1.0] * 4, seed=0, round=0)
