"""Narrow networks: the user's class with fewer units, computing what the whole one does without the others."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shoal import Pack
from shoal.models import CNN, GPT, MLP, Encoder, ResNet18
from shoal.split.subnets.assignment import assign_units
from shoal.split.subnets.narrow import narrow
from shoal.split.subnets.units import find_units


def masked(model: nn.Module, masks: dict[str, Tensor]) -> nn.Module:
    """The whole network whose named layers read zero where the mask is zero."""
    model = copy.deepcopy(model)
    for name, mask in masks.items():
        model.get_submodule(name).register_forward_pre_hook(lambda _, args, mask=mask: (args[0] * mask, *args[1:]))
    return model


def mask_of(size: int, kept: Tensor, each: int = 1) -> Tensor:
    found = torch.zeros(size, dtype=torch.float64)
    found[kept] = 1
    return found.repeat_interleave(each)


@settings(max_examples=6, deadline=None)
@given(st.integers(2, 9), st.integers(2, 9), st.booleans(), st.integers(0, 2**31))
def test_a_narrow_mlp_is_the_whole_one_without_the_other_units(a: int, b: int, bias: bool, seed: int) -> None:
    first, second = nn.Linear(4, a, bias), nn.Linear(a, b, bias)
    model = nn.Sequential(first, nn.BatchNorm1d(a), nn.Tanh(), second, nn.Tanh(), nn.Linear(b, 3)).double()
    x = torch.rand(5, 4, dtype=torch.float64)
    units = find_units(model, (x,))
    for hand in assign_units(units, [2.0, 1.0], seed=seed, round=0):
        whole = masked(model, {"3": mask_of(a, hand["0"]), "5": mask_of(b, hand["3"])})
        part = narrow(model, units, hand, scale=False)
        assert torch.allclose(part(x), whole(x), rtol=1e-12, atol=1e-12)
        assert torch.allclose(
            part.get_buffer("1.running_var"), whole.get_buffer("1.running_var")[hand["0"]], rtol=1e-12
        )


def test_a_narrow_cnn_is_the_whole_one_without_the_other_units() -> None:
    model = CNN(width=5, side=8, hidden=7).double()
    x = torch.rand(2, 1, 8, 8, dtype=torch.float64)
    units = find_units(model, (x,))
    for hand in assign_units(units, [1.0, 1.0, 1.0], seed=1, round=0):
        image = mask_of(5, hand["conv1"])[:, None, None]
        masks = {"conv2": image, "hidden": mask_of(10, hand["conv2"], 4), "head": mask_of(7, hand["hidden"])}
        assert torch.allclose(narrow(model, units, hand, scale=False)(x), masked(model, masks)(x), rtol=1e-12)


def test_narrow_heads_are_the_whole_ones_without_the_others() -> None:
    model = GPT(16, 12, 1, 3, 8).double()
    x = torch.randint(16, (2, 8))
    units = find_units(model, (x,))
    hand = {"blocks.0.qkv": torch.tensor([0, 2])}
    whole = masked(model, {"blocks.0.out": mask_of(3, hand["blocks.0.qkv"], 4)})
    assert torch.allclose(narrow(model, units, hand, scale=False)(x), whole(x), rtol=1e-12)


@pytest.mark.parametrize("training", [True, False])
def test_narrow_torch_attention(training: bool) -> None:
    model = Encoder(6, 12, layers=2, heads=3, dropout=0.0).double().train(training)
    x = torch.rand(2, 5, 6, dtype=torch.float64)
    units = find_units(model, (x,))
    hand = {"encoder.layers.0.self_attn": torch.tensor([1]), "encoder.layers.1.self_attn": torch.tensor([0, 2])}
    silent = copy.deepcopy(model)
    for name, kept in hand.items():
        silent.get_parameter(f"{name}.out_proj.weight").data *= mask_of(3, kept, 4)
    part = narrow(model, units, hand, scale=False)
    with torch.no_grad():
        assert torch.allclose(part(x), silent(x), rtol=1e-10)


def test_scale_makes_the_mean_of_the_parts_the_whole() -> None:
    """As inverted dropout: with equal shares, what the last layer reads is right on average, exactly."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    x = torch.rand(5, 4, dtype=torch.float64)
    units = find_units(model, (x,))
    parts = [narrow(model, units, hand, scale=True)(x) for hand in assign_units(units, [1.0] * 4, seed=0, round=0)]
    assert torch.allclose(torch.stack(parts).mean(0), model(x), rtol=1e-12)
    plain = [narrow(model, units, hand, scale=False)(x) for hand in assign_units(units, [1.0] * 4, seed=0, round=0)]
    assert not torch.allclose(torch.stack(plain).mean(0), model(x), rtol=1e-3)


class Mixed(nn.Module):
    """Reads units beside inputs that are never cut, and sums by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(10, 5)
        self.last = nn.Parameter(torch.rand(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(torch.cat([self.first(x), x], 1)) @ self.last
        return y


class Again(nn.Module):
    """A layer that runs three times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            x = self.again(x).tanh()
        found: Tensor = self.last(x)
        return found


