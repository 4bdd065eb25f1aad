"""Decide which DataLoaders may start the workers of an epoch while those of the epoch before it read the last batches.

A worker has a copy of the Dataset from the moment when it starts. So it may start early only if nothing that runs
before the epoch begins can change the Dataset, or what else the loader holds: no callback or listener of the user, and
no function of a job that can reach an object of the loader.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.data.loader import LoaderSource, reachable
from shoal.data.source import is_tensors
from shoal.engine.members.member import Member
from shoal.engine.members.ownership import Span, overlapping, spans_of
from shoal.engine.planning.memory import free_bytes
from shoal.engine.python_state.state_walk import Walk
from shoal.engine.python_state.user_code import is_library_class

_UNCHANGING = (
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.CodeType, types.WrapperDescriptorType,
    types.MethodDescriptorType, type(None), str, bytes, int, float, complex, tuple, frozenset, range, slice, enum.Enum,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
"""Classes of objects that cannot be changed themselves."""


def allow_overlaps(members: Sequence[Member]) -> None:
    """Let the loaders of these members, which are all that the run has, begin an epoch early where that is exact."""
    sources = {m.data.source for m in members if isinstance(m.data.source, LoaderSource)}
    candidates = [source for source in sources if source.loader.may_overlap]
    changeable = _changeable(members) if candidates else None
    if changeable is not None:
        changeable_ids, changeable_memory = set(map(id, changeable)), _memory(changeable)
        for source in candidates:
            used = _used(source)
            apart = changeable_ids.isdisjoint(map(id, used))
            source.overlaps = apart and not overlapping([changeable_memory, _memory(used)])
            source.loader.free_memory = partial(free_bytes, torch.device("cpu"))


def _changeable(members: Sequence[Member]) -> list[Any] | None:
    """Return the objects that code of these members could change between two epochs; None if not known."""
    roots: dict[str, Any] = {}
    for member in members:
        job = member.job
        code = (job.step, job.loss, job.metrics, job.schedule, job.optimizer, job.params, member.model)
        roots |= {f"{member.index} {number}": value for number, value in enumerate(code)}
    walk = Walk(roots)
    if not walk.complete or walk.written:
        return None
    validated = {id(m.job.val): m.job.val for m in members if not is_tensors(m.job.val)}
    read_here = [val for val in validated.values() if not getattr(val, "num_workers", 0)]
    return [value for value in (*walk.visited, *reachable(*walk.datasets, *read_here)) if _may_change(value)]


def _may_change(value: Any) -> bool:
    if isinstance(value, _UNCHANGING) or type(value).__module__ == "typing":
        return False
    return not isinstance(value, type) or not is_library_class(value)


def _memory(values: Sequence[Any]) -> list[Span]:
    """Return the memory of tensors and arrays among these objects, since another object may be a view of it."""
    memory: list[Span] = []
    for value in values:
        if isinstance(value, np.ndarray):
            while isinstance(value.base, np.ndarray):
                value = value.base
            start = value.__array_interface__["data"][0]
            memory.append((start, start + value.nbytes))
        elif isinstance(value, Tensor):
            memory += spans_of(value)
    return sorted({(start, end) for start, end in memory if start < end})


def _used(source: LoaderSource) -> list[Any]:
    """Return the objects that the loader's workers may use: those that its parts hold, and what their code mentions."""
    loader = source.loader.loader
    objects = list(reachable(loader, loader.worker_init_fn, *source.loader.parts))
    code = {*map(type, objects), *(value for value in objects if isinstance(value, types.FunctionType))}
    return [*objects, *Walk({str(number): value for number, value in enumerate(code)}).visited]
