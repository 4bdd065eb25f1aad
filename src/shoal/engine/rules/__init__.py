"""The stacking rules: how an operator is given a member axis. Importing a module registers its rules."""

from __future__ import annotations

from shoal.engine.rules import (
    _attention,
    _conv,
    _linear,
    _losses,
    _norm,
    _pointwise,
    _random,
    _recurrent,
    _shape,
)
from shoal.engine.rules._linear import ALONE
from shoal.engine.rules._registry import find, refuse_side_writes

__all__ = [
    "ALONE",
    "_attention",
    "_conv",
    "_linear",
    "_losses",
    "_norm",
    "_pointwise",
    "_random",
    "_recurrent",
    "_shape",
    "find",
    "refuse_side_writes",
]
