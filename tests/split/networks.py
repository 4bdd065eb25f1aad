"""Small jobs for the tests of splits."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal import Job


def rows(count: int = 90, width: int = 6, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Three classes that can be told apart."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(count, width, generator=generator, dtype=dtype)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0.3).long()


def mlp(*widths: int, norm: bool = True, dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A fully connected network of these widths."""
    layers: list[nn.Module] = []
    for place, (a, b) in enumerate(pairwise(widths)):
        layers.append(nn.Linear(a, b))
        if place < len(widths) - 2:
            layers += [nn.BatchNorm1d(b)] if norm else []
            layers.append(nn.ReLU())
            layers += [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(*layers).to(dtype)


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) == targets).double().mean()


def make_job(model: Callable[[], nn.Module] | None = None, **settings: Any) -> Job:
    """A job on `rows`: SGD, unless told otherwise."""
    chosen: dict[str, Any] = {
        "model": model or (lambda: mlp(6, 12, 10, 3)),
        "data": rows(),
        "loss": F.cross_entropy,
        "optimizer": torch.optim.SGD,
        "hparams": {"lr": 0.1},
        "batch_size": 8,
    }
    if "steps" not in settings:
        chosen["epochs"] = 2
    return Job(**(chosen | settings))


def same_bits(a: nn.Module, b: nn.Module) -> bool:
    """Whether two networks are equal in every bit, buffers included."""
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def distance(a: nn.Module, b: nn.Module) -> float:
    """The largest difference, as a share of the largest value of its tensor."""
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return max(float((x - y).abs().max() / y.abs().max().clamp_min(1e-12)) for x, y in pairs if x.is_floating_point())
