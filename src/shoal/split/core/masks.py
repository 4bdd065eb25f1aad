"""Training some slices of a network whose other weights only help: the forward pass is the whole network's."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from shoal.split.core.moments import moment_slice
from shoal.split.core.parts import Slice, Tensors


class Masks:
    """Keeps all but the learning slices of a network's parameters where they are."""

    def __init__(self, network: nn.Module, learning: Mapping[str, Slice]) -> None:
        self.learning = learning
        self.shapes = {name: parameter.shape for name, parameter in network.named_parameters()}
        self._kept = []
        for name, parameter in network.named_parameters():
            piece = learning.get(name)
            if piece is not None and piece.whole:
                continue
            mask = torch.zeros(parameter.shape, dtype=torch.bool, device=parameter.device)
            if piece is not None:
                piece.put(mask, torch.ones(piece.shape(parameter.shape), dtype=torch.bool, device=mask.device))
            self._kept.append((parameter, mask, parameter.detach().clone()))

    def gradients(self) -> None:
        """Take away what others learn."""
        for parameter, mask, _ in self._kept:
            if parameter.grad is not None:
                parameter.grad.masked_fill_(~mask, 0.0)

    @torch.no_grad()
    def weights(self) -> None:
        """Put back what an optimizer moves without a gradient: by weight decay, or by momentum."""
        for parameter, mask, start in self._kept:
            parameter.copy_(torch.where(mask, parameter, start))

    def moments(self, moments: Tensors) -> Tensors:
        """Of the optimizer's state, what belongs to the learning slices."""
        out: Tensors = {}
        for key, value in moments.items():
            parameter = key.rpartition("/")[0]
            piece = self.learning.get(parameter)
            place = moment_slice(piece, self.shapes[parameter], value.shape) if piece is not None else None
            if place is not None:
                out[key] = place.take(value)
        return out
