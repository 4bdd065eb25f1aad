"""Random numbers inside networks: on a CPU those of the plain loop, however they are drawn."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from shoal.utils import randomness
from shoal.utils.randomness import Draw, draw_members

CPU = torch.device("cpu")
MASKS = [
    Draw("dropout", (5, 3), torch.float32, numbers=((0.1,),)),
    Draw("dropout", (4, 3, 2), torch.float32, (3, 1, 12), ((0.1,),)),
    Draw("bernoulli", (7,), torch.float32, (1,), ((0.3,),)),
    Draw("dropout", (2, 33), torch.float32, (33, 1), ((0.6,),)),
]
UNLIKE = [
    Draw("dropout", (5, 3), torch.float64, numbers=((0.1,), (0.0,), (0.7,))),
    Draw("dropout", (3, 9), torch.float64, (1, 3), ((0.1,), (0.4,), (1.0,))),
    Draw("bernoulli", (6,), torch.float64, numbers=((0.3,), (1.0,), (0.0,))),
]
MIXED = [*MASKS, Draw("normal", (20,), torch.float32, numbers=((0.0, 1.0),)), *MASKS]


def generators() -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in (1, 2, 3)]


@pytest.mark.parametrize("draws", [MASKS, UNLIKE, MIXED, [], [*MASKS, *UNLIKE]])
def test_masks_drawn_at_once_are_those_drawn_one_by_one(draws: list[Draw], monkeypatch: pytest.MonkeyPatch) -> None:
    ours, plain = generators(), generators()
    found = [draw_members(draws, ours, CPU) for _ in range(2)]
    monkeypatch.setattr(randomness, "_coins_are_comparisons", lambda: False)
    wanted = [draw_members(draws, plain, CPU) for _ in range(2)]
    for step, same in zip(found, wanted, strict=True):
        assert len(step) == len(draws)
        for value, other, draw in zip(step, same, draws, strict=True):
            assert torch.equal(value, other) and value.dtype == draw.dtype and value.shape == (3, *draw.shape)
    assert all(torch.equal(a.get_state(), b.get_state()) for a, b in zip(ours, plain, strict=True))


def test_masks_are_those_of_torch() -> None:
    x = torch.ones(4, 3, 2).permute(0, 2, 1)
    draw = Draw("dropout", tuple(x.shape), x.dtype, tuple(torch.empty_like(x).stride()), ((0.4,),))
    found = draw_members([draw, draw], generators(), CPU)
    for member, seed in enumerate((1, 2, 3)):
        torch.manual_seed(seed)
        assert all(torch.equal(F.dropout(x, 0.4), mask[member]) for mask in found)
