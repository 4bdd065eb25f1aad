"""Whether there is memory for a step: in the middle of it, and of its recording above all, it is too late to ask."""

from __future__ import annotations

import torch

from shoal.pack import memory
from shoal.pack.captured.graphs import clear
from shoal.pack.recipe import Recipe

SURE = 3
"""Times what a step takes by rule of thumb, from which nobody need look closer."""


def left() -> int:
    """Bytes that can still be had: of the device, or of what this process may have of it."""
    free, total = torch.cuda.mem_get_info()
    most = int(total * torch.cuda.get_per_process_memory_fraction())
    return min(free, most - torch.cuda.memory_reserved())


def make_sure(recipe: Recipe, tier: str, members: int) -> None:
    """See to it that there is memory for a step of so many members, and to capture it.

    Raises:
        torch.OutOfMemoryError: where there is none.
    """
    rough = members * memory.rough(recipe)
    if SURE * rough < left():
        return
    clear()
    try:
        need = memory.analytic(recipe, tier)[1].at(members)
    except Exception:  # an operator that knows no fake tensors
        need = float(rough)
    if need > left():
        raise torch.OutOfMemoryError(f"a step needs about {need / 1e6:,.0f} MB, and {left() / 1e6:,.0f} MB are left")
