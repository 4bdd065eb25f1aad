"""Searches over jobs: `shoal.tune(make_job, space, ...)`, and what it takes and returns.

The package has the name of the function. Names are loaded when they are used, so that `shoal --help` does not import
torch.
"""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.tune.packed_hyperband import PackedHyperband as PackedHyperband
    from shoal.tune.population import PBT as PBT
    from shoal.tune.schedulers import ASHA as ASHA
    from shoal.tune.schedulers import Goal as Goal
    from shoal.tune.schedulers import Hyperband as Hyperband
    from shoal.tune.schedulers import NoScheduler as NoScheduler
    from shoal.tune.schedulers import SuccessiveHalving as SuccessiveHalving
    from shoal.tune.trial import Trial as Trial

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


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'shoal.tune' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


class _Tune(ModuleType):
    @property
    def __doc__(self) -> str:  # type: ignore[override]
        """What `help(shoal.tune)` shows: the package, the call and its arguments."""
        function = import_module("shoal.tune.studies.api").tune
        arguments = inspect.signature(function).parameters.values()
        call = inspect.Signature([argument.replace(annotation=inspect.Parameter.empty) for argument in arguments])
        return f"{self.__dict__['__doc__']}\nshoal.tune{call}\n\n{inspect.getdoc(function)}\n"

    def __call__(self, *args: Any, **settings: Any) -> Any:
        return import_module("shoal.tune.studies.api").tune(*args, **settings)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(import_module("shoal.tune.studies.api").tune)


sys.modules[__name__].__class__ = _Tune
