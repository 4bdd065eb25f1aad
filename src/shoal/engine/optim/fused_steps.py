"""Torch's fused Adam and AdamW update, for a member that trains alone.

For a small network, torch's plain update takes longer than forward and backward, and on a GPU it is a dozen launches.
The fused one is the same arithmetic in another order of rounding, as in the stacked tier
(`engine/stack/fused_update.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from shoal.engine.python_state.saved_state import step_hooks

DTYPES = (torch.float32, torch.float64)
OTHERS = ("foreach", "fused", "capturable", "differentiable")
"""Settings of a parameter group with which its user has chosen how it is updated."""
FLAGS = ("amsgrad", "maximize")
NUMBERS = ("lr", "weight_decay", "eps")


def step_of(optimizer: Optimizer) -> Callable[[], None]:
    """Return a function that takes a step of this optimizer: its `step`, fused if that means the same.

    Call it before anything is added to the optimizer. Whether the step is fused depends on the job alone: on the class,
    its settings, and its parameters' device and dtype.
    """
    if type(optimizer) not in (Adam, AdamW) or torch.get_default_dtype() is not torch.float32:
        # with another default dtype, torch's fused step counter has another dtype
        return lambda: _plain_step(optimizer)
    if "step" in vars(optimizer) or not all(map(_suits, optimizer.param_groups)):
        return lambda: _plain_step(optimizer)
    return FusedStep(optimizer)


def clearing(optimizer: Optimizer) -> Callable[[], None]:
    """Return a function that clears the optimizer's gradients: its `zero_grad`, without the profiler's record if it is
    torch's own."""
    if type(optimizer).zero_grad is not Optimizer.zero_grad or "zero_grad" in vars(optimizer):
        return lambda: optimizer.zero_grad()

    def clear() -> None:
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = None

    return clear


def _plain_step(optimizer: Optimizer) -> None:
    optimizer.step()


def _suits(group: dict[str, Any]) -> bool:
    """Return whether the fused kernel can update this parameter group."""
    if any(group[name] for name in OTHERS) or any(group[name] is not None for name in ("foreach", "fused")):
        return False
    devices, dtypes = ({getattr(p, name) for p in group["params"]} for name in ("device", "dtype"))
    if len(devices) > 1 or not all(device.type in ("cpu", "cuda") for device in devices):
        return False
    return dtypes <= set(DTYPES) and (len(dtypes) <= 1 or next(iter(devices)).type == "cpu")


class FusedStep:
    """Calls the fused kernel directly, or through `optimizer.step` if a step involves more, such as hooks."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._counts: dict[int, tuple[Tensor, list[Tensor]]] = {}
        """By the group's index: the step counters of its parameters as one tensor, and each of them as a view of it."""
        self._on_device: dict[int, tuple[Tensor, list[Tensor]]] = {}
        """The same counters on the GPU, where the kernel reads them; torch's plain step counts on the CPU."""
        self._on_cpu = all(p.device.type == "cpu" for group in optimizer.param_groups for p in group["params"])

    def __call__(self) -> None:
        optimizer = self._optimizer
        groups = optimizer.param_groups
        if not all(map(_has_plain_settings, groups)):  # a schedule may have changed them
            self._plain_step()
            return
        columns = [_tensor_lists(optimizer, group) for group in groups] if not _hooked(optimizer) else [None]
        if any(lists and not _in_one_layout(*lists) for lists in columns):
            self._plain_step()
            return
        if None not in columns:
            with torch.no_grad():
                for index, (group, lists) in enumerate(zip(groups, columns, strict=True)):
                    if lists is not None and lists[0]:
                        self._count(index, *lists)
                        _call(group, *lists)
            optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers check it
            return
        if not self._on_cpu:  # torch's fused step would count on the GPU, and a saved state would hold that
            self._plain_step()
            return
        for group in groups:
            group["fused"] = True
        try:
            optimizer.step()
        finally:
            for group in groups:
                group["fused"] = None  # the user's setting

    def _plain_step(self) -> None:
        """Take the step as torch does, which counts on the CPU."""
        self._counts.clear()  # with the counters on the GPU
        self._optimizer.step()

    def _count(self, index: int, params: list[Tensor], *lists: list[Tensor]) -> None:
        """Add one to all step counters at once, since a call for each takes longer than the update itself."""
        steps = lists[-1]
        counters, views = self._counts.get(index, (steps[0], []))
        if len(views) != len(steps) or any(step is not view for step, view in zip(steps, views, strict=True)):
            counters = torch.stack(steps)
            views = [counters[row] for row in range(len(steps))]
            for param, view in zip(params, views, strict=True):
                self._optimizer.state[param]["step"] = view
            self._counts[index] = counters, views
            if params[0].is_cuda:
                on_device = counters.to(params[0].device, copy=True)
                self._on_device[index] = on_device, list(on_device.unbind())
        counters += 1
        steps[:] = views
        if params[0].is_cuda:
            on_device, steps[:] = self._on_device[index]
            on_device += 1


