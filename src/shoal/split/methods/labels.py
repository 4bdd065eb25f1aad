"""Synthetic intermediate labels (SIL): for each class, random vectors as wide as a cut.

The part before the cut learns to output them, the part after the cut learns to read them.
"""

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
    """Distribution of the elements: normal, uniform (within the square root of 3), or -1 and 1. All have variance 1."""
    scale: float = 1.0
    """Standard deviation of the elements. About 1 works well; 16 makes training worse."""
    vectors: int = 1
    """How many vectors each class has. The part before the cut learns the one nearest to its current output."""
    noise: float = 0.0
    """Standard deviation, in units of `scale`, of the noise that is added to the labels which the part after the cut
    reads."""
    layout: Layout = "full"
    """With "full", every element that crosses has its own number; with "channel", all elements of a channel share
    one."""

    def __post_init__(self) -> None:
        check_choice("distribution", self.distribution, get_args(Distribution))
        check_choice("layout", self.layout, get_args(Layout))
        if not self.scale > 0 or not math.isfinite(self.scale):
            raise SplitError(f"scale is {self.scale!r}; use a number above 0, about 1")
        if not self.noise >= 0 or not math.isfinite(self.noise):
            raise SplitError(f"noise is {self.noise!r}; use 0 or more")
        check_count("vectors", self.vectors)

    def draw(self, classes: int, shape: tuple[int, ...], *seed: int) -> Tensor:
        """Draw the labels of one cut, [class, vector, *shape]. They depend on the seed alone.

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

    def loss(self, outputs: Tensor, table: Tensor, target: Tensor) -> Tensor:
        """Return the distance of a part's output from the labels of its rows' classes. Of several labels, the nearest
        counts."""
        labels = table.to(outputs.dtype)[target]
        if self.vectors == 1:
            return F.mse_loss(outputs, labels[:, 0])
        return (outputs.unsqueeze(1) - labels).square().flatten(2).mean(2).min(1).values.mean()

    def read(self, table: Tensor, target: Tensor) -> Tensor:
        """Return what the part after a cut reads instead of activations: the labels of its rows, with noise."""
        which = torch.randint(0, self.vectors, target.shape, device=target.device) if self.vectors > 1 else 0
        labels = table[target, which]
        return labels + self.noise * self.scale * torch.randn_like(labels) if self.noise else labels


def nearest(outputs: Tensor, table: Tensor) -> Tensor:
    """Return for each row the class whose vector is nearest.

    >>> nearest(torch.tensor([[0.9], [-2.0]]), torch.tensor([[[1.0]], [[-1.0]]]))
    tensor([0, 1])
    """
    flat, vectors = outputs.flatten(1).float(), table.flatten(2).float()
    distances = torch.cdist(flat, vectors.flatten(0, 1)).view(len(flat), *vectors.shape[:2])
    return distances.min(2).values.argmin(1)
