"""Layers where their resources are: `shoal.place(model, sample, ...)`, and what it takes and returns.

The package has the name of the function. Names are loaded when they are used, so that `shoal --help` does not import
torch.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from shoal.callable_package import CallablePackage

if TYPE_CHECKING:
    from shoal.place.graph import LayerGraph as LayerGraph
    from shoal.place.graph import trace_layers as trace_layers
    from shoal.place.links import Link as Link
    from shoal.place.placement import Placement as Placement
    from shoal.place.profile import Profile as Profile
    from shoal.place.profile import estimate_profile as estimate_profile
    from shoal.place.profile import measure_profile as measure_profile

    def __getattr__(name: str) -> Any: ...


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

_FUNCTION = "shoal.place.api"

sys.modules[__name__].__class__ = CallablePackage
