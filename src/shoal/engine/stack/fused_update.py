"""Adam on a CPU with torch's fused kernel, one member at a time.

Larger networks are faster this way: one pass over a member's weights stays in the cache, where ten passes over the
weights of all members do not. Tiny networks use the rule instead, since the calls would cost more than the arithmetic.
The choice depends only on the shapes of one member, so that its bits do not depend on the pack.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.engine.optim.rule import Rule

LEAST_ELEMENTS = 1 << 14
LEAST_MEAN = 1 << 11
"""The fused kernel is used from so many elements of a member, in all and per parameter on average."""


def suits(kind: type[torch.optim.Optimizer], params: Sequence[Tensor]) -> bool:
    """Return whether the fused kernel is the faster way to update parameters [M, ...] of one group."""
    if kind not in (torch.optim.Adam, torch.optim.AdamW) or not params:
        return False
    first = params[0]
    if any(p.device.type != "cpu" or p.dtype != first.dtype or not p.is_contiguous() for p in params):
        return False
    if first.dtype not in (torch.float32, torch.float64):
        return False
    elements = sum(math.prod(p.shape[1:]) for p in params)
    return elements >= LEAST_ELEMENTS and elements >= LEAST_MEAN * len(params)


class FusedAdam:
    """Updates one parameter group with the fused kernel. It holds each member's slices of parameters and state."""

    def __init__(self, rule: Rule, params: Sequence[Tensor], states: Sequence[Mapping[str, Tensor]]) -> None:
        self.flags = rule.flags
        self.kernel: Any = torch._fused_adamw_ if "decoupled_weight_decay" in rule.flags else torch._fused_adam_
        self.clocks = list({id(state["step"]): state["step"] for state in states}.values())
        self.steps = torch.zeros(params[0].shape[0], dtype=torch.float32)
        self._params = _slices(params)
        self._first = _slices([state["exp_avg"] for state in states])
        self._second = _slices([state["exp_avg_sq"] for state in states])
        amsgrad = "amsgrad" in rule.flags
        self._most = _slices([state["max_exp_avg_sq"] for state in states]) if amsgrad else [()] * len(self._params)
        self._steps = [(step,) * len(params) for step in self.steps.unbind(0)]
        self._numbers: tuple[Tensor, list[dict[str, float]]] | None = None

    @torch.no_grad()
    def update(self, grads: Sequence[Tensor], h: Mapping[str, Tensor], active: Tensor | None) -> None:
        """Take one optimizer step. Members outside `active` are left unchanged, bit for bit."""
        moving = range(len(self._params)) if active is None else active.nonzero().flatten().tolist()
        for clock in self.clocks:
            clock.add_(1.0 if active is None else active)
        self.steps.copy_(self.clocks[0])
        numbers = self._rows(h)
        slices = _slices([grad.contiguous() for grad in grads])
        for m in moving:
            self.kernel(
                self._params[m], slices[m], self._first[m], self._second[m], self._most[m], self._steps[m],
                amsgrad="amsgrad" in self.flags, maximize="maximize" in self.flags, **numbers[m],
            )  # fmt: skip

    def _rows(self, h: Mapping[str, Tensor]) -> list[dict[str, float]]:
        """Return each member's hyper-parameters as Python numbers, read again only if they have changed."""
        names = ("lr", "beta1", "beta2", "eps", "weight_decay")
        columns = torch.stack([h[name] for name in names])
        if self._numbers is None or not torch.equal(self._numbers[0], columns):
            self._numbers = (columns, [dict(zip(names, row, strict=True)) for row in columns.T.tolist()])
        return self._numbers[1]


def _slices(tensors: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """Split [M, ...] tensors into one tuple of slices per member."""
    return list(zip(*(tensor.unbind(0) for tensor in tensors), strict=True))
