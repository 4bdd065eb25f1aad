"""A small network's parameters, updated as one: there the calls cost more than the arithmetic.

On a CPU the optimizer's state of all parameters lies in one [M, elements] tensor, of which each parameter has a view;
weights and gradients are laid side by side for the step. On a GPU, where a copy of something small is one call for all
of it, the state too is laid side by side for the step and put back after it. Every rule goes element by element, so
each element's bits are those it has by itself. On a CPU, whether it is done depends on the member's own shapes alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shoal.engine.optim.rule import Rule

MOST_ELEMENTS = 1 << 14
LEAST_PARAMS = 3
"""A member's elements up to which, and parameters from which, one call for all of them wins."""
MOST_ON_GPU = 1 << 22
"""Elements of all members up to which copying them costs a GPU less than the calls."""


def suits(rule: Rule, params: Sequence[Tensor], states: Sequence[Mapping[str, Tensor]]) -> bool:
    """Whether parameters [M, ...] of one group are better updated as one on a CPU, in state that lies together."""
    elements = sum(math.prod(p.shape[1:]) for p in params)
    return elements <= MOST_ELEMENTS and all(p.device.type == "cpu" for p in params) and _alike(rule, params, states)


def suits_copies(rule: Rule, params: Sequence[Tensor], states: Sequence[Mapping[str, Tensor]]) -> bool:
    """Whether parameters [M, ...] of one group are better updated as one on a GPU, side by side for the step."""
    return on_gpu(params) and sum(p.numel() for p in params) <= MOST_ON_GPU and _alike(rule, params, states)


def scratch_bytes(params: Sequence[Tensor]) -> int:
    """What an update on a GPU takes at the most besides what there is: copies of all that is small, and temporaries."""
    sizes = [p.numel() * p.element_size() for p in params]
    most = 4 * max(sizes, default=0)
    return max(most, 8 * sum(sizes)) if sum(p.numel() for p in params) <= MOST_ON_GPU else most


def on_gpu(params: Sequence[Tensor]) -> bool:
    return all(p.is_cuda for p in params)


def _alike(rule: Rule, params: Sequence[Tensor], states: Sequence[Mapping[str, Tensor]]) -> bool:
    """Whether these parameters can lie side by side: one dtype, one clock."""
    if len(params) < LEAST_PARAMS or params[0].dtype not in (torch.float32, torch.float64):
        return False
    if any(p.dtype != params[0].dtype or not p.is_contiguous() for p in params):
        return False
    buffers = rule.buffers()
    return all(value is states[0].get(name) for state in states for name, value in state.items() if name not in buffers)


@torch.no_grad()
def update_copies(
    rule: Rule,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Mapping[str, Tensor]],
    h: Mapping[str, Tensor],
    active: Tensor | None,
) -> None:
    """One step of a group's parameters [M, ...] on copies of them and of their state, which are then put back."""
    rows, names = len(params[0]), rule.buffers()
    tensors = [
        [p.view(rows, -1) for p in params],
        *([state[name].view(rows, -1) for state in states] for name in names),
    ]
    weights, *flat_state = (torch.cat(parts, 1) for parts in tensors)
    state = {**states[0], **dict(zip(names, flat_state, strict=True))}
    grad = torch.cat([grad.reshape(rows, -1) for grad in grads], 1)
    rule.update_all_([weights], [grad], [state], h, active)
    sizes = [p.shape[1] for p in tensors[0]]
    for parts, value in zip(tensors, (weights, *flat_state), strict=True):
        torch._foreach_copy_(parts, list(torch.split(value, sizes, 1)))


class FlatUpdate:
    """One group's parameters and state side by side."""

    def __init__(self, rule: Rule, params: Sequence[Tensor], states: Sequence[dict[str, Tensor]]) -> None:
        """The states' own tensors become views of the flat ones."""
        self.rule = rule
        self._params = [p.flatten(1) if p.dim() > 1 else p.unsqueeze(1) for p in params]
        self._sizes = [p.shape[1] for p in self._params]
        self._state = {name: value for name, value in states[0].items() if name not in rule.buffers()}
        for name in rule.buffers():
            wide = torch.cat([state[name].reshape(p.shape) for state, p in zip(states, self._params, strict=True)], 1)
            self._state[name] = wide
            for state, part, param in zip(states, torch.split(wide, self._sizes, 1), params, strict=True):
                state[name] = part.view(param.shape)
        self._weights = torch.empty(len(params[0]), sum(self._sizes), dtype=params[0].dtype)
        self._grads = torch.empty_like(self._weights)
        self.scratch = [self._weights, self._grads]
        """What it holds besides the state."""
        self._parts = list(torch.split(self._weights, self._sizes, 1))

    @torch.no_grad()
    def update(self, grads: Sequence[Tensor], h: Mapping[str, Tensor], active: Tensor | None) -> None:
        """One step; members outside `active` keep every bit they have."""
        rows = len(self._weights)
        torch.cat(self._params, 1, out=self._weights)
        torch.cat([grad.reshape(rows, -1) for grad in grads], 1, out=self._grads)
        self.rule.update_all_([self._weights], [self._grads], [self._state], h, active)
        torch._foreach_copy_(self._params, self._parts)
