"""`shoal.place`: what it decides, and what it says to bad input."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.place import networks
from tests.place.networks import chain
from torch import Tensor, nn

import shoal
from shoal.errors import PlaceError
from shoal.place import Placement


def vgg_like() -> tuple[nn.Module, torch.Tensor]:
    """Convolutions with few parameters, linear layers with most of them; on the meta device."""
    with torch.device("meta"):
        layers = [nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4), nn.Conv2d(64, 64, 3), nn.ReLU()]
        head = [nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 4096)]
        return nn.Sequential(*layers, *head), torch.empty(16, 3, 64, 64)


def test_linear_layers_stay_at_the_server() -> None:
    model, sample = vgg_like()
    made = shoal.place(model, sample, link="1Gbit", server_link="10Gbit", speed=1e11, sync="server")
    assert made.mode == "placed"
    assert {layer.where for layer in made.layers if layer.kind == "Linear"} == {"server"}
    assert {layer.where for layer in made.layers if layer.kind == "Conv2d"} == {"workers"}
    plain, parallel = made.alternative("parameter server"), made.alternative("data parallel")
    assert plain is not None and parallel is not None
    assert made.seconds < min(plain.seconds, parallel.seconds)
    assert made.bytes_up + made.bytes_down < plain.bytes_both / 10


def test_the_chosen_one_is_the_fastest_and_can_be_asked_for() -> None:
    model, sample = vgg_like()
    made = shoal.place(model, sample)
    assert made.seconds == min(other.seconds for other in made.alternatives)
    for mode in ("one machine", "parameter server", "data parallel", "placed"):
        asked = shoal.place(model, sample, mode=mode)
        assert asked.mode == mode and asked.seconds >= made.seconds
    for cut in ("3", 4):
        asked = shoal.place(model, sample, cut=cut)
        assert (asked.cut, asked.cut_name) == (4, "3")


@pytest.mark.parametrize("make", [networks.bert, networks.gpt2, networks.vit], ids=["bert", "gpt2", "vit"])
def test_networks_of_transformers_are_placed_without_a_change(make: Any) -> None:
    model, sample, _ = make()
    made = shoal.place(model, sample, workers=2, link="10Gbit", batch_size=8)
    assert made.workers == 2 and made.rows == (8, 8) and made.seconds > 0
    parameters = {name for layer in made.layers for name in layer.parameters}
    used = {name for name, _ in model.named_parameters() if "pooler" not in name or "bert" in name}
    assert parameters <= {name for name, _ in model.named_parameters()} and used - parameters == set()
    if make is networks.gpt2:
        assert "It cannot be cut: 'transformer.wte.weight' is used on both sides" in made.explanation


def test_a_profile_is_written_once_and_used_again(tmp_path: Path) -> None:
    model, sample, path = chain(20, 30, 5), torch.randn(4, 20), tmp_path / "times.json"
    first = shoal.place(model, sample, profile=path)
    written = path.read_text()
    again = shoal.place(model, sample, profile=str(path), link="10Gbit")
    assert path.read_text() == written
    assert first.profile == again.profile and first.profile["measured"]
    assert shoal.place(model, sample, profile=first) == first


def test_shared_cores_have_times_of_their_own(tmp_path: Path) -> None:
    model, sample, path = chain(20, 30, 5), torch.randn(4, 20), tmp_path / "times.json"
    first = shoal.place(model, sample, profile=path, cores=2)
    assert first.profile["worker"] != first.profile["server"]
    assert shoal.place(model, sample, profile=path, cores=2) == first
    assert shoal.place(model, sample, profile=Placement.from_dict(first.to_dict()), cores=2) == first


def test_it_says_from_which_link_on_it_would_pay() -> None:
    model, sample = vgg_like()
    made = shoal.place(model, sample, link="10Mbit", speed=1e11)
    assert made.mode == "one machine"
    found = re.search(r"It would pay with links of about ([0-9.]+) ([GM]bit)/s", made.explanation)
    assert found is not None
    better = shoal.place(model, sample, link=f"{found[1]}{found[2]}", speed=1e11)
    assert better.mode != "one machine"
    alone = shoal.place(chain(20, 30, 5), torch.randn(4, 20), measure=False)
    assert "No faster link would change that." in alone.explanation


def test_one_worker_needs_no_distribution() -> None:
    made = shoal.place(chain(20, 30, 5), torch.randn(4, 20), workers=1, measure=False)
    assert made.mode == "one machine"
    assert made.explanation.startswith("One machine is faster than 1 worker with 4 rows each")
    assert made.alternative("data parallel") is None


def test_a_weak_worker_with_a_strong_server_is_placed() -> None:
    model, sample = vgg_like()
    made = shoal.place(
        model, sample, workers=1, link="100Gbit", server_speed=50.0, memory="40MB", speed=1e9, mode="placed"
    )
    assert made.predicted.worker_memory <= 40e6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"link": "fast"}, "link is 'fast'; give its speed, such as 100Mbit"),
        ({"workers": 0}, "workers is 0; use 1 or more"),
        ({"workers": [1, 0]}, "speed is 0.0; it is a factor above 0"),
        ({"workers": []}, r"workers is \[\]; use 1 or more"),
        ({"workers": "4"}, "workers is '4'; use 1 or more"),
        ({"workers": 2.5}, "workers is 2.5; use 1 or more"),
        ({"workers": 1, "mode": "data parallel"}, "mode is 'data parallel' with one worker"),
        ({"memory": "1kB", "server_memory": "1kB"}, "no placement fits: .* needs .* and has 1 kB; use more memory"),
        ({"memory": "much"}, "memory is 'much'"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": 1.5}, "batch_size is 1.5"),
        ({"cut": "conv7"}, "cut 'conv7': there is no such layer"),
        ({"cut": 9}, "cut is 9; the network has 3 layers: use 1 to 2"),
        ({"cut": 1.5}, "cut is 1.5; the network has 3 layers"),
        ({"cut": 1, "mode": "data parallel"}, "which has no cut"),
        ({"mode": "fastest"}, "mode is 'fastest'; use 'placed'"),
        ({"sync": "gossip"}, "sync is 'gossip'; use 'server'"),
        ({"micro_batches": 0}, "micro_batches is 0"),
        ({"micro_batches": "two"}, "micro_batches is 'two'"),
        ({"micro_batches": 8}, "micro_batches is 8, but a worker has 4 rows"),
        ({"optimizer": "lion"}, "optimizer is 'lion'"),
        ({"optimizer": torch.optim.Adam}, "optimizer is <class .*; use none, sgd, adam"),
        ({"speed": 0}, "speed is 0; give operations a second"),
        ({"speed": "fast"}, "speed is 'fast'; give operations a second"),
        ({"server_speed": "fast"}, "speed is 'fast'; it is a factor above 0"),
        ({"cores": 1.5}, "cores is 1.5; use 1 or more"),
        ({"profile": {}}, "profile is a dict; pass a Profile, a Placement, or a file"),
        ({"batch_norm": "mine"}, "batch_norm is 'mine'"),
        ({"cores": 0}, "cores is 0"),
        ({"server_profile": "nowhere.json"}, "cannot be read as a profile"),
    ],
)
def test_mistakes_are_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        shoal.place(chain(20, 30, 5), torch.randn(4, 20), measure=False, **settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "settings", [{"mode": "fastest"}, {"sync": "gossip"}, {"batch_norm": "mine"}, {"link": "fast"}]
)
def test_wrong_names_are_noticed_before_layers_are_timed(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def timed(*arguments: Any) -> Any:
        raise AssertionError("layers were timed")

    monkeypatch.setattr("shoal.place.api._profiles", timed)
    with pytest.raises(ValueError, match=f"{next(iter(settings))} is '"):
        shoal.place(chain(20, 30, 5), torch.randn(4, 20), **settings)


class Named(nn.Module):
    """Needs an argument by name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(20, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x) * scale)
        return out


