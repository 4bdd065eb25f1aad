"""Random draws that are a function of seed, batch, call and element."""

from __future__ import annotations

import pytest
import torch

from shoal.engine.tiers.captured._step import StepDraws
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


def test_the_draws_of_a_step_are_those_of_each_call() -> None:
    drawn = StepDraws(DRAWS, 3, torch.device("cpu")).of(SEEDS, COUNTS)
    for index, (draw, numbers) in enumerate(zip(DRAWS, site_numbers(DRAWS, 3), strict=True)):
        alone = counter_draw(draw, SEEDS, COUNTS, torch.tensor(numbers))
        assert torch.equal(drawn(index), alone) and drawn(index).dtype == alone.dtype == draw.dtype


def test_masks_have_the_share_and_the_scale_of_their_rate() -> None:
    draw = Draw("dropout", (100_000,), torch.float32, numbers=((0.1,), (0.0,), (1.0,)))
    tenth, all_there, nothing = counter_draw(draw, SEEDS, COUNTS, torch.zeros(3, dtype=torch.int64))
    assert set(tenth.unique().tolist()) == {0.0, torch.tensor(1 / 0.9).item()}
    assert abs((tenth == 0).float().mean().item() - 0.1) < 0.005
    assert all_there.eq(1).all() and nothing.eq(0).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_kernel_draws_what_the_tensor_operators_draw(dtype: torch.dtype) -> None:
    draw = Draw("dropout", (3, 1025), dtype, numbers=((0.1,), (0.0,), (1.0,)))
    sites = torch.tensor([0, 7, 2**20])
    expected = counter_draw(draw, SEEDS, COUNTS, sites)
    drawn = counter_draw(draw, SEEDS.cuda(), COUNTS.cuda(), sites.cuda())
    assert drawn.dtype == dtype and torch.equal(drawn.cpu(), expected)


def test_a_step_that_draws_nothing() -> None:
    StepDraws([], 2, torch.device("cpu")).of(SEEDS[:2], COUNTS[:2])
