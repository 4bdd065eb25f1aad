"""Which layers are dealt: all of them, or every other one, so that no weight lies between two dealt layers.

A weight between two dealt layers is trained only where one worker has both of its ends: in one round of n. In layers of
many neurons that is enough, and n times fewer bytes travel for it. Convolutions have few channels, few bytes and much
to compute. There every other layer stays whole, the first one among them, so that every weight is trained in every
round, as in a residual network whose stream stays whole.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

from shoal.errors import SplitError
from shoal.split.subnets.units import Units

Layers = Literal["all", "alternate", "auto"]
WHOLE_LAYER = "every other layer stays whole (layers='all' cuts it)"


def neighbours(units: Units) -> dict[str, set[str]]:
    """For each group those that a weight lies between: units of both in two dimensions of one tensor."""
    found: dict[str, set[str]] = {name: set() for name in units.groups}
    for spans in units.spans.values():
        dims = [{use.group for use in span.uses} for span in spans]
        for place, one in enumerate(dims):
            for other in dims[place + 1 :]:
                for a in one:
                    for b in other - {a}:
                        found[a].add(b)
                        found[b].add(a)
    return found


def dealt_layers(units: Units, layers: str) -> Units:
    """The units that a split deals: of all layers, or of every other one; "auto": every other one where there are
    convolutions, and no residual stream is dealt."""
    if layers not in ("all", "alternate", "auto"):
        raise SplitError(f"layers is {layers!r}; use 'all', 'alternate' or 'auto'")
    if layers == "all" or units.blocks is not None:
        return units
    near = neighbours(units)
    dealt: set[str] = set()
    for chain in _chains(near):
        groups = [units.groups[name] for name in chain]
        convolutions = any(g.kind == "channel" for g in groups) and not any(g.stream for g in groups)
        dealt |= every_other(chain, near) if layers == "alternate" or convolutions else chain.keys()
    if len(dealt) == len(units.groups):
        return units
    return units.only([name for name in units.groups if name in dealt], dict.fromkeys(units.groups, WHOLE_LAYER))


def every_other(chain: dict[str, int], near: dict[str, set[str]]) -> set[str]:
    """Of groups with their distance from the first those at an odd one, no two of them neighbours; a group that has
    none is dealt itself."""
    if len(chain) == 1:
        return set(chain)
    found: set[str] = set()
    for name, distance in chain.items():
        if distance % 2 and not near[name] & found:
            found.add(name)
    return found


def _chains(near: dict[str, set[str]]) -> list[dict[str, int]]:
    """Groups that hang together, each with its distance from the first of them, the nearest first."""
    chains: list[dict[str, int]] = []
    known: set[str] = set()
    for first in near:
        if first in known:
            continue
        chain, waiting = {first: 0}, deque([first])
        while waiting:
            name = waiting.popleft()
            new = [other for other in sorted(near[name]) if other not in chain]
            chain |= dict.fromkeys(new, chain[name] + 1)
            waiting.extend(new)
        chains.append(chain)
        known |= chain.keys()
    return chains
