"""Searches over jobs: `shoal.tune(make_job, space, ...)`, and what it takes and returns.

The package has the name of the function. Names are loaded when they are used, so that `shoal --help` does not import
torch.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from shoal.callable_package import CallablePackage

if TYPE_CHECKING:
    from shoal.tune.packed_hyperband import PackedHyperband as PackedHyperband
    from shoal.tune.population import PBT as PBT
    from shoal.tune.schedulers import ASHA as ASHA
    from shoal.tune.schedulers import Goal as Goal
    from shoal.tune.schedulers import Hyperband as Hyperband
    from shoal.tune.schedulers import NoScheduler as NoScheduler
    from shoal.tune.schedulers import SuccessiveHalving as SuccessiveHalving
    from shoal.tune.trial import Trial as Trial

    def __getattr__(name: str) -> Any: ...


_HOME = {
    "ASHA": "shoal.tune.schedulers",
    "Goal": "shoal.tune.schedulers",
    "Hyperband": "shoal.tune.schedulers",
    "NoScheduler": "shoal.tune.schedulers",
    "PBT": "shoal.tune.population",
    "PackedHyperband": "shoal.tune.packed_hyperband",
    "Study": "shoal.tune.studies.study",
    "SuccessiveHalving": "shoal.tune.schedulers",
    "Trial": "shoal.tune.trial",
    "optimize": "shoal.tune.bridges.optimize",
    "train_trial": "shoal.tune.bridges.optimize",
}

__all__ = sorted(_HOME)

_FUNCTION = "shoal.tune.studies.api"

sys.modules[__name__].__class__ = CallablePackage
