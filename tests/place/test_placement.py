"""A placement is plain data that comes back from a file as it was."""

import json
from pathlib import Path

import pytest
import torch
from tests.place.networks import chain

import shoal
from shoal.errors import PlaceError
from shoal.place import Link, Placement


@pytest.fixture(scope="module")
def placement() -> Placement:
    return shoal.place(chain(200, 10, 400, 400), torch.randn(4, 200), link="100Mbit 1ms", measure=False, mode="placed")


def test_json_and_back(placement: Placement, tmp_path: Path) -> None:
    assert Placement.from_dict(json.loads(json.dumps(placement.to_dict()))) == placement
    placement.save(tmp_path / "placement.json")
    assert Placement.load(tmp_path / "placement.json") == placement


def test_layers_and_totals_agree(placement: Placement) -> None:
    front = [layer for layer in placement.layers if layer.where == "workers"]
    assert len(front) == placement.cut and front[-1].name == placement.cut_name
    assert all(layer.sync is None for layer in placement.layers if layer.where == "server" or not layer.parameters)
    graph = shoal.place.trace_layers(chain(200, 10, 400, 400), torch.randn(4, 200))
    at_cut = graph.cuts[placement.cut - 1].bytes_up(4)
    assert placement.bytes_up == at_cut + sum(layer.bytes_up for layer in front)
    assert placement.server_parameters == tuple(
        name for layer in graph.layers[placement.cut :] for name in layer.parameters
    )


def test_text_names_every_layer_and_alternative(placement: Placement) -> None:
    text = str(placement)
    for layer in placement.layers:
        assert f"\n{layer.name} " in f"\n{text}"
    for mode in ("one machine", "parameter server", "data parallel"):
        assert mode in text
    assert "pays below batch" in placement.explanation


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_picture(placement: Placement, tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"placement.{kind}"
    placement.picture(path)
    assert path.stat().st_size > 1000


def test_other_files_are_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    for text in ("{", "[]", '{"format": 7}', '{"format": 1, "mode": "placed"}'):
        path.write_text(text)
        with pytest.raises(PlaceError, match="placement") as caught:
            Placement.load(path)
        assert "\n" not in str(caught.value)
    with pytest.raises(PlaceError, match="cannot be read"):
        Placement.load(tmp_path / "missing.json")


def test_links() -> None:
    assert Link.parse("1Gbit, 5ms") == Link(1e9, 1e9, 0.005)
    probed = Link(9e8, 5e8, 0.001)
    assert Link.parse(probed) is probed
    assert (probed.seconds_up(9e8), probed.seconds_down(5e8)) == (8.0, 8.0)
    assert not probed.drifted(Link(1e9, 5e8)) and probed.drifted(Link(9e8, 2e8))
    for wrong in ("fast", "1G", "", "0Mbit"):
        with pytest.raises(PlaceError, match="such as 100Mbit"):
            Link.parse(wrong)
    with pytest.raises(PlaceError, match="above 0"):
        Link(0, 1)
