"""Optimizer state as named tensors, so that it can be cut, sent and merged like the weights that it belongs to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.split.core.parts import Slice, Tensors


def moments_of(optimizer: Optimizer, network: nn.Module) -> Tensors:
    """Return an optimizer's state by "<parameter>/<name>". Numbers become tensors."""
    index_of = {id(parameter): index for index, parameter in enumerate(_parameters(optimizer))}
    state = {
        index_of[id(parameter)]: values for parameter, values in optimizer.state.items() if id(parameter) in index_of
    }
    return moments_in(state, order_of(optimizer, network))


def load_moments(optimizer: Optimizer, network: nn.Module, moments: Mapping[str, Tensor]) -> None:
    """Load moments into an optimizer; they must have the shapes of its parameters."""
    if not moments:
        return
    state = state_of(moments, order_of(optimizer, network))
    state = {index: {name: value.clone() for name, value in values.items()} for index, values in state.items()}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def order_of(optimizer: Optimizer, network: nn.Module) -> list[str]:
    """Name the optimizer's parameters, in its order; one that the network does not have is ""."""
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    return [names.get(id(parameter), "") for parameter in _parameters(optimizer)]


def state_of(moments: Mapping[str, Tensor], order: Sequence[str]) -> dict[int, dict[str, Tensor]]:
    """Convert moments into the form of an optimizer's state_dict, by the places of its parameters."""
    by_parameter: dict[str, dict[str, Tensor]] = {}
    for key, value in moments.items():
        parameter, _, name = key.rpartition("/")
        by_parameter.setdefault(parameter, {})[name] = value
    return {index: by_parameter[name] for index, name in enumerate(order) if name in by_parameter}


def moments_in(state: Mapping[int, Mapping[str, Any]], order: Sequence[str]) -> Tensors:
    """Convert the state of a state_dict into moments, "<parameter>/<name>" -> tensor: the inverse of `state_of`."""
    moments: Tensors = {}
    for index, values in state.items():
        for name, value in values.items():
            if isinstance(value, (Tensor, float, int)) and order[index]:
                moments[f"{order[index]}/{name}"] = torch.as_tensor(value).detach()
    return moments


def _parameters(optimizer: Optimizer) -> Iterator[Any]:
    for group in optimizer.param_groups:
        yield from group["params"]


def moment_slice(piece: Slice, weight: torch.Size, moment: torch.Size) -> Slice | None:
    """Say where a part's moment lies in the whole network's moment: as its weight does, along the dimensions they
    share.

    Returns None if it cannot be cut like its weight. It is not sent then.
    """
    if piece.whole or not moment:
        return Slice(piece.name)
    if len(moment) != len(weight) or any(m not in (1, w) for m, w in zip(moment, weight, strict=True)):
        return None
    dims = zip(piece.index, moment, weight, strict=False)
    return Slice(piece.name, tuple(rows if m == w else None for rows, m, w in dims))


def whole_shape(piece: Slice, weight: torch.Size, cut: tuple[int, ...], moment: torch.Size) -> torch.Size | None:
    """Return the shape of the whole network's moment from a part's; None if it is not cut like its weight.

    >>> rows = Slice("w", (torch.tensor([0, 2]),))
    >>> whole_shape(rows, torch.Size([4, 3]), (2, 3), torch.Size([2, 1]))
    torch.Size([4, 1])
    """
    if piece.whole or not moment:
        return moment
    if len(moment) != len(weight) or any(m not in (1, c) for m, c in zip(moment, cut, strict=True)):
        return None
    return torch.Size(w if m == c else m for m, c, w in zip(moment, cut, weight, strict=True))
