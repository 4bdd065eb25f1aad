"""Units: what can be distributed over workers, so that each trains a narrow network of its own.

A unit is what must stay together: a neuron with its row in one layer and its column in the next, a channel with its
batch norm, an attention head with its rows of query, key and value. Units of one group are interchangeable. All of it
is plain data; `_coupling.py` finds it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import SplitError
from shoal.split.core.parts import Slice

WHOLE_STREAM = "a residual stream stays whole (streams=True cuts it)"

Keep = Mapping[str, Tensor]
"""Group -> the units that are kept, ascending. Groups that are not listed are kept whole."""


@dataclass(frozen=True, slots=True)
class Use:
    """Where the units of a group lie in one dimension of a tensor."""

    group: str
    tensor: str
    dim: int
    rows: Tensor
    """[units, rows of each]"""


@dataclass(frozen=True, slots=True)
class Group:
    """Units of one kind, in one layer."""

    name: str
    size: int
    """The number of units."""
    kind: str
    """What a unit is: "neuron", "channel", "head" or "block"."""
    uses: tuple[Use, ...]
    exact: bool = True
    """Whether the narrow network computes what the whole one does without the missing units. It does not if a layer
    norm is taken over them."""
    stream: bool = False
    """Whether this is the width of a residual stream: blocks add to it, and everything after them reads it."""


@dataclass(frozen=True, slots=True)
class Span:
    """One dimension of a tensor: its size, and which of its places belong to units."""

    size: int
    uses: tuple[Use, ...] = ()
    rows: bool = False
    """Whether the size also depends on the rows of the inputs."""

    def rows_of(self, keep: Keep) -> Tensor | None:
        """Return the places that are left, ascending; None for all."""
        mask = None
        for use in self.uses:
            if use.group in keep and len(keep[use.group]) < len(use.rows):
                mask = torch.ones(self.size, dtype=torch.bool) if mask is None else mask
                dropped = torch.ones(len(use.rows), dtype=torch.bool)
                dropped[keep[use.group]] = False
                mask[use.rows[dropped].reshape(-1)] = False
        return None if mask is None else mask.nonzero().reshape(-1)

    def left(self, keep: Keep) -> int:
        """Return how many places are left."""
        rows = self.rows_of(keep)
        return self.size if rows is None else len(rows)

    def factors(self, keep: Keep) -> Tensor:
        """Return, for each place that is left, the factor by which its share of a sum must grow to make up for missing
        ones."""
        factors = torch.ones(self.size, dtype=torch.float64)
        for use in self.uses:
            if use.group in keep:
                factors[use.rows.reshape(-1)] *= len(use.rows) / len(keep[use.group])
        rows = self.rows_of(keep)
        return factors if rows is None else factors[rows]


@dataclass(frozen=True, slots=True)
class Reader:
    """A parameter that sums over units."""

    tensor: str
    dim: int
    span: Span
    module: str
    """The module that makes the sum."""
    call: int | None
    """The place of the call, if the user's code makes the sum by a function."""
    normalised: bool
    """Whether only a normalisation reads the sum."""


