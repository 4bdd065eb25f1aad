"""Masks that are drawn together are those that are drawn one by one."""

from __future__ import annotations

import pytest
import torch

from shoal.engine.tiers.captured import _random_masks
from shoal.engine.tiers.captured._random_masks import Noise
from shoal.utils.randomness import Draw, counter_draw, site_numbers

SEEDS, COUNTS = torch.tensor([3, -1, 2**40 + 7]), torch.tensor([0, 5, 2**33])
DRAWS = [
    Draw("dropout", (4, 3), torch.float32, numbers=((0.1,), (0.0,), (1.0,))),
    Draw("uniform", (5,), torch.float32, numbers=((0.0, 1.0),)),
    Draw("bernoulli", (2, 2, 2), torch.float32, numbers=((0.3,),)),
    Draw("dropout", (7,), torch.float64, numbers=((0.5,),)),
    Draw("dropout", (1,), torch.float32, numbers=((0.25,),)),
    Draw("normal", (3,), torch.float32, numbers=((0.0, 1.0),)),
]


@pytest.mark.parametrize("most", [1 << 22, 40, 0])
def test_drawn_together_or_one_by_one(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_random_masks, "MOST_TOGETHER", most)
    found = Noise(DRAWS, 3, torch.device("cpu"))
    assert found._masks == {1 << 22: [0, 2, 4], 40: [0, 4], 0: []}[most]
    drawn = found.of(SEEDS, COUNTS)
    for index, (draw, numbers) in enumerate(zip(DRAWS, site_numbers(DRAWS, 3), strict=True)):
        alone = counter_draw(draw, SEEDS, COUNTS, torch.tensor(numbers))
        assert torch.equal(drawn(index), alone) and drawn(index).dtype == alone.dtype == draw.dtype


def test_a_step_that_draws_nothing() -> None:
    Noise([], 2, torch.device("cpu")).of(SEEDS[:2], COUNTS[:2])
