"""Update all parameters of a small network as one tensor, since there the calls cost more than the arithmetic.

On a CPU the optimizer state of all parameters lies in one [M, elements] tensor, and each parameter's state is a view of
it; weights and gradients are copied side by side for each step. On a GPU, where copying many small tensors is one call,
the state is copied for the step too, and copied back after it. Every rule works element by element, so the results are
the same bits as without this. On a CPU, the choice depends only on the shapes of one member.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shoal.engine.optim.rule import Rule

MOST_ELEMENTS = 1 << 14
LEAST_PARAMS = 3
"""Limits for a CPU: parameters are updated together up to so many elements of a member, and from so many parameters."""
MOST_ON_GPU = 1 << 22
"""Limit for a GPU: up to so many elements of all members together, copying costs less than the calls."""


def suits(rule: Rule, params: Sequence[Tensor], states: Sequence[Mapping[str, Tensor]]) -> bool:
    """Return whether, on a CPU, parameters [M, ...] of one group are faster to update as one flat tensor."""
    elements = sum(math.prod(p.shape[1:]) for p in params)
    return (
        elements <= MOST_ELEMENTS and all(p.device.type == "cpu" for p in params) and _can_be_flat(rule, params, states)
    )


def suits_copies(rule: Rule, params: Sequence[Tensor], states: Sequence[Mapping[str, Tensor]]) -> bool:
    """Return whether, on a GPU, parameters [M, ...] of one group are faster to update as one flat copy."""
    return on_gpu(params) and sum(p.numel() for p in params) <= MOST_ON_GPU and _can_be_flat(rule, params, states)


def scratch_bytes(params: Sequence[Tensor]) -> int:
    """Return the most temporary bytes that an update on a GPU needs: flat copies of small parameters, and temporaries
    of the arithmetic."""
    sizes = [p.numel() * p.element_size() for p in params]
    most = 4 * max(sizes, default=0)
    return max(most, 8 * sum(sizes)) if sum(p.numel() for p in params) <= MOST_ON_GPU else most


def on_gpu(params: Sequence[Tensor]) -> bool:
    return all(p.is_cuda for p in params)


def _can_be_flat(rule: Rule, params: Sequence[Tensor], states: Sequence[Mapping[str, Tensor]]) -> bool:
    """Return whether these parameters can be one flat tensor: they have one dtype, and share their step counter."""
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
    """Take one step of a group's parameters [M, ...] on flat copies of them and their state, and copy the results
    back."""
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
    """Updates one parameter group on a CPU as one flat tensor."""

    def __init__(self, rule: Rule, params: Sequence[Tensor], states: Sequence[dict[str, Tensor]]) -> None:
        """Lay the group's state side by side. The tensors in `states` are replaced by views of the flat ones."""
        self.rule = rule
        self._params = [p.flatten(1) if p.dim() > 1 else p.unsqueeze(1) for p in params]
        self._sizes = [p.shape[1] for p in self._params]
        self._state = {name: value for name, value in states[0].items() if name not in rule.buffers()}
        for name in rule.buffers():
            flat = torch.cat([state[name].reshape(p.shape) for state, p in zip(states, self._params, strict=True)], 1)
            self._state[name] = flat
            for state, part, param in zip(states, torch.split(flat, self._sizes, 1), params, strict=True):
                state[name] = part.view(param.shape)
        self._weights = torch.empty(len(params[0]), sum(self._sizes), dtype=params[0].dtype)
        self._grads = torch.empty_like(self._weights)
        self.scratch = [self._weights, self._grads]
        """Tensors that it holds besides the optimizer state."""
        self._parts = list(torch.split(self._weights, self._sizes, 1))

    @torch.no_grad()
    def update(self, grads: Sequence[Tensor], h: Mapping[str, Tensor], active: Tensor | None) -> None:
        """Take one optimizer step. Members outside `active` are left unchanged, bit for bit."""
        rows = len(self._weights)
        torch.cat(self._params, 1, out=self._weights)
        torch.cat([grad.reshape(rows, -1) for grad in grads], 1, out=self._grads)
        self.rule.update_all_([self._weights], [self._grads], [self._state], h, active)
        torch._foreach_copy_(self._params, self._parts)