@dataclass(frozen=True, slots=True)
class Sized:
    """A call in the user's code that names sizes, or sums."""

    name: str
    modules: tuple[str, ...]
    runs: tuple[int, ...]
    """For each of these modules, the number of its run."""
    dim: int
    outs: tuple[tuple[Span | None, ...], ...]
    """The dimensions of each result; None where the size comes from the inputs alone."""

    def cut(self, keep: Keep) -> bool:
        return any(d is not None and d.left(keep) != d.size for out in self.outs for d in out)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Residual blocks, as the units of one group."""

    group: str
    modules: tuple[str, ...]
    """Names of the blocks in the network."""
    tensors: tuple[frozenset[str], ...]
    """The parameters and buffers of each block."""

    def removed(self, keep: Keep) -> list[str]:
        """Return the blocks that are not kept."""
        blocks = set(keep[self.group].tolist()) if self.group in keep else set(range(len(self.modules)))
        return [name for index, name in enumerate(self.modules) if index not in blocks]

    def absent(self, keep: Keep) -> frozenset[str]:
        """Return the tensors that a part without these blocks does not have."""
        removed = set(self.removed(keep))
        return frozenset().union(*(t for name, t in zip(self.modules, self.tensors, strict=True) if name in removed))


@dataclass(frozen=True, slots=True)
class Units:
    """All groups of a network, and the tensors that stay whole."""

    groups: Mapping[str, Group]
    whole: Mapping[str, str]
    """Tensor -> why it stays whole for every worker."""
    spans: Mapping[str, tuple[Span, ...]]
    """The dimensions of every parameter and buffer."""
    readers: tuple[Reader, ...] = ()
    calls: tuple[Sized, ...] = ()
    resize: bool = False
    """Whether the user's own code names sizes that differ in a narrow network."""
    blocks: Blocks | None = field(default=None, repr=False)
    """The residual blocks, if they are the units."""

    def slices(self, keep: Keep) -> dict[str, Slice]:
        """Return where the pieces of all parameters and buffers lie, for a part that keeps these units."""
        self.check(keep)
        slices = {}
        absent = self.blocks.absent(keep) if self.blocks is not None else ()
        known: dict[Any, Tensor | None] = {}
        """Dimensions of the same units are the same rows, which are found once."""

        def rows_of(span: Span) -> Tensor | None:
            key = (span.size, *((use.group, id(use.rows)) for use in span.uses))
            if key not in known:
                known[key] = span.rows_of(keep)
            return known[key]

        for name, spans in self.spans.items():
            if name in absent:
                continue
            index = tuple(rows_of(span) for span in spans)
            slices[name] = Slice(name, index if any(rows is not None for rows in index) else ())
        return slices

    def mostly_cut(self) -> bool:
        """Return whether a worker gets only a piece of most weights."""
        sizes = [(math.prod(s.size for s in spans), any(s.uses for s in spans)) for spans in self.spans.values()]
        return 2 * sum(size for size, cut in sizes if cut) >= sum(size for size, _ in sizes)

    def check(self, keep: Keep) -> None:
        """Raise a SplitError if `keep` is not a choice of these units."""
        for name, rows in keep.items():
            if name not in self.groups:
                raise SplitError(f"there is no group of units called {name!r}; there are {', '.join(self.groups)}")
            size = self.groups[name].size
            if not len(rows) or rows.dtype != torch.long or bool((rows.diff() <= 0).any()):
                raise SplitError(
                    f"units of {name} must be whole numbers, ascending, and at least one; got {rows.tolist()}"
                )
            if int(rows[0]) < 0 or int(rows[-1]) >= size:
                raise SplitError(f"{name} has units 0 to {size - 1}; got {rows.tolist()}")

    def only(self, names: Sequence[str], reasons: Mapping[str, str]) -> Units:
        """Return the units with these groups alone. The others stay whole for the given reasons."""
        chosen = set(names)

        def spared(span: Any) -> Any:
            return span and replace(span, uses=tuple(u for u in span.uses if u.group in chosen))

        whole = dict(self.whole)
        for name, group in self.groups.items():
            if name not in chosen:
                whole.update({use.tensor: reasons.get(name, "left whole") for use in group.uses})
        return replace(
            self,
            groups={name: group for name, group in self.groups.items() if name in chosen},
            whole=whole,
            spans={name: tuple(spared(s) for s in spans) for name, spans in self.spans.items()},
            readers=tuple(replace(r, span=spared(r.span)) for r in self.readers),
            calls=tuple(replace(c, outs=tuple(tuple(spared(s) for s in out) for out in c.outs)) for c in self.calls),
        )


def without_streams(units: Units, streams: bool | str) -> Units:
    """Return the units that a split distributes. `streams`: whether units of residual streams are among them.

    "auto": no streams if most of the network's weights are cut without them. Every layer of a residual network reads
    the stream and adds to it. If the stream is distributed, no two blocks see the same stream twice; if it is whole,
    every weight is trained in every round by the worker that has its unit.
    """
    inner = [name for name, group in units.groups.items() if not group.stream]
    if streams is True or not inner or len(inner) == len(units.groups):
        return units
    inner_units = units.only(inner, dict.fromkeys(units.groups, WHOLE_STREAM))
    return units if streams == "auto" and not inner_units.mostly_cut() else inner_units


def find_units(model: nn.Module, inputs: tuple[Any, ...], *, blocks: bool = False, streams: bool = False) -> Units:
    """Find the units of a network by tracing it. Each group is checked numerically before it is returned.

    Args:
        model: Any network whose forward pass depends on shapes, not on the values of tensors.
        inputs: What it is called with: a batch of a few rows.
        blocks: Deal whole residual blocks instead.
        streams: Cut the width of a residual stream too where layer norms read it, such as a transformer's model width.
            A narrow network then normalises over fewer numbers than the whole one: left out unless asked for.

    >>> net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    >>> units = find_units(net, (torch.zeros(2, 4),))
    >>> [(group.name, group.size, group.kind) for group in units.groups.values()]
    [('0', 6, 'neuron')]
    >>> {name: piece.index for name, piece in units.slices({"0": torch.tensor([1, 4])}).items()}["2.weight"]
    (None, tensor([1, 4]))
    """
    from shoal.split.subnets._check import verified
    from shoal.split.subnets._grouping import units_of
    from shoal.split.subnets._record import record

    if blocks:
        from shoal.split.subnets._blocks import find_blocks

        return find_blocks(model, inputs)
    units = verified(model, units_of(record(model, inputs), streams=streams), inputs)
    if not units.groups:
        raise SplitError(nothing_to_cut(model, units))
    return units


def nothing_to_cut(model: nn.Module, units: Units) -> str:
    """Return one line: the main reason why nothing can be cut, and what to do."""
    reasons = [why for why in units.whole.values() if not why.startswith(("the inputs", "the outputs"))]
    reasons = reasons or list(units.whole.values()) or ["it has no parameters"]
    main = max(set(reasons), key=reasons.count)
    return (
        f"{type(model).__name__} has no units to distribute: {main}; a split needs a hidden width of at least two, as "
        "between two Linear or Conv layers"
    )
