"""The rules for Adam, AdamW, NAdam, RAdam and Adamax."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.engine.optim.compile_fence import is_traced
from shoal.engine.optim.rule import Column, Flags, Rule, State, lerp_, power, scalar_dtype

STEPS_AHEAD = 32
"""Steps whose coefficients a CPU computes at once. One by one, their calls would cost as much as the update of a small
network."""


def second_moment_(square: Tensor, grad: Tensor, c: Column) -> Tensor:
    """Compute `square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)`, and return the temporary for reuse.

    `square.lerp_(grad * grad)` would need one pass less, but turns an overflowed square into NaN where torch keeps inf.
    """
    scratch = (grad * c["take2"]).to(grad.dtype)
    square.mul_(c["beta2"]).addcmul_(scratch, grad)
    return scratch


class _Moments(Rule):
    """First and second moment, and weight decay, coupled or decoupled: what all but Adamax share."""

    columns: ClassVar[tuple[str, ...]] = ("lr", "beta1", "beta2", "eps", "weight_decay")
    structural: ClassVar[tuple[str, ...]] = ("maximize", "decoupled_weight_decay")
    optional = ("weight_decay",)
    per_element = ("exp_avg", "exp_avg_sq")

    def __init__(self, flags: Flags) -> None:
        super().__init__(flags)
        self._last: tuple[list[Any], State] | None = None
        """The inputs of the last coefficients, and these coefficients."""

    def moments(self, h: Column, dtype: torch.dtype) -> State:
        """Return the coefficients that do not depend on the step, computed again only if a hyper-parameter was written
        to."""
        if h["lr"].device.type != "cpu" or is_traced():
            return self._moments(h, dtype)
        columns = [h[name] for name in self.columns]
        source = [dtype, *(id(column) for column in columns), *(column._version for column in columns)]
        if self._last is None or self._last[0][: len(source)] != source:
            # kept alive, so that no other tensor gets their ids
            self._last = [*source, columns], self._moments(h, dtype)
        return self._last[1]

    def _moments(self, h: Column, dtype: torch.dtype) -> State:
        c = {
            "take1": (1 - h["beta1"]).to(dtype),
            "beta2": h["beta2"].to(dtype),
            "take2": (1 - h["beta2"]).to(dtype),
            "eps": h["eps"].to(dtype),
        }
        if "weight_decay" in self.flags:
            if "decoupled_weight_decay" in self.flags:
                c["shrink"] = (1 - h["lr"] * h["weight_decay"]).to(dtype)
            else:
                c["weight_decay"] = h["weight_decay"].to(dtype)
        return c

    def decayed(self, param: Tensor, grad: Tensor, c: Column) -> Tensor:
        if "weight_decay" in self.flags and "decoupled_weight_decay" in self.flags:
            param.mul_(c["shrink"])
            return self.signed(grad)
        return super().decayed(param, grad, c)


@dataclass(slots=True)
class _Ahead:
    """Coefficients of the coming steps, valid until something else writes to the clock or the hyper-parameters."""

    step: Tensor
    moments: State
    """The coefficients of `moments`; another dict after a hyper-parameter was written to."""
    coming: list[State]
    """Coefficients of the coming steps, the next one last."""
    version: int = -1
    """The clock's tensor version after the last step that used these."""

    def follows(self, step: Tensor, moments: State) -> bool:
        """Return whether the coefficients are valid for the next step."""
        return self.step is step and self.version == step._version and self.moments is moments


class Adam(_Moments):
    """torch.optim.Adam."""

    torch_class: ClassVar[type[Optimizer]] = torch.optim.Adam
    structural = ("amsgrad", "decoupled_weight_decay", "maximize")

    def buffers(self) -> tuple[str, ...]:
        return (*self.per_element, *(("max_exp_avg_sq",) if "amsgrad" in self.flags else ()))

    def __init__(self, flags: Flags) -> None:
        super().__init__(flags)
        self._ahead: _Ahead | None = None

    def tick_(self, clock: Mapping[str, Tensor], h: Column, dtype: torch.dtype) -> State:
        moments, step = self.moments(h, dtype), clock["step"]
        if self._last is None or self._last[1] is not moments:  # on a GPU, or traced
            return moments | self._corrections(step.add_(1), h, dtype)
        ahead = self._ahead
        valid = ahead is not None and ahead.follows(step, moments)
        if ahead is None or not valid or not ahead.coming:
            steps = step + torch.arange(STEPS_AHEAD if valid else 1, 0, -1, dtype=step.dtype).unsqueeze(1)
            table = self._corrections(steps, h, dtype)
            rows = zip(*(values.unbind() for values in table.values()), strict=True)
            ahead = self._ahead = _Ahead(step, moments, [dict(zip(table, row, strict=True)) for row in rows])
        ahead.version = step.add_(1)._version
        return moments | ahead.coming.pop()

    def _corrections(self, step: Tensor, h: Column, dtype: torch.dtype) -> State:
        """Return the coefficients of these steps, [M] or [steps, M]."""
        betas = torch.stack([h["beta1"], h["beta2"]])
        correction1, correction2 = (1 - power(betas if step.dim() == 1 else betas.unsqueeze(1), step)).unbind()
        return {
            "neg_step_size": (h["lr"] / correction1).neg().to(dtype),
            "root2": correction2.sqrt().to(dtype),
        }

    def apply_(self, param: Tensor, grad: Tensor, state: Mapping[str, Tensor], c: Column) -> None:
        grad = self.decayed(param, grad, c)
        exp_avg, square = state["exp_avg"], state["exp_avg_sq"]
        lerp_(exp_avg, grad, c["take1"])
        scratch = second_moment_(square, grad, c)
        if "amsgrad" in self.flags:
            square = torch.maximum(state["max_exp_avg_sq"], square, out=state["max_exp_avg_sq"])
        torch.sqrt(square, out=scratch).div_(c["root2"]).add_(c["eps"])
        torch.div(exp_avg, scratch, out=scratch)
        param.addcmul_(scratch, c["neg_step_size"])


