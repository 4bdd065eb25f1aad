"""A network cut anywhere computes what it did, with the same gradients and the same names."""

from collections.abc import Callable

import pytest
import torch
from tests.place import networks
from tests.place.networks import Made
from torch import Tensor, nn

from shoal.errors import PlaceError
from shoal.graphs.calls import as_arguments
from shoal.models import ResNet18
from shoal.place.graph import trace_layers


def resnet() -> Made:
    return ResNet18(), torch.randn(3, 3, 8, 8), lambda out: out


@pytest.mark.parametrize(
    ("make", "every"),
    [
        (networks.bert, 4),
        (lambda: networks.gpt2(tied=False), 4),
        (networks.vit, 5),
        (networks.encoder, 3),
        (networks.recurrent, 1),
        (networks.in_place, 1),
        (resnet, 7),
    ],
    ids=["bert", "gpt2", "vit", "encoder", "lstm", "in_place", "resnet"],
)
def test_front_and_back_are_the_network(make: Callable[[], Made], every: int) -> None:
    torch.manual_seed(0)
    model, sample, output = make()
    graph = trace_layers(model, sample)
    assert all(not cut.problem for cut in graph.cuts)
    model.eval()
    args, kwargs = as_arguments(sample)
    whole = output(model(*args, **kwargs))
    wanted = torch.autograd.grad(
        whole.square().sum(), [p for p in model.parameters() if p.requires_grad], allow_unused=True
    )
    gradients = dict(zip([n for n, p in model.named_parameters() if p.requires_grad], wanted, strict=True))
    names = {name for layer in graph.layers for name in layer.parameters}
    for cut in graph.cuts[::every]:
        front, back = graph.split(cut.index)
        mine, theirs = ({name for name, _ in part.named_parameters()} for part in (front.eval(), back.eval()))
        assert mine.isdisjoint(theirs) and mine | theirs == names
        made = front(*graph.tensors_of(sample))
        assert [x.nbytes for x in made] == [value.bytes_at(3) for value in cut.values]
        entering = [x.detach().requires_grad_(v.has_gradient) for x, v in zip(made, cut.values, strict=True)]
        out = output(back(*entering))
        assert torch.allclose(out, whole, atol=1e-6)
        model.zero_grad()
        out.square().sum().backward()
        leaving = [(x, e.grad) for x, e in zip(made, entering, strict=True) if e.grad is not None]
        if leaving:
            torch.autograd.backward([x for x, _ in leaving], [g for _, g in leaving])
        for name, parameter in model.named_parameters():
            if name in names and gradients[name] is not None:
                assert parameter.grad is not None, (cut.name, name)
                assert torch.allclose(parameter.grad, gradients[name], atol=1e-4, rtol=1e-3), (cut.name, name)


def test_parts_take_any_number_of_rows() -> None:
    model, sample, output = networks.bert()
    graph = trace_layers(model, sample)
    front, back = (part.eval() for part in graph.split(8))
    model.eval()
    for rows in (1, 5):
        batch = networks.tokens(rows)
        out = output(back(*front(*graph.tensors_of(batch))))
        assert torch.allclose(out, output(model(**batch)), atol=1e-6)


def test_parts_of_another_network_are_its_own() -> None:
    model, other = networks.chain(6, 5, 4), networks.chain(6, 5, 4)
    graph = trace_layers(model, torch.randn(2, 6))
    first, again, theirs = graph.split(1), graph.split(1), graph.split(1, other)
    assert first[0] is again[0] and first[1] is again[1]
    assert first[0].get_parameter("0.weight") is model[0].weight
    assert theirs[0].get_parameter("0.weight") is other[0].weight


def test_a_mask_is_computed_again_from_the_smaller_input() -> None:
    graph = trace_layers(*networks.bert()[:2])
    cut = graph.cut_named("bert.encoder.layer.0.output.LayerNorm")
    assert [value.shape[0].numerator for value in cut.values] == [1, 1]
    mask, hidden = cut.values
    assert mask.bytes_at(1) == 12 * 8 and not mask.has_gradient  # not the 12 x 12 that attention uses
    assert hidden.bytes_at(1) == 12 * 16 * 4 and hidden.has_gradient
    assert cut.bytes_up(4) == 4 * (96 + 768) and cut.bytes_down(4) == 4 * 768


def test_a_tied_weight_stays_together() -> None:
    graph = trace_layers(*networks.gpt2()[:2])
    assert all("'transformer.wte.weight' is used on both sides" in cut.problem for cut in graph.cuts)
    with pytest.raises(PlaceError, match=r"cut after 'transformer\.drop': 'transformer\.wte\.weight' is used on both"):
        graph.split(3)


def test_layers_say_what_they_hold() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(32, 10))
    model[4].bias.requires_grad_(False)
    graph = trace_layers(model, torch.randn(2, 3, 4, 4))
    conv, norm, _, _, linear = graph.layers
    assert (conv.name, conv.kind, conv.parameters) == ("0", "Conv2d", ("0.weight", "0.bias"))
    assert conv.parameter_bytes == 4 * (8 * 27 + 8) and conv.output_bytes(5) == 5 * 8 * 4 * 4
    assert conv.operations.at(3) == 3 * 2 * 8 * 27 * 4
    assert norm.channels == 8 and norm.buffer_bytes == 2 * 8 * 4 + 8
    assert linear.trained_bytes == 4 * 320 and linear.parameter_bytes == 4 * 330
    assert linear.factors == ()  # its bias is not trained
    assert graph.inputs[0].bytes_at(2) == 2 * 3 * 16 * 4 and graph.outputs[0].bytes_at(2) == 2 * 10 * 4


def test_a_linear_layer_has_factors() -> None:
    first, _, second = trace_layers(networks.chain(6, 5, 4), torch.randn(2, 6)).layers
    assert first.factor_bytes(3) == 3 * (6 + 5) * 4 and second.factor_bytes(3) == 3 * (5 + 4) * 4


def test_a_module_called_twice_stays_together() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.again, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.last(self.again(self.again(self.first(x)).relu()))
            return out

    graph = trace_layers(Twice(), torch.randn(2, 4))
    assert [layer.name for layer in graph.layers] == ["first", "again", "again#2", "last"]
    assert [bool(cut.problem) for cut in graph.cuts] == [False, True, False]
    assert sum(layer.parameter_bytes for layer in graph.layers) == 4 * (20 + 20 + 10)


def test_a_network_on_the_meta_device_has_layers() -> None:
    with torch.device("meta"):
        graph = trace_layers(networks.chain(4000, 4000, 1000), torch.empty(8, 4000))
    assert graph.layers[0].parameter_bytes == 4 * (4000 * 4000 + 4000)


def test_what_cannot_be_traced_is_said_in_one_line() -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.fc(x)
            return out if out.sum() > 0 else -out

    with pytest.raises(PlaceError, match="cannot be traced") as caught:
        trace_layers(Looks(), torch.randn(2, 4))
    assert "\n" not in str(caught.value)


def test_a_cut_after_a_module() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), nn.Linear(4, 2))
    graph = trace_layers(model, torch.randn(2, 4))
    assert graph.cut_named("1") is graph.cut_named("1.2")
    back_only = trace_layers(
        nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())), torch.randn(2, 4)
    )
    for name in ("1", "3"):  # nothing comes after it; there is no such module
        with pytest.raises(PlaceError, match=r"no such layer to cut after; there are 0, 1\.0$"):
            back_only.cut_named(name)
