"""Make sure that networks share no memory, whatever their factories return.

A factory may return weights that it does not create anew: a pretrained backbone that all networks share, statistics as
buffers, a state dict loaded with `assign=True`, or the same module each time. Each job then trains a copy, so that its
result depends on that job alone, and the user's objects are unchanged. Memory addresses are compared, since two tensors
may be different objects with the same memory.
"""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shoal.data.source import parts
from shoal.engine.members.hooks import hooked_parameter
from shoal.errors import JobError, describe
from shoal.jobs.job import Job
from shoal.utils.random_state import restored, seed_modules

Span = tuple[int, int]
"""The first byte of a storage, and the one after its last."""

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_shares: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
"""For each factory's code, whether two of its networks share memory."""


def call_factory(job: Job) -> nn.Module:
    """Call a job's factory, or copy its module."""
    factory: Any = job.model
    if isinstance(factory, nn.Module):
        _refuse_lost(factory, "it is copied for its job")
        try:
            return copy.deepcopy(factory)
        except Exception as error:
            raise JobError(
                f"model cannot be copied for its job ({describe(error)}); pass a function that builds it"
            ) from error
    model = factory()
    if not isinstance(model, nn.Module):
        raise JobError(f"model built a {type(model).__name__}; the factory must return an nn.Module")
    return model


def build_model(job: Job) -> nn.Module:
    """Build the job's network with the default generator. It is copied if the factory would return the same memory
    again.

    Its modules keep the modes in which they are built; `enter_train_mode` makes the network ready for training.
    """
    model = call_factory(job)
    return copied(model) if gives_out_shared(job, model) else model


def copied(model: nn.Module) -> nn.Module:
    """Copy a network that shares memory with others."""
    _refuse_lost(model, "its factory returns weights that others share, so it is copied")
    try:
        attributes = [v for module in model.modules() for v in vars(module).values() if isinstance(v, torch.Tensor)]
        odd = [v for v in (*model.buffers(), *attributes) if v.layout in _COMPRESSED]  # deepcopy does not support them
        return copy.deepcopy(model, {id(tensor): tensor.detach().clone() for tensor in odd})
    except Exception as error:
        raise JobError(
            "its factory returns weights that others share, and the network cannot be copied "
            f"({describe(error)}); build a new network in each call"
        ) from error


def _refuse_lost(model: nn.Module, why: str) -> None:
    """Raise a JobError if a copy of the network would not have all that it has."""
    name = hooked_parameter(model)
    if name is not None:
        raise JobError(
            f"model has a gradient hook on parameter {name!r}, and {why}, which loses the hook; pass a function that "
            "builds the network and sets the hook"
        )
    tied = _tied_by_memory(model)
    if tied:
        raise JobError(
            f"model has parameter {tied[0]!r} in the same memory as {tied[1]!r}, and {why}, which gives them memory of "
            "their own; use one nn.Parameter for both, or pass a function that builds the network"
        )


def _tied_by_memory(model: nn.Module) -> tuple[str, str] | None:
    """Return the names of a parameter and another parameter or buffer that overlap in memory, which `copy.deepcopy`
    separates; None if there are none."""
    params = dict(model.named_parameters())
    named = [(n, t) for n, t in (*params.items(), *model.named_buffers()) if t.layout == torch.strided and spans_of(t)]
    extents = [(t.data_ptr(), t.data_ptr() + t.itemsize * _extent(t)) for _, t in named]
    sharing = overlapping([[extent] for extent in extents])
    for place in sorted(sharing):
        name, (start, end) = named[place][0], extents[place]
        others = (i for i in sharing if i != place and extents[i][0] < end and start < extents[i][1])
        other = next(others, None)
        if name in params and other is not None:
            return name, named[other][0]
    return None


def _extent(tensor: Tensor) -> int:
    """Return how many elements lie between a tensor's first and last one, both included."""
    steps = (stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.size(), strict=True))
    return 1 + sum(steps) if tensor.numel() else 0


def gives_out_shared(job: Job, model: nn.Module) -> bool:
    """Return whether the factory, called again, returns memory of this network. It is called once more for each
    code."""
    factory: Any = job.model
    if isinstance(factory, nn.Module):
        return False
    key = _code(factory)
    known = _shares.get(key) if key is not None else None
    if known is None:
        known = _shared_again(job, model)
        if key is not None:
            _shares[key] = known
    return known


def _shared_again(job: Job, model: nn.Module) -> bool:
    with _as_it_was(job.seed):
        try:
            again = call_factory(job)
        except Exception:  # it can be called only once, so it does not return the memory again
            return False
        return again is model or bool(overlapping([spans(model), spans(again)]))


def overlapping(networks: Sequence[Sequence[Span]]) -> set[int]:
    """Return the indices of the networks that share memory with another one.

    >>> sorted(overlapping([[(0, 4), (10, 12)], [(4, 8)], [(11, 20)]]))
    [0, 2]
    """
    sharing: set[int] = set()
    reach, whose = 0, -1
    for start, end, place in sorted((*span, place) for place, network in enumerate(networks) for span in network):
        if start < reach and place != whose:  # comparing with the span that reaches farthest is enough
            sharing |= {whose, place}
        if end > reach:
            reach, whose = end, place
    return sharing


def spans(model: nn.Module) -> list[Span]:
    """Return the memory of a network's parameters and buffers, each storage once."""
    storages: set[Span] = set()
    for tensor in (*model.parameters(), *model.buffers()):
        storages.update(spans_of(tensor))
    return sorted(storages)


def spans_of(tensor: Tensor) -> list[Span]:
    """Return the memory of a tensor's storage, or of those of its parts; none if it has no data."""
    if is_lazy(tensor) or tensor.is_nested:
        return []
    storages = [
        part.untyped_storage() for part in parts(tensor) if part.layout == torch.strided and part.device.type != "meta"
    ]
    return [(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages if storage.nbytes()]


@contextmanager
def _as_it_was(seed: int) -> Iterator[None]:
    """Seed torch and the other random modules inside this context; restore all of them afterwards."""
    with restored(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        seed_modules(seed)
        yield


def _code(factory: Any) -> Any | None:
    """Return a key for factories that differ only in the values they hold; None if nothing lives long enough."""
    while isinstance(factory, functools.partial):
        factory = factory.func
    if isinstance(factory, types.MethodType):
        factory = factory.__func__
    if isinstance(factory, types.FunctionType):
        return factory.__code__
    return factory if isinstance(factory, type) else None
