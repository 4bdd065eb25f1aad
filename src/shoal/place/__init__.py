"""Layers where their resources are: `shoal.place(model, sample, ...)`, and what it takes and returns.

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
    from shoal.place.graph import LayerGraph as LayerGraph
    from shoal.place.graph import trace_layers as trace_layers
    from shoal.place.links import Link as Link
    from shoal.place.placement import Placement as Placement
    from shoal.place.profile import Profile as Profile
    from shoal.place.profile import estimate_profile as estimate_profile
    from shoal.place.profile import measure_profile as measure_profile

_HOME = {
    "LayerGraph": "shoal.place.graph",
    "Link": "shoal.place.links",
    "Placement": "shoal.place.placement",
    "Profile": "shoal.place.profile",
    "estimate_profile": "shoal.place.profile",
    "measure_profile": "shoal.place.profile",
    "trace_layers": "shoal.place.graph",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'shoal.place' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


class _Place(ModuleType):
    @property
    def __doc__(self) -> str:  # type: ignore[override]
        """What `help(shoal.place)` shows: the package, the call and its arguments."""
        function = import_module("shoal.place.api").place
        arguments = inspect.signature(function).parameters.values()
        call = inspect.Signature([argument.replace(annotation=inspect.Parameter.empty) for argument in arguments])
        return f"{self.__dict__['__doc__']}\nshoal.place{call}\n\n{inspect.getdoc(function)}\n"

    def __call__(self, *args: Any, **settings: Any) -> Any:
        return import_module("shoal.place.api").place(*args, **settings)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(import_module("shoal.place.api").place)


sys.modules[__name__].__class__ = _Place
