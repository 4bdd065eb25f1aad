"""Cutting a network: the parts compute what the network does, keep its names, and a cut that cannot be says why."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal import Job
from shoal.errors import SplitError
from shoal.models import CNN, ResNet18
from shoal.split.core.memory import measure
from shoal.split.methods._balance import choose
from shoal.split.methods._cuts import Pieces, candidates, cut, record


class Residual(nn.Module):
    """A skip around fc2, dropout that asks for the mode, an argument with a default."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            x = x * mask
        x = F.dropout(F.relu(self.fc1(x)), 0.5, training=self.training)
        out: Tensor = self.fc3(x + F.relu(self.fc2(x)))
        return out


class Reshaping(nn.Module):
    """Sizes from shapes on both sides of a cut, and a tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(4, 4), nn.Linear(8, 3)
        self.steps = torch.arange(4.0)

    def forward(self, x: Tensor) -> Tensor:
        rows = len(x)
        h = self.b(self.a(x).view(rows, 2, 4)) + self.steps
        out: Tensor = self.c(h.reshape(rows, -1))
        return out


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.Sequential(nn.Linear(5, 8), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, 3))


class Branching(nn.Module):
    """Control flow on values."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(x)
        return out if out.sum() > 0 else -out


def plain(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def joined(pieces: Pieces, *inputs: Tensor) -> Tensor:
    value: Any = pieces.networks[0](*inputs)
    for network in pieces.networks[1:]:
        value = network(value)
    found: Tensor = value
    return found


@pytest.mark.parametrize(
    ("make", "shape", "cuts"),
    [
        (lambda: plain(6, 5, 4, 3), (6,), ["2"]),
        (lambda: plain(6, 5, 4, 3), (6,), ["after:2", "after:0"]),
        (Residual, (6,), ["fc3"]),
        (Residual, (6,), ["fc2", "fc3"]),
        (Reshaping, (6,), ["b", "c"]),
        (encoder, (4, 5), ["1.layers.1"]),
        (CNN, (1, 28, 28), None),
        (ResNet18, (3, 16, 16), ["stages.2", "stages.5"]),
    ],
)
def test_parts_compute_what_the_network_does(
    make: Callable[[], nn.Module], shape: tuple[int, ...], cuts: list[str] | None
) -> None:
    torch.manual_seed(0)
    model, x = make(), torch.randn(3, *shape)
    recorded = record(model, (x,))
    names = cuts if cuts is not None else [candidates(recorded)[-1][0]]
    pieces = cut(model, (x,), names, recorded)
    whole = dict([*model.named_parameters(), *model.named_buffers()])
    owned = [name for names in pieces.names for name in names.values()]
    assert sorted(owned) == sorted(whole)
    for network, names_of in zip(pieces.networks, pieces.names, strict=True):
        assert names_of == {name: name for name in names_of}
        for name, tensor in [*network.named_parameters(), *network.named_buffers()]:
            assert torch.equal(tensor, whole[name])
    model.eval()
    for network in pieces.networks:
        network.eval()
    other = torch.randn(5, *shape)  # another number of rows than it was recorded with
    assert torch.equal(joined(pieces, other), model(other))
    assert tuple(pieces.networks[0](other).shape[1:]) == pieces.cuts[0].shape


def test_the_first_part_takes_the_arguments_of_the_network() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 4), nn.Linear(4, 2)

        def forward(self, inputs: dict[str, Tensor], scale: Tensor) -> Tensor:
            out: Tensor = self.b(self.a(inputs["x"] + inputs["y"]) * scale)
            return out

    model, x = Named(), torch.randn(5, 6)
    given = ({"x": x, "y": 2 * x}, torch.rand(5, 1))
    pieces = cut(model, ({"x": x[:3], "y": x[:3]}, torch.ones(3, 1)), ["b"])
    assert torch.equal(pieces.networks[1](pieces.networks[0](*given)), model(*given))


def test_a_part_asks_for_its_own_mode() -> None:
    pieces = cut(Residual(), (torch.ones(2, 6),), ["fc2"])
    left, x = pieces.networks[0], torch.randn(50, 6)
    left.eval()
    kept = left(x)
    left.train()
    torch.manual_seed(1)
    dropped = left(x)
    assert (dropped == 0).sum() > (kept == 0).sum()
    assert torch.equal(dropped[dropped != 0], 2 * kept[dropped != 0])


