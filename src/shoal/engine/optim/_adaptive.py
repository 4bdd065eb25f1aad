"""The rules for Adagrad, RMSprop and Adadelta, which derive step sizes per element from squared gradients."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shoal.engine.optim.rule import Column, Rule, State, lerp_, scalar_dtype


class Adagrad(Rule):
    """torch.optim.Adagrad. Each member's sum starts at its own value, so `init` needs the columns."""

    torch_class = torch.optim.Adagrad
    columns = ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps")
    optional = ("initial_accumulator_value", "weight_decay")
    per_element = ("sum",)

    def init(self, param: Tensor, h: Column | None = None, *, clock: Mapping[str, Tensor] | None = None) -> State:
        state = super().init(param, h, clock=clock)
        if "initial_accumulator_value" in self.flags:
            if h is None:
                raise ValueError("Adagrad starts its sum at initial_accumulator_value: pass the columns to init")
            total = torch.view_as_real(state["sum"]) if param.is_complex() else state["sum"]
            start = h["initial_accumulator_value"].to(total.dtype)
            total.copy_(start.view(-1, *[1] * (total.ndim - 1)).expand_as(total))
        return state

    def fresh_entry(self, param: Tensor, h: Mapping[str, float]) -> State:
        """Return the state that torch creates when the optimizer is built."""
        start = h["initial_accumulator_value"]
        value = complex(start, start) if param.is_complex() else start
        total = torch.full(param.shape, value, dtype=param.dtype)
        return {"step": torch.tensor(0.0, dtype=scalar_dtype()), "sum": total}

    def tick_(self, clock: Mapping[str, Tensor], h: Column, dtype: torch.dtype) -> State:
        step = clock["step"].add_(1)
        return {
            "weight_decay": h["weight_decay"].to(dtype),
            "eps": h["eps"].to(dtype),
            "neg_lr": (h["lr"] / (1 + (step - 1) * h["lr_decay"])).neg().to(dtype),
        }

    def apply_(self, param: Tensor, grad: Tensor, state: Mapping[str, Tensor], c: Column) -> None:
        grad = self.decayed(param, grad, c)
        total = state["sum"].addcmul_(grad, grad)
        scratch = total.sqrt().add_(c["eps"])
        torch.div(grad, scratch, out=scratch)
        param.addcmul_(scratch, c["neg_lr"])


class RMSprop(Rule):
    """torch.optim.RMSprop. A member without momentum in a rule with momentum has a buffer that is overwritten at each
    step."""

    torch_class = torch.optim.RMSprop
    columns = ("lr", "alpha", "eps", "weight_decay", "momentum")
    structural = ("centered", "maximize")
    optional = ("momentum", "weight_decay")

    def buffers(self) -> tuple[str, ...]:
        names: tuple[str, ...] = ("square_avg",)
        names += ("momentum_buffer",) if "momentum" in self.flags else ()
        return names + (("grad_avg",) if "centered" in self.flags else ())

    def tick_(self, clock: Mapping[str, Tensor], h: Column, dtype: torch.dtype) -> State:
        clock["step"].add_(1)
        return {
            "alpha": h["alpha"].to(dtype),
            "take": (1 - h["alpha"]).to(dtype),
            "eps": h["eps"].to(dtype),
            "weight_decay": h["weight_decay"].to(dtype),
            "momentum": h["momentum"].to(dtype),
            "neg_lr": h["lr"].neg().to(dtype),
        }

    def apply_(self, param: Tensor, grad: Tensor, state: Mapping[str, Tensor], c: Column) -> None:
        grad = self.decayed(param, grad, c)
        square = state["square_avg"]
        scratch = (grad * c["take"]).to(grad.dtype)
        square.mul_(c["alpha"]).addcmul_(scratch, grad)
        if "centered" in self.flags:
            mean = state["grad_avg"]
            lerp_(mean, grad, c["take"])
            torch.addcmul(square, mean, mean, value=-1, out=scratch).sqrt_()
        else:
            torch.sqrt(square, out=scratch)
        scratch.add_(c["eps"])
        torch.div(grad, scratch, out=scratch)
        if "momentum" in self.flags:
            scratch = state["momentum_buffer"].mul_(c["momentum"]).add_(scratch)
        param.addcmul_(scratch, c["neg_lr"])

    def torch_entry(self, entry: State, h: Mapping[str, float]) -> State:
        return {name: value for name, value in entry.items() if name != "momentum_buffer" or h["momentum"] > 0}


class Adadelta(Rule):
    """torch.optim.Adadelta."""

    torch_class = torch.optim.Adadelta
    columns = ("lr", "rho", "eps", "weight_decay")
    optional = ("weight_decay",)
    per_element = ("square_avg", "acc_delta")
    added = ("weight_decay", "eps", "neg_lr")

    def tick_(self, clock: Mapping[str, Tensor], h: Column, dtype: torch.dtype) -> State:
        clock["step"].add_(1)
        return {
            "rho": h["rho"].to(dtype),
            "take": (1 - h["rho"]).to(dtype),
            "eps": h["eps"].to(dtype),
            "weight_decay": h["weight_decay"].to(dtype),
            "neg_lr": h["lr"].neg().to(dtype),
        }

    def apply_(self, param: Tensor, grad: Tensor, state: Mapping[str, Tensor], c: Column) -> None:
        grad = self.decayed(param, grad, c)
        square, acc_delta = state["square_avg"], state["acc_delta"]
        scratch = (grad * c["take"]).to(grad.dtype)
        square.mul_(c["rho"]).addcmul_(scratch, grad)
        scratch.copy_(square).add_(c["eps"]).sqrt_()
        delta = acc_delta.clone().add_(c["eps"]).sqrt_().div_(scratch).mul_(grad)
        torch.mul(delta, delta, out=scratch).mul_(c["take"])
        acc_delta.mul_(c["rho"]).add_(scratch)
        param.addcmul_(delta, c["neg_lr"])
