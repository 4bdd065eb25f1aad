"""Torch's fused update for Adam and AdamW on a CPU, whose plain one takes longer than forward and backward of a small
network.

It is the same arithmetic in another order of rounding, as the stacked tier has it (`engine/stack/fused_update.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

DTYPES = (torch.float32, torch.float64)
OTHERS = ("foreach", "fused", "capturable", "differentiable")
"""Settings of a parameter group by which its owner has said how it is updated."""
FLAGS = ("amsgrad", "maximize")
NUMBERS = ("lr", "weight_decay", "eps")


def step_of(optimizer: Optimizer) -> Callable[[], None]:
    """How to take a step of this optimizer, to which nothing has been added yet: its own `step`, fused where that means
    the same.

    Whether it is fused depends on the job alone: on the class, its settings, and its parameters' device and dtype.
    """
    if type(optimizer) not in (Adam, AdamW) or torch.get_default_dtype() is not torch.float32:
        return lambda: _own(optimizer)  # of another default dtype torch counts the fused steps in another dtype
    if "step" in vars(optimizer) or not all(map(_suits, optimizer.param_groups)):
        return lambda: _own(optimizer)
    return FusedStep(optimizer)


def clearing(optimizer: Optimizer) -> Callable[[], None]:
    """How to clear an optimizer's gradients: its own `zero_grad`, without the profiler's mark where it is torch's."""
    if type(optimizer).zero_grad is not Optimizer.zero_grad or "zero_grad" in vars(optimizer):
        return lambda: optimizer.zero_grad()

    def clear() -> None:
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = None

    return clear


def _own(optimizer: Optimizer) -> None:
    optimizer.step()


def _suits(group: dict[str, Any]) -> bool:
    if any(group[name] for name in OTHERS) or any(group[name] is not None for name in ("foreach", "fused")):
        return False
    return all(p.device.type == "cpu" and p.dtype in DTYPES for p in group["params"])


class FusedStep:
    """Calls the kernel at once, or, where there is more to a step than that, by way of `optimizer.step`."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._counts: dict[int, tuple[Tensor, list[Tensor]]] = {}
        """By a group's place: its parameters' counts of steps as one tensor, and each of them as a part of it."""

    def __call__(self) -> None:
        optimizer = self._optimizer
        groups = optimizer.param_groups
        if not all(map(_plain, groups)):  # a schedule may have set them
            optimizer.step()
            return
        columns = [_columns(optimizer, group) for group in groups] if not _hooked(optimizer) else [None]
        if None not in columns:
            with torch.no_grad():
                for place, (group, lists) in enumerate(zip(groups, columns, strict=True)):
                    if lists is not None and lists[0]:
                        self._count(place, *lists)
                        _call(group, *lists)
            optimizer._opt_called = True  # type: ignore[attr-defined]  # what schedules ask for
            return
        for group in groups:
            group["fused"] = True
        try:
            optimizer.step()
        finally:
            for group in groups:
                group["fused"] = None  # as in the user's own

    def _count(self, place: int, params: list[Tensor], *lists: list[Tensor]) -> None:
        """Add one to the counts of steps: all at once, since a call for each takes longer than the update itself."""
        steps = lists[-1]
        whole, parts = self._counts.get(place, (steps[0], []))
        if len(parts) != len(steps) or any(step is not part for step, part in zip(steps, parts, strict=True)):
            whole = torch.stack(steps)
            parts = [whole[row] for row in range(len(steps))]
            for param, part in zip(params, parts, strict=True):
                self._optimizer.state[param]["step"] = part
            steps[:] = parts
            self._counts[place] = whole, parts
        whole += 1


def _plain(group: dict[str, Any]) -> bool:
    """Whether the kernel takes its settings as they are. Tensors take part in torch's plain arithmetic in a dtype of
    their own, and 1 for True is refused."""
    numbers = (*(group[name] for name in NUMBERS), *group["betas"])
    return all(isinstance(x, int | float) for x in numbers) and all(isinstance(group[name], bool) for name in FLAGS)


def _hooked(optimizer: Any) -> bool:
    """Whether something else is to be called before or after a step."""
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(hooks or _global_optimizer_pre_hooks or _global_optimizer_post_hooks)


def _columns(optimizer: Optimizer, group: dict[str, Any]) -> list[list[Any]] | None:
    """Parameters, gradients and states of a group; None where torch has to look at them: at the first step, say."""
    columns: tuple[list[Any], ...] = ([], [], [], [], [], [])
    params, grads, averages, squares, maxima, steps = columns
    known, maximum = optimizer.state, group["amsgrad"]
    for param in group["params"]:
        grad = param.grad
        if grad is None:
            continue
        state = known.get(param)
        if not state or grad.layout is not torch.strided:
            return None
        params.append(param)
        grads.append(grad)
        averages.append(state["exp_avg"])
        squares.append(state["exp_avg_sq"])
        steps.append(state["step"])
        if maximum:
            maxima.append(state["max_exp_avg_sq"])
    return list(columns)


def _call(
    group: dict[str, Any], params: Any, grads: Any, averages: Any, squares: Any, maxima: Any, steps: list[Any]
) -> None:
    kernel: Any = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
    beta1, beta2 = group["betas"]
    kernel(
        params, grads, averages, squares, maxima, steps, amsgrad=group["amsgrad"], lr=group["lr"], beta1=beta1,
        beta2=beta2, weight_decay=group["weight_decay"], eps=group["eps"], maximize=group["maximize"],
    )  # fmt: skip
