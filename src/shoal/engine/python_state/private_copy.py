"""Copy functions and objects with everything that they contain, so that a job and its copy do not share state.

`copy.deepcopy` returns functions unchanged, while here they are copied with their closure cells. Objects that belong to
the process and not to a job are not copied: classes, modules, globals, files, loggers, locks.
"""

from __future__ import annotations

import argparse
import array
import copy
import ctypes
import enum
import functools
import queue
import random
import types
import weakref
from collections import UserDict, UserList
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import Dataset

from shoal.engine.python_state._contents import is_frame, is_iterator
from shoal.engine.python_state._parts import CONTAINERS, MAKE, NotSavable, fill, take_apart
from shoal.engine.python_state.user_code import is_standard_class
from shoal.jobs.job import Job

_CONSTANT = (
    type(None), bool, int, float, complex, str, bytes, type, types.ModuleType, np.generic, enum.Enum,
    np.ufunc, torch.dtype, torch.device, torch.Size, range, slice, types.CodeType, torch.jit.ScriptFunction, Dataset,
    Job,
)  # fmt: skip
_DEEP = (np.ndarray, random.Random, torch.jit.ScriptModule, array.array, ctypes.Array, ctypes._SimpleCData)
"""Classes whose objects are copied by `copy.deepcopy`."""
_STANDARD = (
    *CONTAINERS, argparse.Namespace, UserDict, UserList, tuple, frozenset, functools.partial, types.MethodType,
    weakref.ref,
)  # fmt: skip
"""Classes of the standard library whose objects contain values of the user."""


SMALL, MOST_TIMES = 1 << 20, 16
"""The memory of which a tensor is a part is copied as a whole if it has at most so many bytes, or at most so many times
those of the tensor."""


class PrivateCopies:
    """Makes copies that belong together: if two originals share an object, their copies share its copy."""

    def __init__(self) -> None:
        self.shared: list[Any] = []
        """Iterators that could not be copied, so that original and copy read from the same one."""
        self._made: dict[int, Any] = {}
        self._storages: dict[tuple[int, int], torch.UntypedStorage] = {}
        """Copies of memory, by the address and size of the original."""
        self._held: list[Any] = []  # keeps the objects alive, so that their ids stay valid

    def of(self, value: Any) -> Any:
        """Return a copy of a value, or the value itself if it has no state that could change or cannot be copied."""
        if isinstance(value, _CONSTANT):
            return value
        if id(value) not in self._made:
            self._held.append(value)
            self._make(value)
        return self._made[id(value)]

    def known(self, value: Any) -> Any:
        """Return the copy that was made of a value, or None."""
        return self._made.get(id(value))

    def _make(self, value: Any) -> None:
        """Copy a value. The copy is registered before its contents are copied, since these may refer back to it."""
        if isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, Tensor) and not is_lazy(value):
            self._tensor(value)
        elif isinstance(value, (*_DEEP, Tensor)):
            self._made[id(value)] = copy.deepcopy(value)
        elif is_frame(value):
            self._made[id(value)] = value.copy()
        elif type(value) in (queue.Queue, queue.LifoQueue, queue.PriorityQueue):
            made = self._made[id(value)] = type(value)(value.maxsize)
            made.queue, made.unfinished_tasks = self.of(value.queue), value.unfinished_tasks
        else:
            self._object(value)

    def _object(self, value: Any) -> None:
        """Copy an object by its parts; an object that cannot be split into parts is not copied."""
        self._made[id(value)] = value
        builtin = isinstance(value, types.BuiltinFunctionType)
        if builtin and (value.__self__ is None or isinstance(value.__self__, types.ModuleType | type)):
            return
        if is_standard_class(type(value)) and not (isinstance(value, _STANDARD) or builtin or is_iterator(value)):
            return
        try:
            parts = take_apart(value)
        except NotSavable:
            if is_iterator(value):
                self.shared.append(value)
            return
        self._held.append(parts)
        self._made[id(value)] = MAKE[parts.kind](*map(self.of, parts.arguments))
        attributes = {name: self.of(held) for name, held in parts.attributes.items()}
        fill(self._made[id(value)], [self.of(item) for item in parts.items], attributes)

    def _function(self, function: types.FunctionType) -> None:
        if not (function.__closure__ or function.__defaults__ or function.__kwdefaults__ or vars(function)):
            self._made[id(function)] = function
            return
        cells = tuple(self._cell(cell) for cell in function.__closure__ or ())
        made = types.FunctionType(function.__code__, function.__globals__, function.__name__, None, cells or None)
        self._made[id(function)] = made
        for name in ("__qualname__", "__module__", "__doc__", "__annotations__"):
            setattr(made, name, getattr(function, name))
        for cell, copied in zip(function.__closure__ or (), cells, strict=True):
            try:
                copied.cell_contents = self.of(cell.cell_contents)
            except ValueError:  # the cell is empty
                continue
        made.__defaults__ = self.of(function.__defaults__)
        made.__kwdefaults__ = self.of(function.__kwdefaults__)
        vars(made).update({name: self.of(held) for name, held in vars(function).items()})

    def _cell(self, cell: types.CellType) -> types.CellType:
        if id(cell) not in self._made:
            self._held.append(cell)
            self._made[id(cell)] = types.CellType()
        copied: types.CellType = self._made[id(cell)]
        return copied

    def _tensor(self, value: Tensor) -> None:
        made = self._copied(value.detach()).requires_grad_(value.requires_grad and value.is_leaf)
        made = nn.Parameter(made, value.requires_grad) if isinstance(value, nn.Parameter) else made
        self._made[id(value)] = made
        if value.is_leaf and value.grad is not None:
            made.grad = value.grad.detach().clone()

    def _copied(self, value: Tensor) -> Tensor:
        """Return a copy of a tensor; copies of tensors that share memory share theirs."""
        if type(value) is not Tensor or value.layout != torch.strided or value.is_quantized or value.is_meta:
            return value.clone()
        storage = value.untyped_storage()
        if value.is_conj() or value.is_neg() or storage.nbytes() > max(SMALL, MOST_TIMES * value.nbytes):
            return value.clone()
        key = (storage.data_ptr(), storage.nbytes())
        if key not in self._storages:
            self._held.append(storage)
            self._storages[key] = storage.clone()  # type: ignore[no-untyped-call]
        place = value.storage_offset(), value.size(), value.stride()
        return torch.empty(0, dtype=value.dtype, device=value.device).set_(self._storages[key], *place)