class Classes(Named):
    """Gives whole numbers."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        out: Tensor = self.second(self.first(x)).argmax(1)
        return out


@pytest.mark.parametrize(
    ("model", "sample", "message"),
    [
        (lambda: None, torch.zeros(4, 20), "model is a function; pass the network itself, an nn.Module"),
        (nn.Linear, torch.zeros(4, 20), "model is the class Linear; pass the network itself"),
        (chain(20, 30, 5), torch.zeros(4, 21), r"does not take the sample \(RuntimeError: .*4x21"),
        (chain(20, 30, 5), torch.zeros(0, 20), "the sample has no tensor with rows"),
        (chain(20, 30, 5), None, "the sample has no tensor with rows"),
        (Named(), torch.zeros(4, 20), "does not take the sample .*'scale'.*a dict of named ones"),
        (Classes(), torch.zeros(4, 20), "no output of the network has a gradient"),
        (chain(20, 30, 5).requires_grad_(False), torch.zeros(4, 20), "no output of the network has a gradient"),
    ],
)
def test_networks_and_samples_that_cannot_be_placed(
    model: Any, sample: Any, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(PlaceError, match=message) as caught:
        shoal.place(model, sample, measure=False)
    assert "\n" not in str(caught.value) and not capfd.readouterr().err


def test_arguments_by_name() -> None:
    made = shoal.place(Named(), {"x": torch.zeros(4, 20), "scale": torch.ones(4, 4)}, cut="first", measure=False)
    assert made.cut_name == "first"


def test_micro_batches_of_a_network_with_batch_norm() -> None:
    model = nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    with pytest.raises(PlaceError, match="micro_batches is 2, but the network has batch norm"):
        shoal.place(model, torch.zeros(4, 20), micro_batches=2, measure=False)


def test_a_profile_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(PlaceError, match="which cannot be written"):
        shoal.place(chain(20, 30, 5), torch.zeros(4, 20), measure=False, profile=tmp_path / "no" / "profile.json")


def test_a_network_that_cannot_be_cut_says_why() -> None:
    model, sample, _ = networks.gpt2()
    with pytest.raises(PlaceError, match=r"cannot be cut: 'transformer\.wte\.weight' is used on both sides"):
        shoal.place(model, sample, mode="placed", measure=False)


def test_help_shows_the_call() -> None:
    assert "shoal.place(model, sample, workers=4, link='1Gbit'" in str(shoal.place.__doc__)