class AdamW(Adam):
    """torch.optim.AdamW: Adam whose weight decay is decoupled by default."""

    torch_class = torch.optim.AdamW


class NAdam(_Moments):
    """torch.optim.NAdam. `mu_product` has torch's scalar dtype, since its rounding is part of the result."""

    torch_class = torch.optim.NAdam
    columns = ("lr", "beta1", "beta2", "eps", "weight_decay", "momentum_decay")
    clock = ("step", "mu_product")

    def init_clock(self, size: int, device: torch.device) -> State:
        return {**super().init_clock(size, device), "mu_product": torch.ones(size, dtype=scalar_dtype(), device=device)}

    def tick_(self, clock: Mapping[str, Tensor], h: Column, dtype: torch.dtype) -> State:
        step = clock["step"].add_(1)
        product = clock["mu_product"]
        mu = h["beta1"] * (1.0 - 0.5 * power(0.96, step * h["momentum_decay"]))
        mu_next = h["beta1"] * (1.0 - 0.5 * power(0.96, (step + 1) * h["momentum_decay"]))
        product.mul_(mu.to(product.dtype))
        mu_product = product.to(step.dtype)
        return {
            **self.moments(h, dtype),
            "correction2": (1 - power(h["beta2"], step)).to(dtype),
            "of_grad": (-h["lr"] * (1.0 - mu) / (1.0 - mu_product)).to(dtype),
            "of_average": (-h["lr"] * mu_next / (1.0 - mu_product * mu_next)).to(dtype),
        }

    def apply_(self, param: Tensor, grad: Tensor, state: Mapping[str, Tensor], c: Column) -> None:
        grad = self.decayed(param, grad, c)
        exp_avg, square = state["exp_avg"], state["exp_avg_sq"]
        lerp_(exp_avg, grad, c["take1"])
        scratch = second_moment_(square, grad, c)
        scratch.copy_(square).div_(c["correction2"]).sqrt_().add_(c["eps"])
        move = (grad * c["of_grad"]).addcmul_(exp_avg, c["of_average"])
        param.addcdiv_(move, scratch)


class RAdam(_Moments):
    """torch.optim.RAdam. The denominator is one for members in the phase without rectification."""

    torch_class = torch.optim.RAdam

    def tick_(self, clock: Mapping[str, Tensor], h: Column, dtype: torch.dtype) -> State:
        step = clock["step"].add_(1)
        power2 = power(h["beta2"], step)
        correction1, correction2 = 1 - power(h["beta1"], step), 1 - power2
        limit = 2 / (1 - h["beta2"]) - 1
        length = limit - 2 * step * power2 / correction2
        rectified = length > 5.0
        rectifier = ((length - 4) * (length - 2) * limit / ((limit - 4) * (limit - 2) * length)).sqrt()
        factor = torch.where(rectified, rectifier * correction2.sqrt(), 1.0)
        return {
            **self.moments(h, dtype),
            "rectified": rectified,
            "neg_step_size": (h["lr"] / correction1 * factor).neg().to(dtype),
        }

    def apply_(self, param: Tensor, grad: Tensor, state: Mapping[str, Tensor], c: Column) -> None:
        grad = self.decayed(param, grad, c)
        exp_avg, square = state["exp_avg"], state["exp_avg_sq"]
        lerp_(exp_avg, grad, c["take1"])
        scratch = second_moment_(square, grad, c)
        torch.sqrt(square, out=scratch).add_(c["eps"]).masked_fill_(c["rectified"].logical_not(), 1.0)
        torch.div(exp_avg, scratch, out=scratch)
        param.addcmul_(scratch, c["neg_step_size"])


class Adamax(Rule):
    """torch.optim.Adamax."""

    torch_class = torch.optim.Adamax
    columns = ("lr", "beta1", "beta2", "eps", "weight_decay")
    optional = ("weight_decay",)
    per_element = ("exp_avg", "exp_inf")

    def tick_(self, clock: Mapping[str, Tensor], h: Column, dtype: torch.dtype) -> State:
        step = clock["step"].add_(1)
        return {
            "take1": (1 - h["beta1"]).to(dtype),
            "beta2": h["beta2"].to(dtype),
            "eps": h["eps"].to(dtype),
            "weight_decay": h["weight_decay"].to(dtype),
            "neg_step_size": (h["lr"] / (1 - power(h["beta1"], step))).neg().to(dtype),
        }

    def apply_(self, param: Tensor, grad: Tensor, state: Mapping[str, Tensor], c: Column) -> None:
        grad = self.decayed(param, grad, c)
        exp_avg, largest = state["exp_avg"], state["exp_inf"]
        lerp_(exp_avg, grad, c["take1"])
        scratch = grad.abs().add_(c["eps"])
        torch.maximum(largest.mul_(c["beta2"]), scratch, out=largest)
        torch.div(exp_avg, largest, out=scratch)
        param.addcmul_(scratch, c["neg_step_size"])
