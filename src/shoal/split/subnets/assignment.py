"""Choose which layers are distributed, and which units each worker gets in a round, from the seed and the round alone.

A weight between two distributed layers is trained only if one worker has both of its ends: in one round of n. For
layers with many neurons that is enough, and n times fewer bytes are sent. Convolutions have few channels, few bytes and
much to compute. There every other layer stays whole, including the first, so that every weight is trained in every
round, as in a residual network whose stream stays whole.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from shoal.errors import SplitError
from shoal.split.subnets._axes import Rows

if TYPE_CHECKING:
    from shoal.split.subnets.units import Group, Units

Layers = Literal["all", "alternate", "auto"]
WHOLE_LAYER = "every other layer stays whole (layers='all' cuts it)"


def assign_units(
    units: Units, shares: Sequence[float], *, seed: int, round: int, overlap: float = 0.0
) -> list[dict[str, Tensor]]:
    """Return, for each worker, the units of every group that it keeps, ascending.

    Units are drawn at random without replacement, anew in every round, so that over the rounds any two of them meet.
    The result depends on the arguments alone and is the same on every machine.

    Args:
        units: Of the network.
        shares: What each worker gets of every group, relative to the others': positive numbers.
        seed: Of the run.
        round: Its number.
        overlap: The fraction of a group's units that every worker gets, besides its own.
    """
    parts: list[dict[str, Tensor]] = [{} for _ in shares]
    for group in units.groups.values():
        order = shuffled(group.name, group.size, seed, round)
        common = round_half_up(overlap * group.size)
        for part, share_units in zip(parts, _divide(group, order[common:], shares, common), strict=True):
            units_of_part = np.sort(np.concatenate([order[:common], share_units]))
            part[group.name] = torch.from_numpy(units_of_part)
    return parts


def counts(size: int, shares: Sequence[float], least: int = 1) -> list[int]:
    """Divide `size` units by shares. The largest remainders are rounded up, and every share gets at least `least`.

    >>> counts(10, [1, 1, 1]), counts(10, [8, 1, 0.1])
    ([4, 3, 3], [8, 1, 1])
    """
    whole = math.fsum(shares)
    exact = [size * share / whole for share in shares]
    whole_parts = [int(e) for e in exact]
    remainders = sorted(range(len(shares)), key=lambda i: (whole_parts[i] - exact[i], i))
    for i in remainders[: size - sum(whole_parts)]:
        whole_parts[i] += 1
    while min(whole_parts) < least:
        most = max(range(len(whole_parts)), key=lambda i: (whole_parts[i], -i))
        whole_parts[whole_parts.index(min(whole_parts))] += 1
        whole_parts[most] -= 1
    return whole_parts


def _divide(group: Group, order: Rows, shares: Sequence[float], common: int) -> list[Rows]:
    """Divide the units that not all workers have by shares. Without common units, each worker needs one of its own."""
    if group.size < len(shares) and not common:
        raise SplitError(
            f"{len(shares)} workers, but layer {group.name!r} has {group.size} units ({group.kind}s): each worker "
            f"needs one; use at most {group.size} workers, a larger layer, or some overlap"
        )
    number = counts(len(order), shares, least=0 if common else 1)
    return np.split(order, np.cumsum(number)[:-1].astype(np.int64))


def round_half_up(value: float) -> int:
    return math.floor(value + 0.5)


def shuffled(name: str, size: int, seed: int, number: int) -> Rows:
    """Return a group's units in the order of a round. The group's name takes part, so that layers are drawn
    independently."""
    key = hashlib.sha256(f"shoal deal {seed} {number} {name}".encode()).digest()
    bits = np.random.Generator(np.random.Philox(key=int.from_bytes(key[:16], "little")))
    # argsort of raw draws: numpy promises the bit stream of Philox, not the algorithm of `permutation`.
    return np.argsort(bits.bit_generator.random_raw(size), kind="stable").astype(np.int64)


def neighbours(units: Units) -> dict[str, set[str]]:
    """Return, for each group, the groups that a weight connects it with."""
    pairs: dict[str, set[str]] = {name: set() for name in units.groups}
    for spans in units.spans.values():
        dims = [{use.group for use in span.uses} for span in spans]
        for place, one in enumerate(dims):
            for other in dims[place + 1 :]:
                for a in one:
                    for b in other - {a}:
                        pairs[a].add(b)
                        pairs[b].add(a)
    return pairs


def distributed_layers(units: Units, layers: str) -> Units:
    """Return the units that a split distributes: those of all layers, or of every other one.

    "auto": every other layer if there are convolutions and no residual stream is distributed.
    """
    if layers not in ("all", "alternate", "auto"):
        raise SplitError(f"layers is {layers!r}; use 'all', 'alternate' or 'auto'")
    if layers == "all" or units.blocks is not None:
        return units
    near = neighbours(units)
    distributed: set[str] = set()
    for chain in _chains(near):
        groups = [units.groups[name] for name in chain]
        convolutions = any(g.kind == "channel" for g in groups) and not any(g.stream for g in groups)
        distributed |= every_other(chain, near) if layers == "alternate" or convolutions else chain.keys()
    if len(distributed) == len(units.groups):
        return units
    return units.only([name for name in units.groups if name in distributed], dict.fromkeys(units.groups, WHOLE_LAYER))


def every_other(chain: dict[str, int], near: dict[str, set[str]]) -> set[str]:
    """Return the groups at an odd distance from the first, no two of them neighbours. A group without neighbours is
    included."""
    if len(chain) == 1:
        return set(chain)
    chosen: set[str] = set()
    for name, distance in chain.items():
        if distance % 2 and not near[name] & chosen:
            chosen.add(name)
    return chosen


def _chains(near: dict[str, set[str]]) -> list[dict[str, int]]:
    """Return connected groups, each with its distance from the first of them, the nearest first."""
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
