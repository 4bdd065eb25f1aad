"""ASGD (averaged SGD) and Rprop, whose first step stores the learning rate in their state."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shoal.engine.optim.rule import Column, Rule, State, lerp_, power, scalar_dtype


class ASGD(Rule):
    """torch.optim.ASGD. `eta` and `mu` have torch's scalar dtype, since their rounding is part of the result.

    The average is computed with `lerp_`, which is an exact copy at weight one, as in torch's branch on mu.
    """

    torch_class = torch.optim.ASGD
    columns = ("lr", "lambd", "alpha", "t0", "weight_decay")
    optional = ("weight_decay",)
    clock = ("step", "eta", "mu")
    per_element = ("ax",)
    added = ("weight_decay", "neg_eta")

    def init_clock(self, size: int, device: torch.device) -> State:
        ones = torch.ones(size, dtype=scalar_dtype(), device=device)
        return {**super().init_clock(size, device), "eta": torch.zeros_like(ones), "mu": ones}

    def tick_(self, clock: Mapping[str, Tensor], h: Column, dtype: torch.dtype) -> State:
        step, eta, mu = clock["step"].add_(1), clock["eta"], clock["mu"]
        current_eta = torch.where(step == 1, h["lr"].to(eta.dtype), eta).to(step.dtype)
        c = {
            "weight_decay": h["weight_decay"].to(dtype),
            "shrink": (1 - h["lambd"] * current_eta).to(dtype),
            "neg_eta": current_eta.neg().to(dtype),
            "mu": mu.to(dtype, copy=True),
        }
        eta.copy_(h["lr"] / power(1 + h["lambd"] * h["lr"] * step, h["alpha"]))
        mu.copy_(1 / (step - h["t0"]).clamp(min=1))
        return c

    def apply_(self, param: Tensor, grad: Tensor, state: Mapping[str, Tensor], c: Column) -> None:
        grad = self.decayed(param, grad, c)
        param.mul_(c["shrink"]).addcmul_(grad, c["neg_eta"])
        lerp_(state["ax"], param, c["mu"])


class Rprop(Rule):
    """torch.optim.Rprop. The learning rate is only the initial step size of every element."""

    torch_class = torch.optim.Rprop
    columns = ("lr", "etaminus", "etaplus", "step_size_min", "step_size_max")
    per_element = ("prev", "step_size")

    def tick_(self, clock: Mapping[str, Tensor], h: Column, dtype: torch.dtype) -> State:
        step = clock["step"].add_(1)
        return {"first": step == 1, **{name: h[name].to(dtype) for name in self.columns}}

    def apply_(self, param: Tensor, grad: Tensor, state: Mapping[str, Tensor], c: Column) -> None:
        grad = self.signed(grad)
        previous, size = state["prev"], state["step_size"]
        direction = grad * previous
        shrinking = direction < 0
        one = torch.ones_like(c["etaplus"])
        factor = torch.where(direction > 0, c["etaplus"], torch.where(shrinking, c["etaminus"], one))
        size.copy_(torch.where(c["first"], c["lr"].to(size.dtype), size))
        size.mul_(factor).clamp_(c["step_size_min"].to(size.dtype), c["step_size_max"].to(size.dtype))
        previous.copy_(grad).masked_fill_(shrinking, 0)
        param.addcmul_(previous.sign(), size, value=-1)
