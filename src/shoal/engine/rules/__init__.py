"""The stacking rules: how an operator is given a member axis. Importing a module registers its rules."""

from __future__ import annotations

from shoal.engine.rules import _attention, _conv, _losses, _norm, _pointwise, _random, _recurrent, _shape  # noqa: F401
from shoal.engine.rules._linear import ALONE as ALONE
from shoal.engine.rules._registry import find as find
from shoal.engine.rules._registry import mutates as mutates
from shoal.engine.rules._registry import refuse_side_writes as refuse_side_writes
