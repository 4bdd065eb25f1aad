"""Read the next batch of a stack. If a DataLoader's batch has a new shape, its step is traced and proven first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.data.loader import MOST_KINDS
from shoal.data.pool import batch_rows
from shoal.engine.proof.cases import Disproved
from shoal.engine.proof.prove import OTHER_WEIGHTS, prove_training
from shoal.engine.recipes.recipe import Recipe
from shoal.engine.rules.op_context import NotStackable
from shoal.engine.stack.batches import Feed
from shoal.engine.stack.stack import Stack
from shoal.engine.tiers.stacked._failing_members import check_shapes
from shoal.engine.tracing.patches import Untraceable
from shoal.engine.tracing.trace import Trace

if TYPE_CHECKING:
    from shoal.engine.tiers.stacked.unit import StackedUnit


@dataclass(slots=True)
class Loaded:
    """What a unit knows about a DataLoader's batches."""

    kind: int = 0
    """The number of the last batch's kind; 0: none was read."""
    leaves: list[Tensor] = field(default_factory=list)
    """The tensors of the last batch."""
    sizes: list[int] = field(default_factory=list)
    """The rows of this turn's batches."""
    learned: dict[int, list[Trace]] = field(default_factory=dict)
    """For each kind of batch that is not like the first: the members' steps on it, by slot."""

    def traces(self, stack: Stack, size: int, slots: Sequence[int]) -> list[Trace]:
        """Return the steps of these slots on batches of a size, or of the kind with this number."""
        if size in self.learned:
            return [self.learned[size][slot] for slot in slots]
        return [stack.recipes[slot].steps[size] for slot in slots]


def next_batch(unit: StackedUnit, feed: Feed, index: int) -> tuple[int, list[Tensor]]:
    """Return the tensors of the index-th batch of a turn, and its size, which determines its program.

    Raises:
        ReadError: If it cannot be read.
        OtherShapes, Untraceable, NotStackable: If members cannot be stacked on such a batch.
    """
    if feed.batched:
        return _loaded(unit, feed)
    batch = feed.batch(index)
    size = batch[0].shape[0 if feed.shared else 1]
    if not feed.in_memory:
        check_shapes(unit.stack.recipes[0].steps.get(size), batch, axes=0 if feed.shared else 1)
    return size, batch


def _loaded(unit: StackedUnit, feed: Feed) -> tuple[int, list[Tensor]]:
    """Read a DataLoader's batch; the number of its kind serves as its size."""
    loaded = unit.loaded
    loaded.kind = 0
    batch = feed.next_batch()
    kind = feed.kind(batch)
    if not kind:
        raise Untraceable(f"its batches have more than {MOST_KINDS} different shapes")
    if kind not in unit.stack.recipes[0].steps and kind not in loaded.learned:
        loaded.learned[kind] = _learn(unit, kind, batch)
    loaded.kind, loaded.leaves = kind, pytree.tree_leaves(batch)
    loaded.sizes.append(batch_rows(batch))
    return kind, loaded.leaves


def _learn(unit: StackedUnit, kind: int, batch: Any) -> list[Trace]:
    """Return the members' steps on such a batch, once they are proven."""
    cache, stack = unit.trace_cache, unit.stack
    unit.write_back()  # the step may read what its first call has left in the model
    learned: list[Recipe] = []
    for recipe in stack.recipes:
        learned.append(Recipe(recipe.member, {kind: cache.step_on(recipe.member, batch)}, recipe.optimizer))
        learned[-1].shared = recipe.shared
    traces = [recipe.steps[kind] for recipe in learned]
    flags = [False] * traces[0].batch_spec.num_leaves
    cache.programs.get([traces[slot] for slot in stack.rows], flags, stack.device, stack.shared)
    for reason in prove_training(learned, cache).values():
        raise Disproved(reason)
    if any(trace.trained != stack.trained for trace in traces):
        raise NotStackable(OTHER_WEIGHTS)
    return traces
