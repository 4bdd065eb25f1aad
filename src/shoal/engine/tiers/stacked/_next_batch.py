"""The next batch of a stack. A DataLoader's batch that is not like those before it has its step traced and proven."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.data.loader import MOST_KINDS
from shoal.data.pool import batch_rows
from shoal.engine.proof.cases import Disproved
from shoal.engine.proof.prove import prove_training
from shoal.engine.recipes.recipe import Recipe
from shoal.engine.stack.batches import Feed
from shoal.engine.tiers.stacked._blame import check_shapes
from shoal.engine.tracing.patches import Untraceable

if TYPE_CHECKING:
    from shoal.engine.tiers.stacked.unit import StackedUnit


def next_batch(unit: StackedUnit, feed: Feed, index: int) -> tuple[int, list[Tensor]]:
    """The leaves of the index-th of a turn's batches, and its size, which says which program it is for.

    Raises:
        ReadError: when it cannot be read.
        OtherShapes, Untraceable, NotStackable: when members are no stack on such a batch.
    """
    if feed.batched:
        return _loaded(unit, feed)
    batch = feed.batch(index)
    size = batch[0].shape[0 if feed.shared else 1]
    if not feed.in_memory:
        check_shapes(unit.stack.recipes[0].steps.get(size), batch, axes=0 if feed.shared else 1)
    return size, batch


def _loaded(unit: StackedUnit, feed: Feed) -> tuple[int, list[Tensor]]:
    """A DataLoader's batch; the number of its kind is its size."""
    unit.loaded = None
    batch = feed.whole()
    kind = feed.kind(batch)
    if not kind:
        raise Untraceable(f"its batches have more than {MOST_KINDS} different shapes")
    if any(kind not in recipe.steps for recipe in unit.stack.recipes):
        _learn(unit, kind, batch)
    leaves: list[Tensor] = pytree.tree_leaves(batch)
    unit.loaded = kind, leaves
    unit.sizes.append(batch_rows(batch))
    return kind, leaves


def _learn(unit: StackedUnit, kind: int, batch: Any) -> None:
    cache, learned = unit.trace_cache, list[Recipe]()
    for recipe in unit.stack.recipes:
        learned.append(Recipe(recipe.member, {kind: cache.step_on(recipe.member, batch)}, recipe.optimizer))
        learned[-1].shared = recipe.shared
    cache.program(
        [learned[row].steps[kind] for row in unit.stack.rows],
        [False] * len(pytree.tree_leaves(batch)),
        unit.stack.device,
        unit.stack.shared,
    )
    unit.write_back()
    for reason in prove_training(learned, cache).values():
        raise Disproved(reason)
    for recipe, new in zip(unit.stack.recipes, learned, strict=True):
        recipe.steps[kind] = new.steps[kind]
