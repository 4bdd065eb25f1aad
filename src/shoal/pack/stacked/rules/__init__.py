"""The stacking rules: how an operator is given a member axis. Importing a module registers its rules."""

from __future__ import annotations

from shoal.pack.stacked.rules import (
    attention,
    conv,
    embedding,
    linear,
    losses,
    norm,
    pointwise,
    random,
    recurrent,
    shape,
)
from shoal.pack.stacked.rules._registry import find, refuse_side_writes
from shoal.pack.stacked.rules.embedding import ALONE

__all__ = [
    "ALONE",
    "attention",
    "conv",
    "embedding",
    "find",
    "linear",
    "losses",
    "norm",
    "pointwise",
    "random",
    "recurrent",
    "refuse_side_writes",
    "shape",
]