def _has_plain_settings(group: dict[str, Any]) -> bool:
    """Return whether the kernel takes the group's settings as they are.

    It does not take tensors, which have their own dtype in torch's plain arithmetic, nor 1 for True.
    """
    numbers = (*(group[name] for name in NUMBERS), *group["betas"])
    return all(isinstance(x, int | float) for x in numbers) and all(isinstance(group[name], bool) for name in FLAGS)


def _hooked(optimizer: Any) -> bool:
    """Return whether hooks must be called before or after a step."""
    return bool(step_hooks(optimizer) or _global_optimizer_pre_hooks or _global_optimizer_post_hooks)


def _in_one_layout(params: list[Tensor], *lists: list[Tensor]) -> bool:
    """Return whether gradients and moments have the strides of their parameters. The kernel goes through memory in its
    order: with other strides, its result would be wrong on a CPU, and it raises on a GPU."""
    return all(
        row[0].dim() < 2 or row[0].stride() == row[1].stride() == row[2].stride() == row[3].stride()
        for row in zip(params, *lists[:3], strict=True)
    )


def _tensor_lists(optimizer: Optimizer, group: dict[str, Any]) -> list[list[Any]] | None:
    """Return parameters, gradients and states of a group, new ones at the first step; None if torch must handle them
    itself, such as sparse gradients."""
    columns: tuple[list[Any], ...] = ([], [], [], [], [], [])
    params, grads, averages, squares, maxima, steps = columns
    states, maximum = optimizer.state, group["amsgrad"]
    for param in group["params"]:
        grad = param.grad
        if grad is None:
            continue
        if grad.layout is not torch.strided:
            return None
        state = states.get(param) or states.setdefault(param, {})
        if not state:
            state.update(_first_state(param, maximum))
        params.append(param)
        grads.append(grad)
        averages.append(state["exp_avg"])
        squares.append(state["exp_avg_sq"])
        steps.append(state["step"])
        if maximum:
            maxima.append(state["max_exp_avg_sq"])
    return list(columns)


def _first_state(param: Tensor, maximum: bool) -> dict[str, Tensor]:
    """Return the state of a parameter before its first step, as torch's plain step makes it: it counts on the CPU."""
    names = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if maximum else ()))
    zeros = {name: torch.zeros_like(param, memory_format=torch.preserve_format) for name in names}
    return {"step": torch.tensor(0.0, dtype=torch.float32, device="cpu"), **zeros}


def _call(
    group: dict[str, Any], params: Any, grads: Any, averages: Any, squares: Any, maxima: Any, steps: list[Any]
) -> None:
    kernel: Any = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
    beta1, beta2 = group["betas"]
    kernel(
        params, grads, averages, squares, maxima, steps, amsgrad=group["amsgrad"], lr=group["lr"], beta1=beta1,
        beta2=beta2, weight_decay=group["weight_decay"], eps=group["eps"], maximize=group["maximize"],
    )  # fmt: skip
