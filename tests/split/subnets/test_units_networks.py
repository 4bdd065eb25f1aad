"""Which units ordinary networks have, and which have none."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.errors import SplitError
from shoal.models import CNN, GPT, MLP, Encoder, LSTMClassifier, ResNet18
from shoal.split.subnets._check import Probe
from shoal.split.subnets.assignment import assign_units
from shoal.split.subnets.narrow import narrow
from shoal.split.subnets.units import Units, find_units

TOKENS = torch.zeros(2, 8, dtype=torch.long)


def sizes(units: Units) -> dict[str, int]:
    return {name: group.size for name, group in units.groups.items()}


class Own(nn.Module):
    """A network in one function, over layers and parameters by name."""

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Tensor) -> Any:
        return self.run(self, *inputs)


MODELS: list[tuple[str, nn.Module, tuple[Tensor, ...], dict[str, int]]] = [
    ("mlp", MLP(20, 9, 3, dropout=0.1), (torch.rand(5, 20),), {"hidden.0": 9, "hidden.1": 9}),
    ("cnn", CNN(width=5, hidden=13), (torch.rand(2, 1, 28, 28),), {"conv1": 5, "conv2": 10, "hidden": 13}),
    ("gpt", GPT(16, 15, 1, 3, 8), (TOKENS,), {"blocks.0.qkv": 3, "blocks.0.up": 60}),
    ("encoder", Encoder(6, 12, layers=1, heads=3), (torch.rand(2, 5, 6),),
     {"encoder.layers.0.self_attn": 3, "encoder.layers.0.linear1": 24}),
]  # fmt: skip


@pytest.mark.parametrize(("model", "inputs", "expected"), [m[1:] for m in MODELS], ids=[m[0] for m in MODELS])
def test_models(model: nn.Module, inputs: tuple[Tensor, ...], expected: dict[str, int]) -> None:
    units = find_units(model, inputs)
    assert sizes(units) == expected
    hands = assign_units(units, [2.0, 1.0], seed=0, round=0)
    for hand in hands:
        part = narrow(model, units, hand)
        torch.autograd.backward(part(*inputs).sum())
    assert sum(p.numel() for p in narrow(model, units, hands[1]).parameters()) < 0.75 * sum(
        p.numel() for p in model.parameters()
    )


def test_resnet_couples_channels_through_its_shortcuts() -> None:
    model, inputs = ResNet18(width=3), (torch.rand(2, 3, 16, 16),)
    units = find_units(model, inputs)
    streams = {"stem": 3, "stages.2.conv2": 6, "stages.4.conv2": 12, "stages.6.conv2": 24}
    inner = {f"stages.{n}.conv1": 3 * 2 ** (n // 2) for n in range(8)}
    assert sizes(units) == streams | inner
    stem = {(use.tensor, use.dim) for use in units.groups["stem"].uses}
    assert {("stem.weight", 0), ("norm.running_var", 0), ("stages.0.conv1.weight", 1), ("stages.1.conv2.weight", 0),
            ("stages.2.shortcut.0.weight", 1)} <= stem  # fmt: skip


def test_a_head_has_rows_in_query_key_and_value() -> None:
    units = find_units(GPT(16, 12, 1, 3, 8), (TOKENS,))
    uses = {(use.tensor, use.dim): use.rows for use in units.groups["blocks.0.qkv"].uses}
    assert uses["blocks.0.qkv.weight", 0][1].tolist() == [4, 5, 6, 7, 16, 17, 18, 19, 28, 29, 30, 31]
    assert uses["blocks.0.out.weight", 1][2].tolist() == [8, 9, 10, 11]
    assert units.groups["blocks.0.qkv"].kind == "head"


def test_a_channel_has_its_block_of_flattened_columns() -> None:
    units = find_units(CNN(width=2, side=8, hidden=4), (torch.rand(2, 1, 8, 8),))
    rows = next(use.rows for use in units.groups["conv2"].uses if use.tensor == "hidden.weight")
    assert rows.tolist() == [[4 * c + i for i in range(4)] for c in range(4)]


def L(a: int, b: int, bias: bool = True) -> nn.Linear:
    return nn.Linear(a, b, bias)


def gated(s: Any, x: Tensor) -> Tensor:
    a, b = s.a(x).chunk(2, -1)
    return s.b(F.silu(a) * b)  # type: ignore[no-any-return]


def squeezed(s: Any, x: Tensor) -> Tensor:
    y = s.c(x)
    gate = torch.sigmoid(s.up(F.relu(s.down(y.mean((2, 3))))))
    return s.out((y * gate[:, :, None, None]).flatten(1))  # type: ignore[no-any-return]


def decoded(s: Any, x: Tensor) -> Tensor:
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
    return s.out(s.layer(x, x, tgt_mask=mask, tgt_is_causal=True))  # type: ignore[no-any-return]


IMAGE = torch.rand(2, 3, 9, 9)
ROWS = torch.rand(3, 4)
ORDINARY: dict[str, tuple[nn.Module, Tensor, dict[str, int]]] = {
    "gate": (Own(gated, a=L(4, 12), b=L(6, 3)), ROWS, {"a": 6}),
    "glu": (Own(lambda s, x: s.b(F.glu(s.a(x))), a=L(4, 12), b=L(6, 3)), ROWS, {"a": 6}),
    "concatenation": (
        Own(lambda s, x: s.c(torch.cat([s.a(x), x, s.b(x)], 1)), a=L(4, 6), b=L(4, 5), c=L(15, 3)),
        ROWS, {"a": 6, "b": 5},
    ),
    "by functions": (
        Own(lambda s, x: F.linear(x, s.a).relu() @ s.b, a=nn.Parameter(torch.rand(8, 4)),
            b=nn.Parameter(torch.rand(8, 3))),
        ROWS, {"a": 8},
    ),
    "a size in the code": (
        Own(lambda s, x: s.b(s.a(x).view(-1, 8 * 49)), a=nn.Conv2d(3, 8, 3), b=L(392, 3)), IMAGE, {"a": 8}
    ),
    "one layer twice": (
        Own(lambda s, x: s.b(s.m(s.m(s.a(x)).relu()).relu()), a=L(4, 8), m=L(8, 8), b=L(8, 3)), ROWS, {"a": 8}
    ),
    "depthwise": (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 2, 1)), IMAGE, {"0": 8}
    ),
    "grouped": (nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 12, 3, groups=4), nn.Conv2d(12, 2, 1)), IMAGE, {"0": 4}),
    "group norm": (nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.Conv2d(8, 2, 1)), IMAGE, {"0": 4}),
    "instance norm": (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8, affine=True, track_running_stats=True), nn.PReLU(8),
                      nn.Conv2d(8, 2, 1)),
        IMAGE, {"0": 8},
    ),
    "squeeze and excite": (
        Own(squeezed, c=nn.Conv2d(3, 8, 3), down=L(8, 4), up=L(4, 8), out=L(392, 2)), IMAGE, {"c": 8, "down": 4}
    ),
    "transposed": (nn.Sequential(nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(8, 6, 2), nn.Conv2d(6, 2, 1)), IMAGE,
                   {"0": 8, "1": 6}),
    "norms without weights": (
        nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8, elementwise_affine=False), nn.Linear(8, 6), nn.RMSNorm(6),
                      nn.Linear(6, 2)),
        ROWS, {"0": 8, "2": 6},
    ),
    "a norm over channels and sides": (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.LayerNorm((8, 7, 7)), nn.ReLU(), nn.Conv2d(8, 2, 1)), IMAGE, {"0": 8}
    ),
    "a layer that nothing reads": (
        Own(lambda s, x: s.b(s.a(x).relu()), a=L(4, 8), b=L(8, 3), unused=L(2, 2)), ROWS, {"a": 8}
    ),
    "a layer that runs for nothing": (
        Own(lambda s, x: s.b(h := s.a(x).relu()) + 0 * len(s.c(h)), a=L(4, 8), b=L(8, 3), c=L(8, 5)),
        ROWS, {"a": 8, "c": 5, "c:2": 8, "c:3": 5},
    ),
    "attention with weights": (
        Own(lambda s, x: s.b(s.a(x, x, x)[0]), a=nn.MultiheadAttention(6, 3, batch_first=True), b=L(6, 3)),
        torch.rand(2, 5, 6), {"a": 3, "a.out_proj": 6},
    ),
    "decoder layer": (
        Own(decoded, layer=nn.TransformerDecoderLayer(6, 3, 10, batch_first=True), out=L(6, 3)),
        torch.rand(2, 5, 6), {"layer.self_attn": 3, "layer.multihead_attn": 3, "layer.linear1": 10},
    ),
    "a recurrent layer between": (
        Own(lambda s, x: s.c(s.b(s.g(x)[0][:, -1]).relu()), g=nn.LSTM(4, 5, batch_first=True), b=L(5, 7), c=L(7, 3)),
        torch.rand(2, 5, 4), {"b": 7},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_networks(name: str) -> None:
    model, inputs, expected = ORDINARY[name]
    assert sizes(find_units(model, (inputs,))) == expected


def test_tied_weights_are_one_tensor() -> None:
    layers: dict[str, Any] = {"e": nn.Embedding(11, 6), "u": L(6, 9), "d": L(9, 6), "h": L(6, 11, False)}
    layers["h"].weight = layers["e"].weight
    model = Own(lambda s, x: s.h(s.d(s.u(s.e(x)).relu())), **layers)
    units = find_units(model, (TOKENS,))
    assert sizes(units) == {"u": 9, "d": 6}
    part = narrow(model, units, {"d": torch.tensor([0, 3]), "u": torch.tensor([1, 2, 8])})
    assert part.get_submodule("h").weight is part.get_submodule("e").weight
    assert list(part.state_dict()["h.weight"].shape) == [11, 2]


def test_a_stream_is_cut_when_asked_for() -> None:
    model, inputs = Encoder(6, 12, layers=1, heads=3), (torch.rand(2, 5, 6),)
    assert "streams=True" in find_units(model, inputs).whole["embed.bias"]
    units = find_units(model, inputs, streams=True)
    assert units.groups["embed"].size == 12 and not units.groups["embed"].exact


UNCUT: dict[str, tuple[nn.Module, Tensor, str]] = {
    "one layer": (nn.Linear(4, 3), ROWS, "hidden width"),
    "recurrent": (LSTMClassifier(4, 5, 3), torch.rand(2, 5, 4), "a recurrent layer stays whole"),
    "softmax": (Own(lambda s, x: s.b(s.a(x).softmax(1)), a=L(4, 8), b=L(8, 3)), ROWS, "softmax"),
    "mean": (Own(lambda s, x: s.b(s.a(x).mean(1, keepdim=True)), a=L(4, 8), b=L(1, 3)), ROWS, "its mean is taken"),
    "sorted": (Own(lambda s, x: s.b(s.a(x).sort(1)[0]), a=L(4, 8), b=L(8, 3)), ROWS, "sort"),
    "places that matter": (Own(lambda s, x: s.b(s.a(x) * torch.arange(8)), a=L(4, 8), b=L(8, 3)), ROWS, "arange"),
    "a norm, then its width": (
        Own(lambda s, x: s.b((h := s.n(s.a(x))) / h.shape[1]), a=L(4, 8), n=nn.LayerNorm(8), b=L(8, 3)),
        ROWS, "the narrow network does not compute",
    ),
    "also an output": (
        Own(lambda s, x: (s.b(h := s.a(x)), h), a=L(4, 8), b=L(8, 3)), ROWS, "the outputs have its size"
    ),
    "a tensor of that size": (
        Own(lambda s, x: s.b(s.a(x) + torch.zeros(3, 8)), a=L(4, 8), b=L(8, 3)), ROWS, "the narrow network does not run"
    ),
    "branches on data": (
        Own(lambda s, x: s.b(s.a(x)) if x.sum() > 0 else x, a=L(4, 8), b=L(8, 3)), ROWS, "cannot be traced"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNCUT)
def test_what_cannot_be_cut_says_why_in_one_line(name: str) -> None:
    model, inputs, reason = UNCUT[name]
    with pytest.raises(SplitError, match=reason) as raised:
        find_units(model, (inputs,))
    assert "\n" not in str(raised.value)


def test_a_choice_that_is_none_is_refused() -> None:
    units = find_units(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)), (ROWS,))
    for keep, line in (
        ({"1": torch.tensor([0])}, "no group of units called '1'"),
        ({"0": torch.tensor([], dtype=torch.long)}, "at least one"),
        ({"0": torch.tensor([2, 1])}, "ascending"),
        ({"0": torch.tensor([5, 6])}, "units 0 to 5"),
    ):
        with pytest.raises(SplitError, match=line):
            units.slices(keep)


def test_a_wrong_coupling_is_found_out() -> None:
    """The check is what stands between a wrong rule and the user: it must see one."""
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    units = find_units(model, (ROWS,))
    probe = Probe(model, (ROWS,))
    assert probe.fault(units) == ""
    spans = dict(units.spans)
    first = spans["2.weight"][1]
    turned = tuple(type(use)(use.group, use.tensor, use.dim, use.rows.roll(1, 0)) for use in first.uses)
    spans["2.weight"] = (spans["2.weight"][0], type(first)(first.size, turned))
    wrong = type(units)(groups=units.groups, whole={}, spans=spans, readers=units.readers)
    assert "does not compute" in probe.fault(wrong)
