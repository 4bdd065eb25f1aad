"""Holds one function with a member axis to the same function alone: values, gradients and buffers, in float64.

`assert_stacks(lambda w, x: x @ w, [w, x], "px")`: w is a parameter, x is of the batch, "b" would be a buffer.
Nothing is trained: the function is traced, and run by a `Program` on the members' tensors, stacked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tests.engine.equality import TOLERANCE
from tests.engine.equality import distance as distance
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.engine.recipes.program import Program
from shoal.engine.tracing.trace import Trace, trace
from shoal.utils.randomness import draw_members

MEMBERS = 3


class Function(nn.Module):
    """A function of tensors, of which some are parameters and some are buffers."""

    def __init__(self, function: Callable[..., Any], tensors: Sequence[Tensor], kinds: str) -> None:
        super().__init__()
        self.function, self.kinds = function, kinds
        for place, (tensor, kind) in enumerate(zip(tensors, kinds, strict=True)):
            if kind == "p":
                self.register_parameter(f"t{place}", nn.Parameter(tensor.clone()))
            elif kind == "b":
                self.register_buffer(f"t{place}", tensor.clone())

    def forward(self, *batch: Tensor) -> Any:
        rest = iter(batch)
        return self.function(
            *(next(rest) if kind == "x" else getattr(self, f"t{place}") for place, kind in enumerate(self.kinds))
        )


def _call(model: nn.Module, batch: Any) -> Any:
    return model(*batch)


def varied(tensors: Sequence[Tensor], member: int) -> list[Tensor]:
    """The same tensors with other numbers; whole numbers and truth values are shifted around."""
    return [
        (t * (1 - 0.07 * member)).to(t.dtype)
        if t.is_floating_point() or t.is_complex()
        else t.flatten().roll(member).view(t.shape)
        for t in tensors
    ]


def stacked_state(models: Sequence[nn.Module], graph: Trace) -> list[Tensor]:
    """Parameters and buffers of models, members first, in the order of their common graph."""
    named = [{**dict(m.named_parameters()), **dict(m.named_buffers())} for m in models]
    state = [torch.stack([own[name].detach() for own in named]) for name in (*graph.params, *graph.buffers)]
    for tensor in state[: len(graph.params)]:
        tensor.requires_grad_()
    return state


class Stacked:
    """The function with a member axis, on members that each have their own numbers."""

    def __init__(
        self, function: Callable[..., Any], tensors: Sequence[Tensor], kinds: str, *, shared: bool, members: int
    ) -> None:
        own = [varied(tensors, member) for member in range(members)]
        self.models = [Function(function, values, kinds) for values in own]
        self.batches = [[t for t, kind in zip(values, kinds, strict=True) if kind == "x"] for values in own]
        if shared:
            self.batches = self.batches[:1] * members
        self.shared = shared
        self.traces = [trace(self.models[0], _call, self.batches[0], twice=False)] * members
        self.state = stacked_state(self.models, self.traces[0])

    def run(self, **settings: Any) -> tuple[list[Tensor], list[Tensor | None], dict[str, Tensor]]:
        """(results, gradients, buffers), members first."""
        count = len(self.batches[0])
        cpu = torch.device("cpu")
        program = Program(self.traces, device=cpu, stacked_batch=[not self.shared] * count, **settings)
        columns = zip(*self.batches, strict=True)
        batch = list(self.batches[0]) if self.shared else [torch.stack(column) for column in columns]
        generators = [torch.Generator().manual_seed(100 + member) for member in range(len(self.models))]
        noise = draw_members(program.draws, generators, cpu)
        out, buffers = program(self.state, batch, noise.__getitem__)
        results = pytree.tree_leaves(out)
        params = self.state[: len(self.traces[0].params)]
        total = sum(weighed([value[m] for value in results]) for m in range(len(self.models)))
        return results, gradients(total, params), buffers

    def alone(self, member: int) -> tuple[list[Tensor], list[Tensor | None], dict[str, Tensor]]:
        """The same of one of the members, from plain torch."""
        torch.manual_seed(100 + member)
        model = self.models[member]
        results = pytree.tree_leaves(model(*self.batches[member]))
        return results, gradients(weighed(results), list(model.parameters())), dict(model.named_buffers())


def weighed(results: Sequence[Tensor]) -> Any:
    """One real number that depends on every element of every result, in its own way."""
    total: Any = 0.0
    for place, value in enumerate(results):
        if value.requires_grad:
            weights = torch.randn(value.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(place))
            product = (value * weights).sum()
            total = total + (product.real + 2 * product.imag if value.is_complex() else product)
    return total


def gradients(total: Any, params: Sequence[Tensor]) -> list[Tensor | None]:
    if not isinstance(total, Tensor):
        return [None] * len(params)
    return list(torch.autograd.grad(total, params, allow_unused=True))


def assert_stacks(
    function: Callable[..., Any],
    tensors: Sequence[Tensor],
    kinds: str,
    *,
    shared: bool = True,
    members: int = MEMBERS,
    tolerance: float = TOLERANCE,
    **settings: Any,
) -> None:
    """The function with a member axis gives every member what it gives alone."""
    stacked = Stacked(function, tensors, kinds, shared=shared, members=members)
    results, grads, buffers = stacked.run(**settings)
    for member in range(members):
        values, own_grads, own_buffers = stacked.alone(member)
        assert len(values) == len(results)
        for value, wide in zip(values, results, strict=True):
            assert distance(wide[member], value) <= tolerance, (wide[member], value)
        for grad, wide_grad in zip(own_grads, grads, strict=True):
            if grad is None or wide_grad is None:
                assert all(g is None or not g.count_nonzero() for g in (grad, wide_grad))
            else:
                assert distance(wide_grad[member], grad) <= tolerance, (wide_grad[member], grad)
        for name, buffer in own_buffers.items():
            assert distance(buffers[name][member], buffer) <= tolerance, name