def test_a_module_that_cannot_be_recorded_is_kept_whole() -> None:
    model = nn.Sequential(nn.Linear(6, 6), Branching(), nn.Linear(6, 2))
    pieces = cut(model, (torch.randn(3, 6),), ["2"])
    x = torch.randn(4, 6)
    assert torch.equal(joined(pieces, x), model(x))
    with pytest.raises(SplitError, match=r"does not call '1\.fc' by itself"):
        cut(model, (x,), ["1.fc"])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(F.relu(self.a(x)))
        return out


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.a(self.a(x)))
        return out


class OtherInTraining(Twice):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.a(x) * 2 if self.training else self.a(x))
        return out


@pytest.mark.parametrize(
    ("make", "cuts", "said"),
    [
        (Residual, ["fc9"], "cut 'fc9': the network has no module 'fc9'; there are fc"),
        (Residual, ["fc1"], "no weights come before it"),
        (Residual, ["after:fc3"], "has no weights"),
        (
            Residual,
            ["after:fc2"],
            r"splits a skip or a residual: 2 tensors cross it \(dropout, fc2\); cut at one of fc2",
        ),
        (Residual, ["fc3", "fc3"], "are the same place"),
        (Residual, [3], "cut 3 is a int; name a module"),
        (Branching, ["fc"], "the network cannot be traced"),
        (Twice, ["a"], "'a' is called 2 times"),
        (OtherInTraining, ["b"], "other things in training than in evaluation"),
        (lambda: Tied(), ["b"], "are one tensor in two parts"),
    ],
)
def test_a_cut_that_cannot_be_says_why_in_one_line(make: Callable[[], nn.Module], cuts: list[Any], said: str) -> None:
    model = make()
    width = next(model.parameters()).shape[1]
    with pytest.raises(SplitError, match=said) as error:
        cut(model, (torch.randn(3, width),), cuts)
    assert "\n" not in str(error.value)


def job_of(model: nn.Module, x: Tensor, y: Tensor) -> Job:
    return Job(model=model, data=(x, y), loss=F.cross_entropy, optimizer=torch.optim.Adam, epochs=1)


def test_a_tensor_that_is_no_part_of_the_state_is_trained_around() -> None:
    x, y = torch.randn(16, 6), torch.randint(0, 3, (16,))
    job = Job(model=Reshaping, data=(x, y), loss=F.cross_entropy, epochs=1, batch_size=8)
    result = shoal.split.sil(job, ["c"])
    assert result.status == "done"
    assert list(result.model.state_dict()) == list(Reshaping().state_dict())


def test_the_planner_balances_memory_and_operations() -> None:
    x, y = torch.randn(16, 32), torch.zeros(16, dtype=torch.int64)
    model = plain(32, 64, 64, 64, 64, 64, 4)
    names, shares = choose(record(model, (x,)), job_of(model, x, y), (x,), 2)
    assert len(names) == 1
    assert max(shares) < 0.62
    three, parts = choose(record(model, (x,)), job_of(model, x, y), (x,), 3)
    assert len(three) == 2
    assert max(parts) < max(shares)
    with pytest.raises(SplitError, match="9 parts need 8 cuts"):
        choose(record(model, (x,)), job_of(model, x, y), (x,), 9)


def test_measured_memory_is_what_the_tensors_say() -> None:
    x, y = torch.randn(8, 32), torch.zeros(8, dtype=torch.int64)
    model = nn.Linear(32, 1024, bias=False)
    cost = measure(job_of(model, x, y), model, lambda net, batch: F.cross_entropy(net(batch[0]), batch[1]), (x, y))
    weight = 32 * 1024 * 4
    assert cost.weight_bytes == weight
    assert cost.operations == 2 * 2 * 8 * 32 * 1024  # forward, and the weight's gradient
    assert 4 * weight < cost.peak_bytes < 7 * weight  # itself, its gradient, two moments, the update's temporaries
