"""Whether there is memory for a step: in the middle of it, and of its recording above all, it is too late to ask."""

from __future__ import annotations

import torch

from shoal.engine.planning import memory
from shoal.engine.recipes.recipe import Recipe
from shoal.engine.tiers.captured.graphs import clear

SURE = 3
"""Times what a step takes by rule of thumb, from which no closer look is needed."""


def ensure_memory(recipe: Recipe, tier: str, members: int) -> None:
    """See to it that there is memory for a step of so many members, and to capture it.

    Raises:
        torch.OutOfMemoryError: where there is none.
    """
    rough, device = members * memory.rough(recipe), recipe.member.device
    if SURE * rough < memory.unreserved(device):
        return
    clear()
    try:
        need = memory.analytic(recipe, tier)[1].at(members)
    except Exception:  # an operator that knows no fake tensors
        need = float(rough)
    left = memory.unreserved(device)
    if need > left:
        raise torch.OutOfMemoryError(f"a step needs about {need / 1e6:,.0f} MB, and {left / 1e6:,.0f} MB are left")
