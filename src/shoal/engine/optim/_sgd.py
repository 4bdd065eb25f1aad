"""The rule for SGD, with momentum, dampening and Nesterov momentum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.engine.optim.rule import Column, Rule, State


class SGD(Rule):
    """torch.optim.SGD.

    `started` marks members whose momentum buffer exists. Torch fills the buffer with the first gradient, undamped, so
    the first step has the factors 0 and 1 instead of momentum and 1 - dampening. Each member has its own mark, because
    members join at different times. A member with momentum 0 in a rule with momentum always has the factors 0 and 1.
    The one case that is not reproduced is a schedule that returns a nonzero momentum to exactly 0.
    """

    torch_class = torch.optim.SGD
    columns = ("lr", "momentum", "dampening", "weight_decay")
    structural = ("maximize", "nesterov")
    optional = ("momentum", "weight_decay")
    clock = ("step", "started")
    added = ("weight_decay", "take", "momentum", "neg_lr")

    def buffers(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if "momentum" in self.flags else ()

    def init_clock(self, size: int, device: torch.device) -> State:
        return {**super().init_clock(size, device), "started": torch.zeros(size, dtype=torch.bool, device=device)}

    def tick_(self, clock: Mapping[str, Tensor], h: Column, dtype: torch.dtype) -> State:
        clock["step"].add_(1)
        c = {"neg_lr": h["lr"].neg().to(dtype)}
        if "weight_decay" in self.flags:
            c["weight_decay"] = h["weight_decay"].to(dtype)
        if "momentum" in self.flags:
            has_momentum = h["momentum"] != 0
            has_buffer = clock["started"] & has_momentum
            c["keep"] = torch.where(has_buffer, h["momentum"], 0.0).to(dtype)
            c["take"] = torch.where(has_buffer, 1 - h["dampening"], 1.0).to(dtype)
            c["momentum"] = h["momentum"].to(dtype)
            clock["started"].logical_or_(has_momentum)
        return c

    def apply_(self, param: Tensor, grad: Tensor, state: Mapping[str, Tensor], c: Column) -> None:
        grad = self.decayed(param, grad, c)
        if "momentum" in self.flags:
            buffer = state["momentum_buffer"]
            buffer.mul_(c["keep"]).addcmul_(grad, c["take"])
            nesterov = "nesterov" in self.flags
            grad = torch.addcmul(grad, buffer, c["momentum"]).to(grad.dtype) if nesterov else buffer
        param.addcmul_(grad, c["neg_lr"])

    def torch_entry(self, entry: State, h: Mapping[str, float]) -> State:
        return {"momentum_buffer": entry["momentum_buffer"]} if bool(entry.get("started", False)) else {}

    def from_entry(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        started = entry.get("momentum_buffer") is not None
        return {"step": float(started), "started": started, **{k: v for k, v in entry.items() if v is not None}}
