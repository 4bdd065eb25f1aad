"""Adam on a CPU through torch's fused kernel, a member at a time.

For a network of some size one pass over a member's weights beats ten passes over all members': the member stays in the
cache. For tiny networks the calls would cost more than the arithmetic, so they keep the rule. Which of the two is a
matter of the member's own shapes alone: the bits must not depend on the pack.
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
"""A member's elements, in all and in the mean parameter, from which the fused kernel wins."""


def suits(kind: type[torch.optim.Optimizer], params: Sequence[Tensor]) -> bool:
    """Whether parameters [M, ...] of one group are better stepped member by member."""
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
    """The members' slices of one group's parameters and state, ready for the kernel."""

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
        """One step; members outside `active` keep every bit they have."""
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
        """The members' numbers as Python's; asked for again only after they have changed."""
        names = ("lr", "beta1", "beta2", "eps", "weight_decay")
        now = torch.stack([h[name] for name in names])
        if self._numbers is None or not torch.equal(self._numbers[0], now):
            self._numbers = (now, [dict(zip(names, row, strict=True)) for row in now.T.tolist()])
        return self._numbers[1]


def _slices(tensors: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """[M, ...] tensors as one tuple of slices per member."""
    return list(zip(*(tensor.unbind(0) for tensor in tensors), strict=True))
