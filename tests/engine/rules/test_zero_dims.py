"""Tensors without dimensions: with a member axis they must mean what they mean alone, in every operator that takes one.

Alone such a tensor takes hardly any part in type promotion, may stand where only a number may stand, and may be a mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.engine.equality import assert_as_alone, numbers, whole
from tests.engine.rules.stacking import assert_stacks
from torch import Tensor, nn

import shoal

H = numbers(1, 5, 3)
HALF_AS_WIDE = H.float()
ZERO, POSITIVE = numbers(2), numbers(2).abs() + 1
FLAG = torch.tensor(True)
COUNT = torch.tensor(3)
WHOLE = whole(3, 9, 5, 3)


def _set(x: Tensor, where: Any, value: Tensor) -> Tensor:
    x = x.clone()
    x[where] = value
    return x


Case = tuple[Callable[..., Any], list[Tensor], str]

CASES: dict[str, Case] = {
    "where, mask": (lambda h, m: torch.where(m, h, h.detach()), [H, FLAG], "pb"),
    "where, compared": (lambda h, t: torch.where(t > 0, h, h.detach()), [HALF_AS_WIDE, ZERO], "pb"),
    "where, value": (lambda h, t: torch.where(h > 0, h, t), [HALF_AS_WIDE, ZERO], "pb"),
    "where, nothing has dimensions": (torch.where, [FLAG, ZERO.float(), ZERO], "bpx"),
    "masked_fill, mask": (lambda h, m: h.masked_fill(m, 0.0), [H, FLAG], "pb"),
    "masked_fill_, mask": (lambda h, m: (h * 1).masked_fill_(m, 0.0), [H, FLAG], "pb"),
    "masked_fill, mask on the batch": (lambda h, m, x: x.masked_fill(m, 0.0) * h, [H, FLAG, H], "pbx"),
    "masked_fill, value": (lambda h, t: h.masked_fill(h > 0, t), [H, ZERO], "pp"),
    "masked_fill_, value": (lambda h, t: (h * 1).masked_fill_(h > 0, t), [H, ZERO], "pb"),
    "masked_scatter": (lambda h, m, s: h.masked_scatter(m, s), [H, FLAG, numbers(4, 15)], "pbp"),
    "fill": (lambda h, t: torch.fill(h, t) + h, [H, ZERO], "pp"),
    "fill_": (lambda h, t: (h * 1).fill_(t) + h, [H, ZERO], "pb"),
    "copy_": (lambda h, t: (h * 1).copy_(t) + h, [HALF_AS_WIDE, ZERO], "pb"),
    "clamp": (lambda h, a, b: h.clamp(a, b), [H, ZERO - 1, POSITIVE], "pbb"),
    "clamp, other dtypes": (lambda h, a, b: h.clamp(a, b), [HALF_AS_WIDE, ZERO - 1, POSITIVE], "pbp"),
    "clamp_min": (lambda h, a: h.clamp(min=a), [H, ZERO], "pp"),
    "lerp": (torch.lerp, [H, H * 2, POSITIVE], "ppb"),
    "lerp, end and weight": (torch.lerp, [H, ZERO, POSITIVE], "ppb"),
    "lerp_": (lambda h, a, b: (h * 1).lerp_(a, b), [H, H * 2, POSITIVE], "ppb"),
    "addcmul": (lambda h, a, b: torch.addcmul(h, a, b, value=2.0), [H, H * 2, POSITIVE], "ppb"),
    "addcmul, wide second": (torch.addcmul, [ZERO, H, POSITIVE], "ppb"),
    "addcdiv": (torch.addcdiv, [H, ZERO, POSITIVE], "ppp"),
    "mul, whole number": (torch.mul, [HALF_AS_WIDE, COUNT], "pb"),
    "mul, more digits": (torch.mul, [HALF_AS_WIDE, ZERO], "pp"),
    "mul, half precision": (torch.mul, [H.bfloat16(), ZERO], "pb"),
    "mul, fractions of whole numbers": (lambda h, t, x: (x * t) * h, [HALF_AS_WIDE, ZERO, WHOLE], "pbx"),
    "mul, nothing has dimensions": (torch.mul, [ZERO.float(), ZERO], "px"),
    "mul, a constant without dimensions": (
        lambda t, h: t * torch.tensor(2.5, dtype=torch.float64) + h * torch.tensor(2.5, dtype=torch.float64),
        [ZERO.float(), HALF_AS_WIDE], "pp"
    ),
    "add_, more digits": (lambda h, t: (h * 1).add_(t, alpha=3), [HALF_AS_WIDE, ZERO], "pb"),
    "comparison": (lambda h, t: (h > t) * h, [HALF_AS_WIDE, HALF_AS_WIDE[0, 0].double() + 1e-9], "pb"),
    "logical_or": (lambda h, t: torch.logical_or(h > 0, t) * h, [H, FLAG], "pb"),
    "bitwise and": (lambda h, t: ((h > 0) & t) * h, [H, FLAG], "pb"),
    "pow": (lambda h, t: h.abs() ** t, [H, COUNT], "pb"),
    "pow, base": (lambda h, t: t**h, [H, POSITIVE], "pp"),
    "float_power": (lambda h, t: torch.float_power(h.abs(), t), [HALF_AS_WIDE, POSITIVE], "pb"),
    "atan2": (torch.atan2, [HALF_AS_WIDE, POSITIVE], "pb"),
    "maximum": (torch.maximum, [HALF_AS_WIDE, ZERO], "pp"),
    "remainder": (torch.remainder, [HALF_AS_WIDE, POSITIVE], "pb"),
    "div, rounded": (lambda h, t, x: torch.div(x, t, rounding_mode="floor") * h, [H, COUNT, WHOLE], "pbx"),
    "index_select": (lambda h, t: torch.index_select(h, 0, t), [H, COUNT], "pb"),
    "index_put": (lambda h, t, v: h.index_put((t,), v), [H, COUNT, ZERO], "pbp"),
    "set by a mask": (lambda h, v: _set(h, h > 0, v), [H, ZERO], "pp"),
    "gather from one number": (lambda t, i: torch.gather(t, 0, i * 0), [ZERO, COUNT], "pb"),
    "index_fill": (lambda h, i, v: h.index_fill(0, i, v), [H, whole(5, 5, 2), ZERO], "pbp"),
    "index_fill of the batch": (lambda x, i, v: x.index_fill(0, i, v), [H, whole(5, 5, 2), ZERO], "xxp"),
    "embedding": (lambda h, i: F.embedding(i, h), [H, COUNT], "pb"),
    "one_hot": (lambda h, i: F.one_hot(i, 5) * h[:, 0], [H, COUNT], "pb"),
    "stack and cat": (lambda h, t: torch.cat([torch.stack([t, t * 2]), h[0]]), [H, ZERO], "pp"),
    "views": (lambda h, t: t.view(1) * h + t.expand(3) + t.repeat(3) + t.reshape(1, 1) + t.squeeze(), [H, ZERO], "pp"),
    "reductions": (lambda h, t: t.sum() + t.mean() + t.max() + t.softmax(0) + h.sum(), [H, ZERO], "pp"),
    "losses": (lambda h, t: F.mse_loss(h.sum(), t) + F.smooth_l1_loss(t, h.mean()), [H, ZERO], "pp"),
    "pos_weight": (
        lambda h, t: F.binary_cross_entropy_with_logits(h, (h > 0).double(), pos_weight=t), [H, POSITIVE], "pb"
    ),
    "prelu": (F.prelu, [H, ZERO], "pp"),
    "counted in place": (lambda h, t: h * t.add_(h.detach().sum()), [H, ZERO], "pb"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_as_alone(name: str) -> None:
    function, tensors, kinds = CASES[name]
    narrow = any(t.dtype in (torch.float32, torch.bfloat16) for t in tensors)
    for shared in (True, False) if "x" in kinds else (True,):
        assert_stacks(function, tensors, kinds, shared=shared, tolerance=1e-6 if narrow else 1e-9)


class WarmUp(nn.Module):
    """Trains from its sixth batch on."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(8, 1, dtype=torch.float64), how
        self.register_buffer("batches", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.batches += 1
        out: Tensor = self.layer(x)
        if self.how == "where":
            return torch.where(self.batches > 5, out, out.detach())
        return out.masked_fill(self.batches <= 5, 0.0)


@pytest.mark.parametrize("how", ["where", "masked_fill"])
def test_training_that_starts_late(how: str) -> None:
    x, y = numbers(6, 20, 8), numbers(7, 20, 1)
    assert_as_alone(
        [
            shoal.Job(model=lambda: WarmUp(how), data=(x, y), loss=F.mse_loss, epochs=4, batch_size=8, seed=seed)
            for seed in range(2)
        ]
    )
