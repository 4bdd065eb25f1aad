"""The random draws of a captured step, masks together: by itself each of them would be a hundred small kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shoal.engine.optim.compile_fence import is_traced
from shoal.utils.randomness import Draw, counter_draw, counter_keys, draw_columns, site_keys, site_numbers, spread

MOST_TOGETHER = 1 << 22
"""Elements of all members' masks that are drawn at once: for more, kernels take longer than it takes to call them."""


class Noise:
    """All draws of a step, for members with a row each. A compiler fuses them, so for it each is written by itself."""

    def __init__(self, draws: Sequence[Draw], members: int, device: torch.device) -> None:
        self._draws = draws
        self._columns = [draw_columns(draw, members, device) for draw in draws]
        self._sites = torch.tensor(site_numbers(draws, members), dtype=torch.int64, device=device)
        self._masks = _masks(draws, members)
        if not self._masks:
            return
        drawn = [draws[index] for index in self._masks]
        self._sizes = [math.prod(draw.shape) for draw in drawn]
        sizes = torch.tensor(self._sizes)
        self._elements = torch.cat([torch.arange(size) for size in self._sizes]).to(device)
        self._owners = torch.arange(len(drawn)).repeat_interleave(sizes).to(device)
        self._site_keys = site_keys(self._sites[self._masks]).T.contiguous()
        kept = torch.tensor([[_share(draw, m) for draw in drawn] for m in range(members)], dtype=torch.float64)
        scale = torch.where(kept > 0, 1 / kept, 0.0)
        scale[:, [draw.kind == "bernoulli" for draw in drawn]] = 1.0
        self._limits = (kept * 2.0**32).to(device, torch.int64)
        self._scales = scale.to(device, drawn[0].dtype)

    def of(self, seeds: Tensor, counts: Tensor) -> Callable[[int], Tensor]:
        """The draws of members with these seeds at these batches: from a draw's number to its values [M, ...]."""
        masks = {} if is_traced() or not self._masks else self._together(seeds, counts)

        def value(index: int) -> Tensor:
            if index in masks:
                return masks[index]
            return counter_draw(self._draws[index], seeds, counts, self._sites[index], self._columns[index])

        return value

    def _together(self, seeds: Tensor, counts: Tensor) -> dict[int, Tensor]:
        keys = counter_keys(seeds.unsqueeze(1), counts.unsqueeze(1), self._site_keys)
        key, again, limit, scale = (t.index_select(1, self._owners) for t in (*keys, self._limits, self._scales))
        values = (spread(self._elements, key, again) < limit) * scale
        parts = torch.split(values, self._sizes, 1)
        return {
            index: part.view(len(seeds), *self._draws[index].shape)
            for index, part in zip(self._masks, parts, strict=True)
        }


def _masks(draws: Sequence[Draw], members: int) -> list[int]:
    """The masks that are drawn together: of one dtype, and small enough."""
    found: list[int] = []
    room = MOST_TOGETHER
    for index, draw in enumerate(draws):
        size = members * math.prod(draw.shape)
        alike = not found or draws[found[0]].dtype == draw.dtype
        if draw.kind in ("dropout", "bernoulli") and alike and 0 < size <= room:
            found.append(index)
            room -= size
    return found


def _share(draw: Draw, member: int) -> float:
    """Of the elements that are not zero."""
    (p,) = draw.of(member)
    return 1.0 - p if draw.kind == "dropout" else p
