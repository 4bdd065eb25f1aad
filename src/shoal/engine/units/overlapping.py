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

import torch

from shoal.data.loader import LoaderSource, reachable
from shoal.data.source import is_tensors
from shoal.engine.members.member import Member
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
    overlapping = [source for source in sources if source.loader.may_overlap]
    changeable = _changeable(members) if overlapping else None
    if changeable is not None:
        for source in overlapping:
            source.overlaps = changeable.isdisjoint(map(id, _used(source)))
            source.loader.free_memory = partial(free_bytes, torch.device("cpu"))


def _changeable(members: Sequence[Member]) -> set[int] | None:
    """Return the ids of objects that code of these members could change between two epochs; None if not known."""
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
    return {id(value) for value in (*walk.visited, *reachable(*walk.datasets, *read_here)) if _may_change(value)}


def _may_change(value: Any) -> bool:
    if isinstance(value, _UNCHANGING) or type(value).__module__ == "typing":
        return False
    return not isinstance(value, type) or not is_library_class(value)


def _used(source: LoaderSource) -> list[Any]:
    """Return the objects that the loader's workers may use: those that its parts hold, and what their code mentions."""
    loader = source.loader.loader
    objects = list(reachable(loader, loader.worker_init_fn, *source.loader.parts))
    code = {*map(type, objects), *(value for value in objects if isinstance(value, types.FunctionType))}
    return [*objects, *Walk({str(number): value for number, value in enumerate(code)}).visited]
