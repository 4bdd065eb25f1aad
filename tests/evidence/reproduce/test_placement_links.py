"""The comparison over links: its networks, its cases, and one of them as small as it gets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shoal.evidence.reproduce import placement as paper
from shoal.evidence.reproduce.namespaces import missing


@pytest.mark.parametrize("name", list(paper.PIXELS))
def test_networks_take_their_images(name: str) -> None:
    x, y = paper.images(name, 2)
    with torch.no_grad():
        assert paper.make_network(name)(x).shape == (2, paper.CLASSES)
    assert y.dtype == torch.int64


def test_the_summary_compares_what_was_measured() -> None:
    def way(name: str, seconds: float, predicted: float | None = None, moved: int | None = None) -> dict[str, object]:
        return {"way": name, "seconds": seconds, "predicted_seconds": predicted, "bytes": moved, "predicted_bytes": 100}

    ways = [way("placed", 1.0, 1.1, 101), way("parameter server", 8.0, 12.0, 100), way(paper.DDP, 4.0)]
    case = {"network": "VGG-16", "rows": 4, "rate": "100mbit", "chosen": "placed", "ways": ways}
    seen = paper.summary([case, {"network": "x", "rows": 1, "rate": "1mbit", "error": "no"}])
    assert seen["largest_difference_of_bytes"] == pytest.approx(1 / 101)
    assert seen["predictions_within_20_percent"] == 0.5
    assert seen["chosen_is_fastest_or_within_5_percent"] == 1.0
    assert seen["faster_than_the_better_of_parameter_server_and_ddp"][0]["times_faster"] == 4.0


def test_what_was_measured_is_drawn(tmp_path: Path) -> None:
    result = paper.placement([], steps=3, limit=1.0, log=lambda line: None)
    ways = [{"way": "placed", "seconds": 1.0}, {"way": paper.DDP, "seconds": None}]
    result["results"] = [{"network": "VGG-16", "rows": 4, "rate": "100mbit", "ways": ways}]
    paper.draw(tmp_path / "ways.png", result)
    assert (tmp_path / "ways.png").stat().st_size > 1000


@pytest.mark.slow
def test_a_case_over_shaped_links() -> None:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    compared = paper.compare(paper.Case("AlexNet", 8, "500mbit", workers=2), 3, lambda line: None)
    by_way = {way["way"]: way for way in compared["ways"]}
    assert by_way.keys() == {"placed", "parameter server", "data parallel", paper.DDP, "one machine"}
    for name, way in by_way.items():
        assert way["error"] is None and way["seconds"] > 0, name
    for name in ("placed", "parameter server", "data parallel"):
        assert by_way[name]["bytes"] == pytest.approx(by_way[name]["predicted_bytes"], rel=0.02)
