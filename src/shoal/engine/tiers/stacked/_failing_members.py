"""Find the members that cannot run a batch in the stack, after a step of the stack raised.

Halves of the stack are tried on copies of its state, so that few tries find a few members among many. Whether a member
is among them, and from where it continues, depends on that member alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.engine.members.member import Member
from shoal.engine.recipes.recipe import Recipe
from shoal.engine.rules.op_context import NotStackable
from shoal.engine.stack.stack import LEAST
from shoal.engine.tiers.unit import context_lost, out_of_memory
from shoal.engine.tracing.patches import Untraceable
from shoal.engine.tracing.trace import Trace, autocast
from shoal.errors import describe
from shoal.utils.randomness import draw_members, generator_at

if TYPE_CHECKING:
    from shoal.engine.tiers.stacked.unit import StackedUnit


class OtherShapes(Exception):
    """Raised for a batch that is not like the one on which the step was traced."""


def check_shapes(graph: Trace | None, leaves: Sequence[Any], axes: int = 0) -> None:
    """Raise OtherShapes unless the tensors of a batch are like those on which the step was traced.

    Args:
        axes: The number of additional leading axes of the tensors.
    """
    if graph is None:
        raise OtherShapes("its batches do not all have as many rows as were asked for")
    first = len(graph.params) + len(graph.buffers)
    traced = [node.meta["val"] for node in graph.nodes[first:] if node.op == "placeholder"]
    if len(traced) != len(leaves) or not all(isinstance(leaf, Tensor) for leaf in leaves):
        raise OtherShapes("its batches do not all hold the same kinds of things")
    for leaf, expected in zip(leaves, traced, strict=True):
        if leaf.shape[axes:] != expected.shape or leaf.dtype != expected.dtype:
            was, now = ([*map(int, value.shape)] for value in (expected, leaf[0] if axes else leaf))
            raise OtherShapes(
                f"its batches have different shapes or dtypes ({was} {expected.dtype}, {now} {leaf.dtype})"
            )


def failing_members(unit: StackedUnit, error: Exception) -> dict[int, str]:
    """Return what members raise by themselves on the next batch, by slot.

    If no member does, but all together do, all of them are listed.
    """
    if isinstance(error, Untraceable | NotStackable):  # it concerns a batch that all of them share
        return dict.fromkeys(range(len(unit.members)), str(error))
    reasons = _failing_among(unit, list(range(len(unit.members))))
    return reasons or dict.fromkeys(range(len(unit.members)), _reason(error))


def _failing_among(unit: StackedUnit, slots: list[int]) -> dict[int, str]:
    """Return the members among these slots that raise, and why, by trying halves."""
    error = _error_of(unit, slots)
    if error is None:
        return {}
    if len(slots) == 1:
        return {slots[0]: _reason(error)}
    half = len(slots) // 2
    return _failing_among(unit, slots[:half]) | _failing_among(unit, slots[half:])


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, OtherShapes) else f"a stacked step raised {describe(error)}"


def _error_of(unit: StackedUnit, slots: list[int]) -> Exception | None:
    """Return the exception that the next batch of these members raises in reading, forward or backward. Nothing is
    changed."""
    rows = [*slots, *[slots[-1]] * (LEAST - len(slots))]
    try:
        if unit.loaded.kind:
            size, batches = unit.loaded.kind, [unit.loaded.leaves] * len(rows)
        else:
            batches = [_batch(unit.members[slot], unit.stack.recipes[slot]) for slot in rows]
            size = len(batches[0][0])
        leaves = [torch.stack(column) for column in zip(*batches, strict=True)]
        traces = unit.loaded.traces(unit.stack, size, rows)
        program = unit.trace_cache.programs.get(traces, [True] * len(leaves), unit.stack.device)
        state = [value.detach()[rows].requires_grad_(value.requires_grad) for value in unit.stack.state]
        noise = unit.draw(program, rows, [generator_at(unit._generators[slot].get_state()) for slot in rows])
        with torch.enable_grad(), autocast(unit.members[0].job.precision, unit.stack.device):
            (losses, _), _ = program(state, leaves, noise.__getitem__)
        torch.autograd.grad(losses.sum(), [leaf for leaf in state if leaf.requires_grad], allow_unused=True)
    except Exception as error:
        if context_lost(error) or out_of_memory(error):
            raise
        return error
    return None


def _batch(member: Member, recipe: Recipe) -> list[Tensor]:
    """Read a member's next batch by itself, and return its tensors."""
    assert member.order is not None
    job = member.job
    start = member.place * job.batch_size
    rows = member.order[start : start + job.batch_size]
    leaves = pytree.tree_leaves(member.data.source.take(rows, seed=job.order_seed, epoch=member.epoch))
    first = leaves[0] if leaves else None
    size = len(first) if isinstance(first, Tensor) and first.dim() else -1
    check_shapes(recipe.steps.get(size), leaves)
    return leaves


def undraw(unit: StackedUnit, states_before: Sequence[Tensor], rows: Sequence[int]) -> None:
    """Undo these rows' random draws for the last batch.

    Args:
        states_before: The generators' states when the turn began.
    """
    if not rows or not unit._drawn:
        return
    unit._noise = None
    if unit.stack.device.type != "cpu":  # there draws are counter-based
        return
    generators = [unit._generators[row] for row in rows]
    for row, generator in zip(rows, generators, strict=True):
        generator.set_state(states_before[row])
    for draws in unit._drawn[:-1]:
        draw_members(draws, generators, unit.stack.device)


def gradients(unit: StackedUnit, slot: int) -> dict[str, Tensor | None]:
    """Return the gradients that a member has accumulated in its current group of batches, by parameter."""
    names = [unit.stack.param_names[index] for index in unit.stack.trained]
    rows = unit._repeating[slot] if slot in unit._repeating else [row_of(grad, slot) for grad in unit._grads]
    return dict(zip(names, rows, strict=True)) if rows else {}


def row_of(value: Tensor | None, slot: int) -> Tensor | None:
    """Return a copy of one member's row."""
    return None if value is None else value[slot].clone()


def added(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Return the sum of two gradients, either of which may be missing."""
    if a is None or b is None:
        return a if b is None else b
    return a + b