def test_a_layer_that_runs_several_times_is_scaled_once_a_run() -> None:
    """Three units that stand twice in the whole network stand for themselves and their copies in the narrow one."""
    model, x = Again().double(), torch.rand(5, 4, dtype=torch.float64)
    units = find_units(model, (x,))
    with torch.no_grad():
        for tensor, spans in ((model.get_parameter(name), spans) for name, spans in units.spans.items()):
            for dim, span in enumerate(spans):
                if span.uses:
                    tensor.copy_(tensor.index_select(dim, torch.tensor([0, 1, 2, 0, 1, 2])))
    part = narrow(model, units, {"first": torch.tensor([0, 1, 2])})
    assert torch.allclose(part(x), model(x), rtol=1e-12, atol=1e-12)


def test_scale_leaves_what_is_whole_alone() -> None:
    model = Mixed().double()
    x = torch.rand(5, 4, dtype=torch.float64)
    units = find_units(model, (x,))
    keep = {"first": torch.tensor([1, 4]), "second": torch.tensor([0, 2, 3])}
    part = narrow(model, units, keep, scale=True)
    hidden = torch.cat([3 * model.first(x)[:, [1, 4]], x], 1)
    second = F.linear(hidden, model.second.weight[[0, 2, 3]][:, [1, 4, 6, 7, 8, 9]], model.second.bias[[0, 2, 3]])
    assert torch.allclose(part(x), (5 / 3 * second) @ model.last[[0, 2, 3]], rtol=1e-12)


def test_scale_is_left_out_where_a_normalisation_undoes_it() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    units = find_units(model, (torch.rand(5, 4),))
    part = narrow(model, units, {"0": torch.tensor([1, 2]), "2": torch.tensor([0, 5])}, scale=True)
    assert [getattr(layer, "shoal_scale", None) for layer in part] == [None] * 5 + [3.0]  # type: ignore[attr-defined]


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the largest tensor that anything makes."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(made):
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and not func.is_view:
                self.numel = max(self.numel, tensor.numel())
        return made


def test_the_whole_weights_are_never_copied() -> None:
    model = MLP(4, 256, 3)
    units = find_units(model, (torch.rand(2, 4),))
    hand = assign_units(units, [1.0] * 8, seed=0, round=0)[0]
    with Largest() as largest:  # type: ignore[no-untyped-call]
        part = narrow(model, units, hand)
    assert largest.numel == 32 * 32 == max(p.numel() for p in part.parameters())


def test_layers_say_their_new_sizes() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, groups=8), nn.GroupNorm(4, 8), nn.PReLU(8),
        nn.Flatten(), nn.Linear(200, 6), nn.LayerNorm(6), nn.Linear(6, 2),
    )  # fmt: skip
    units = find_units(model, (torch.rand(2, 3, 9, 9),))
    part: Any = narrow(model, units, {"0": torch.tensor([1, 3]), "6": torch.tensor([0, 1, 5])})
    assert (part[0].out_channels, part[1].num_features, part[4].num_parameters) == (4, 4, 4)
    assert (part[2].in_channels, part[2].out_channels, part[2].groups) == (4, 4, 4)
    assert (part[3].num_groups, part[3].num_channels) == (2, 4)
    assert (part[6].in_features, part[6].out_features, part[7].normalized_shape) == (100, 3, (3,))
    assert [type(a).__name__ for a in part] == [type(b).__name__ for b in model]
    assert model[0].out_channels == 8 and model[3].num_groups == 4


def test_frozen_parameters_stay_frozen_and_copies_are_copies() -> None:
    model = MLP(4, 6, 3)
    model.hidden[0].weight.requires_grad_(False)
    x = torch.rand(2, 4)
    units = find_units(model, (x,))
    part = narrow(model, units, {"hidden.0": torch.tensor([1, 2])})
    assert not part.get_parameter("hidden.0.weight").requires_grad
    before = copy.deepcopy(model.state_dict())
    twin = copy.deepcopy(part)
    assert torch.equal(twin(x), part(x))
    for parameter in part.parameters():
        parameter.data.zero_()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


STACKED: dict[str, tuple[nn.Module, Tensor]] = {
    "mlp": (MLP(20, 8, 3), torch.rand(5, 20)),
    "cnn": (CNN(width=4, side=8, hidden=12), torch.rand(2, 1, 8, 8)),
    "gpt": (GPT(16, 16, 1, 4, 8), torch.zeros(2, 8, dtype=torch.long)),
    "encoder": (Encoder(6, 8, layers=1, heads=4), torch.rand(2, 5, 6)),
}


@pytest.mark.parametrize("name", STACKED)
def test_parts_of_one_shape_ride_as_one_stack(name: str) -> None:
    model, x = STACKED[name]
    units = find_units(model, (x,))
    parts = [narrow(model, units, hand) for hand in assign_units(units, [1.0, 1.0], seed=0, round=0)]
    pack = Pack(parts, optimizer=torch.optim.SGD, hparams={"lr": 0.1}, loss=lambda out, _: out.square().mean())
    pack.step(x, x)
    assert {tier for tier, _ in pack.tiers.values()} == {"stacked"}


@pytest.mark.slow
def test_parts_of_a_resnet_ride_as_one_stack() -> None:
    model, x = ResNet18(width=4), torch.rand(2, 3, 16, 16)
    units = find_units(model, (x,))
    parts = [narrow(model, units, hand) for hand in assign_units(units, [1.0] * 4, seed=0, round=0)]
    pack = Pack(parts, optimizer=torch.optim.SGD, hparams={"lr": 0.1}, loss=lambda out, _: out.square().mean())
    pack.step(x, x)
    assert {tier for tier, _ in pack.tiers.values()} == {"stacked"}
