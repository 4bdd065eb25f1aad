"""Synthetic intermediate labels: for each class random vectors as wide as a cut, that the part before it learns to give
and the part after it learns to read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.errors import SplitError
from shoal.split.core.checks import check_choice, check_count
from shoal.split.core.reading import mixed

Distribution = Literal["normal", "uniform", "sign"]
Layout = Literal["full", "channel"]


@dataclass(kw_only=True)
class Labels:
    """How intermediate labels are drawn and used."""

    distribution: Distribution = "normal"
    """Of the elements: normal, uniform (within the square root of 3), or -1 and 1. All have variance 1."""
    scale: float = 1.0
    """Their standard deviation. About 1 is right: 16 hurts."""
    vectors: int = 1
    """Vectors for each class. The part before the cut goes for the one that is nearest to what it gives already."""
    noise: float = 0.0
    """Standard deviation, in units of `scale`, of what is added to the labels that the part after the cut reads."""
    layout: Layout = "full"
    """ "full": a number for each element that crosses. "channel": one for each channel, the same at every place."""

    def __post_init__(self) -> None:
        check_choice("distribution", self.distribution, get_args(Distribution))
        check_choice("layout", self.layout, get_args(Layout))
        if not self.scale > 0 or not math.isfinite(self.scale):
            raise SplitError(f"scale is {self.scale!r}; use a number above 0, about 1")
        if not self.noise >= 0 or not math.isfinite(self.noise):
            raise SplitError(f"noise is {self.noise!r}; use 0 or more")
        check_count("vectors", self.vectors)

    def draw(self, classes: int, shape: tuple[int, ...], *seed: int) -> Tensor:
        """The labels of one cut, [class, vector, *shape]: a pure function of the seed.

        >>> table = Labels(distribution="sign").draw(3, (4,), 0)
        >>> table.shape, sorted(set(table.flatten().tolist()))
        (torch.Size([3, 1, 4]), [-1.0, 1.0])
        """
        generator = torch.Generator().manual_seed(mixed(*seed))
        width = shape if self.layout == "full" else (*shape[:1], *(1 for _ in shape[1:]))
        size = (classes, self.vectors, *width)
        if self.distribution == "normal":
            drawn = torch.randn(size, generator=generator)
        elif self.distribution == "uniform":
            drawn = (torch.rand(size, generator=generator) * 2 - 1) * math.sqrt(3)
        else:
            drawn = torch.randint(0, 2, size, generator=generator) * 2.0 - 1.0
        return (drawn * self.scale).expand(classes, self.vectors, *shape).contiguous()

    def loss(self, given: Tensor, table: Tensor, target: Tensor) -> Tensor:
        """How far a part's output is from the labels of its rows' classes; of several the nearest counts."""
        wanted = table.to(given.dtype)[target]
        if self.vectors == 1:
            return F.mse_loss(given, wanted[:, 0])
        return (given.unsqueeze(1) - wanted).square().flatten(2).mean(2).min(1).values.mean()

    def read(self, table: Tensor, target: Tensor) -> Tensor:
        """What the part after a cut reads in place of activations: its rows' labels, with noise."""
        which = torch.randint(0, self.vectors, target.shape, device=target.device) if self.vectors > 1 else 0
        labels = table[target, which]
        return labels + self.noise * self.scale * torch.randn_like(labels) if self.noise else labels


def nearest(given: Tensor, table: Tensor) -> Tensor:
    """For each row the class whose vector is nearest.

    >>> nearest(torch.tensor([[0.9], [-2.0]]), torch.tensor([[[1.0]], [[-1.0]]]))
    tensor([0, 1])
    """
    flat, vectors = given.flatten(1).float(), table.flatten(2).float()
    apart = torch.cdist(flat, vectors.flatten(0, 1)).view(len(flat), *vectors.shape[:2])
    return apart.min(2).values.argmin(1)
