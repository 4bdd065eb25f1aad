"""The whole network while it is trained in parts: pieces are taken from it, and outcomes are written back.

A commit has the same bits wherever the parts were trained: sums are taken in the order of the parts, and a block with
one owner is copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shoal.errors import SplitError
from shoal.split.core.moments import moment_slice, whole_shape
from shoal.split.core.parts import Outcome, Part, Slice, Task, Tensors

_CPU = torch.device("cpu")
Slices = Mapping[str, Slice]
Piece = tuple[Slice, Tensor, float]
"""Where a piece lies in the whole tensor, its new value, and its weight in the mean."""


class State:
    """The whole network's parameters, buffers and optimizer state, on the device that trains the parts or on the CPU.

    Examples:
        >>> state = State.of(nn.Linear(2, 1, bias=False))
        >>> piece = {"weight": Slice("weight", (None, torch.tensor([1])))}
        >>> task = state.task(0, Part(number=0), piece)
        >>> outcome = Outcome(round=0, number=0, tensors={"weight": torch.full((1, 1), 7.0)})
        >>> state.commit([task.part], [piece], [outcome])
        >>> state.tensors["weight"][0, 1]
        tensor(7.)
    """

    def __init__(
        self, tensors: Tensors, moments: Tensors | None = None, fill: Mapping[str, float] | None = None
    ) -> None:
        self.tensors = tensors
        self.moments: Tensors = dict(moments or {})
        """Optimizer state by "<parameter>/<name>". What no part has trained yet is zero, or the value in `fill` for its
        name."""
        self._fill = dict(fill or {})
        self._rows: dict[int, tuple[Tensor, Tensor]] = {}
        """Copies on the device of the rows of this round's slices, by id. Parts share them."""

    @classmethod
    def of(
        cls,
        network: nn.Module,
        extra_tensors: Tensors | None = None,
        fill: Mapping[str, float] | None = None,
        device: torch.device | str = "cpu",
    ) -> State:
        """Copy all tensors of a network and its extra tensors. Tied weights are copied once, under their first name."""
        tensors = {**tensors_of(network), **(extra_tensors or {})}
        return cls({name: tensor.detach().to(device, copy=True) for name, tensor in tensors.items()}, fill=fill)

    # --- out ------------------------------------------------------------------------------------------------------

    def task(
        self, number: int, part: Part, slices: Slices, *, moments: bool = True, extras: Tensors | None = None
    ) -> Task:
        """Make the task of a part. Its tensors are copies."""
        tensors = {name: self._near(piece).take(self._whole(piece)) for name, piece in slices.items()}
        task_moments: Tensors = {}
        moments_by_owner = self._moments_by_owner() if moments else {}
        for name, piece in slices.items():
            for key, moment in moments_by_owner.get(piece.name, {}).items():
                location = moment_slice(piece, self._whole(piece).shape, moment.shape)
                if location is not None:
                    task_moments[f"{name}/{key}"] = self._near(location).take(moment)
        return Task(round=number, part=part, tensors=tensors, moments=task_moments, extras=extras or {})

    def load_into(self, network: nn.Module) -> None:
        """Load the weights and buffers into a network with the same names."""
        load_tensors(network, {name: self.tensors[name] for name in tensors_of(network)})

    def _whole(self, piece: Slice) -> Tensor:
        return self.tensors[piece.name]

    def _moments_by_owner(self) -> dict[str, Tensors]:
        by_owner: dict[str, Tensors] = {}
        for key, moment in self.moments.items():
            owner, _, name = key.rpartition("/")
            by_owner.setdefault(owner, {})[name] = moment
        return by_owner

    def _near(self, piece: Slice) -> Slice:
        """Move a slice's rows to the device of the state, once in a round."""
        device = next((tensor.device for tensor in self.tensors.values()), _CPU)
        if device.type == "cpu" or not piece.index:
            return piece
        return Slice(piece.name, tuple(None if rows is None else self._sent(rows, device) for rows in piece.index))

    def _near_all(self, pieces: Sequence[Piece], device: torch.device) -> list[Piece]:
        return [(self._near(location), value.to(device), weight) for location, value, weight in pieces]

    def _sent(self, rows: Tensor, device: torch.device) -> Tensor:
        if id(rows) not in self._rows:
            self._rows[id(rows)] = (rows, rows.to(device, non_blocking=True))
        return self._rows[id(rows)][1]

    # --- in -------------------------------------------------------------------------------------------------------

    def commit(self, parts: Sequence[Part], slices: Sequence[Slices], outcomes: Sequence[Outcome | None]) -> None:
        """Merge the outcomes of a round: each element becomes the mean over the parts that own it, in their order.

        An element with one owner is copied exactly. An element that no trained part owns keeps its value; parts that
        were lost or had no steps do not count. For whole numbers (counters) and an optimizer's step counts, the largest
        is taken.
        """
        arrived = _arrived(parts, slices, outcomes)
        moments: dict[str, list[Piece]] = {}
        for part_slices, outcome in arrived:
            for key, value in outcome.moments.items():
                self._place_moment(part_slices, key, value, moments)
        self._merge(self.tensors, _pieces(arrived))
        self._merge(self.moments, moments)
        self._rows = {}

    def _merge(self, into: Tensors, pieces: Mapping[str, list[Piece]]) -> None:
        """Write pieces into the tensors that they belong to. Pieces that do not overlap are copied."""
        disjoint_cache: dict[tuple[int, ...], bool] = {}
        for name, tensor_pieces in pieces.items():
            near = self._near_all(tensor_pieces, into[name].device)
            if disjoint([location for location, _, _ in tensor_pieces], disjoint_cache):
                for location, value, _ in near:
                    location.put(into[name], value)
            else:
                merge_(into[name], near, largest=into is self.moments and name.endswith("/step"))

    def _place_moment(self, part_slices: Slices, key: str, value: Tensor, pieces: dict[str, list[Piece]]) -> None:
        """Add a part's piece of optimizer state to `pieces`, creating the whole tensor if it is new."""
        parameter, _, name = key.rpartition("/")
        piece = part_slices[parameter]
        weight, key_in_whole = self._whole(piece), f"{piece.name}/{name}"
        shape = whole_shape(piece, weight.shape, piece.shape(weight.shape), value.shape)
        if shape is None:
            return
        if key_in_whole not in self.moments:
            initial = torch.full(shape, self._fill.get(name, 0.0), dtype=value.dtype, device=value.device)
            self.moments[key_in_whole] = initial
        location = moment_slice(piece, weight.shape, self.moments[key_in_whole].shape)
        if location is not None:
            pieces.setdefault(key_in_whole, []).append((location, value, 1.0))

    def gradients(
        self, parts: Sequence[Part], slices: Sequence[Slices], outcomes: Sequence[Outcome | None], trained: set[str]
    ) -> Tensors:
        """Return the mean of the gradients that came back, weighted by rows: the gradient of all rows at once.

        Tensors that are not in `trained` (buffers) are committed directly.
        """
        gradients: Tensors = {}
        for name, own_pieces in _pieces(_arrived(parts, slices, outcomes), by_rows=True).items():
            near = self._near_all(own_pieces, self.tensors[name].device)
            if name in trained:
                gradients[name] = torch.zeros_like(self.tensors[name])
                merge_(gradients[name], near)
            else:
                merge_(self.tensors[name], near)
        self._rows = {}
        return gradients

    # --- for a checkpoint -----------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return all tensors as plain data, on the CPU."""
        return {
            "tensors": {name: tensor.cpu() for name, tensor in self.tensors.items()},
            "moments": {name: tensor.cpu() for name, tensor in self.moments.items()},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state()` returned."""
        where = {name: tensor.device for name, tensor in self.tensors.items()}
        self.tensors = {name: tensor.to(where[name]) for name, tensor in state["tensors"].items()}
        self.moments = {
            name: tensor.to(where[name.rpartition("/")[0]] if tensor.dim() else _CPU)
            for name, tensor in state["moments"].items()
        }


def _arrived(
    parts: Sequence[Part], slices: Sequence[Slices], outcomes: Sequence[Outcome | None]
) -> list[tuple[Slices, Outcome]]:
    """Return the outcomes of parts that were trained and not lost, each with its slices."""
    every = zip(parts, slices, outcomes, strict=True)
    return [(part_slices, outcome) for part, part_slices, outcome in every if outcome is not None and part.steps]


def _pieces(arrived: Sequence[tuple[Slices, Outcome]], *, by_rows: bool = False) -> dict[str, list[Piece]]:
    """Collect the pieces of each tensor that came back, with equal weights or weighted by rows."""
    pieces: dict[str, list[Piece]] = {}
    for part_slices, outcome in arrived:
        for name, value in outcome.tensors.items():
            piece = (part_slices[name], value, float(outcome.rows) if by_rows else 1.0)
            pieces.setdefault(part_slices[name].name, []).append(piece)
    return pieces


def named_state(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name. Tied weights appear once, under their first name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def tensors_of(network: nn.Module) -> Tensors:
    """Return parameters and buffers by name, detached. Raises a SplitError if one has no shape yet."""
    tensors = named_state(network)
    lazy = next((name for name, tensor in tensors.items() if is_lazy(tensor)), None)
    if lazy is not None:
        raise SplitError(f"{lazy!r} has no shape yet; run one batch through the network before it is split")
    return {name: tensor.detach() for name, tensor in tensors.items()}


@torch.no_grad()
def load_tensors(network: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy these values into a network with the same names and shapes."""
    network_tensors = tensors_of(network)
    assert network_tensors.keys() == tensors.keys(), "a part's network and its slices have the same names"
    for name, tensor in network_tensors.items():
        assert tensor.shape == tensors[name].shape, f"{name} has one shape in the network and another in its slice"
        tensor.copy_(tensors[name])


def disjoint(places: Sequence[Slice], known: dict[tuple[int, ...], bool]) -> bool:
    """Return whether no two slices share an element, because in some dimension no two share a row.

    `known` caches the answers by rows, which many tensors have in common.
    """
    for rows in zip(*(piece.index for piece in places), strict=False):
        if any(taken is None for taken in rows):
            continue
        key = tuple(map(id, rows))
        if key not in known:
            all_rows = torch.cat(rows)
            known[key] = int(all_rows.bincount().max()) == 1 if len(all_rows) else True
        if known[key]:
            return True
    return False


@torch.no_grad()
def merge_(whole: Tensor, pieces: Sequence[Piece], *, largest: bool = False) -> None:
    """Write pieces into the whole tensor, in place. Where several own an element, take the weighted mean.

    For whole numbers, or with `largest`, take the largest instead. Where all owners have the same value, it is copied:
    a mean of equal numbers may be rounded.
    """
    if len(pieces) == 1:
        pieces[0][0].put(whole, pieces[0][1])
        return
    if largest or not (whole.is_floating_point() or whole.is_complex()):
        _largest_(whole, pieces)
        return
    wide = whole.dtype if whole.dtype not in (torch.float16, torch.bfloat16) else torch.float32
    total = torch.zeros_like(whole, dtype=wide)
    owners = torch.zeros_like(whole, dtype=wide if not wide.is_complex else torch.float64)
    equal = len({weight for _, _, weight in pieces}) == 1
    first, agreed = torch.zeros_like(whole, dtype=wide), torch.ones_like(whole, dtype=torch.bool)
    for location, value, _ in reversed(pieces):
        location.put(first, value.to(wide))
    for location, value, weight in pieces:
        weight = 1.0 if equal else weight
        location.put(agreed, location.take(agreed) & (location.take(first) == value.to(wide)))
        location.put(total, location.take(total) + (value.to(wide) if weight == 1.0 else value.to(wide) * weight))
        location.put(owners, location.take(owners) + weight)
    owned = owners > 0
    mean = torch.where(agreed, first, total / owners.masked_fill(~owned, 1.0))
    whole.copy_(torch.where(owned, mean, whole.to(wide)))


def _largest_(whole: Tensor, pieces: Sequence[Piece]) -> None:
    first, *others = pieces
    first[0].put(whole, first[1])
    written = torch.zeros_like(whole, dtype=torch.bool)
    first[0].put(written, torch.ones_like(first[1], dtype=torch.bool))
    for location, value, _ in others:
        current = location.take(whole)
        location.put(whole, torch.where(location.take(written), torch.maximum(current, value), value))
        location.put(written, torch.ones_like(value, dtype=torch.bool))
