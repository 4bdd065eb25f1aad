"""The published arithmetic of full-size networks, without a cluster."""

import pytest
import torch

from shoal.evidence.reproduce.placement_arithmetic import PUBLISHED, arithmetic, table
from shoal.evidence.reproduce.placement_networks import SHAPES, shape_of


@pytest.mark.slow
def test_the_table_comes_out_within_two_per_cent() -> None:
    rows = arithmetic()
    assert [row["network"] for row in rows] == list(PUBLISHED)
    for row in rows:
        for name in ("parameters", "plain", "placed", "ratio", "below"):
            assert row[name] == pytest.approx(row["published"][name], rel=0.02), (row["network"], name)
        assert row["share"] == pytest.approx(row["published"]["share"], abs=0.6)
    assert "VGG-16" in table(rows)


@pytest.mark.parametrize(
    ("name", "count"),
    [("AlexNet", 61_100_840), ("VGG-16", 138_357_544), ("ResNet-50", 25_557_032), ("Inception-v3", 23_834_568)],
)
def test_networks_have_the_published_number_of_parameters(name: str, count: int) -> None:
    assert sum(p.numel() for p in shape_of(name)[0].parameters()) == count


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_scaled_networks_keep_their_proportions_and_run(shape: object) -> None:
    model = shape.make(width=1 / 8, classes=125)  # type: ignore[attr-defined]
    linear = sum(p.numel() for m in model.modules() if isinstance(m, torch.nn.Linear) for p in m.parameters())
    whole = sum(p.numel() for p in model.parameters())
    assert 100 * linear / whole == pytest.approx(PUBLISHED[shape.name]["share"], abs=4)  # type: ignore[attr-defined]
    assert model(torch.randn(2, 3, 96, 96)).shape == (2, 125)
