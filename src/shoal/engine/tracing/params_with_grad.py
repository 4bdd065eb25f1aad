"""Find the parameters that get a gradient in a step, which are the ones that an optimizer updates."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def reached_by(loss: Any) -> set[int]:
    """Return the ids of the leaf tensors that a backward pass from the loss reaches."""
    if not isinstance(loss, Tensor) or not loss.requires_grad:
        return set()
    if loss.grad_fn is None:
        return {id(loss)}
    reached: set[int] = set()
    seen, waiting = set(), [loss.grad_fn]
    while waiting:
        function: Any = waiting.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        if hasattr(function, "variable"):
            reached.add(id(function.variable))
        waiting += [other for other, _ in function.next_functions]
    return reached
