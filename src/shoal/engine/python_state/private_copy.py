"""Copies of functions and objects with all that they hold, so that two jobs which begin alike do not share state.

`copy.deepcopy` takes a function for a constant; here it gets closure cells of its own. What belongs to a process and
not to a job stays as it is: classes, modules, globals, files, loggers, locks.
"""

from __future__ import annotations

import argparse
import copy
import functools
import random
import types
import weakref
from collections import UserDict, UserList, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import Dataset

from shoal.engine.python_state._contents import is_iterator
from shoal.engine.python_state.user_code import is_standard_class
from shoal.jobs.job import Job

_HEAP_TYPE = 1 << 9
"""A flag of classes that are written in Python."""
_STANDARD = (types.SimpleNamespace, argparse.Namespace, UserDict, UserList)
"""Classes of the standard library whose objects hold a user's values."""
_KEPT = (
    type(None), bool, int, float, complex, str, bytes, type, types.ModuleType, np.generic,
    np.ufunc, torch.dtype, torch.device, torch.Size, range, slice, types.CodeType, torch.jit.ScriptFunction, Dataset,
    Job,
)  # fmt: skip


class PrivateCopies:
    """Copies that belong together: what two of the originals share, their copies share as well."""

    def __init__(self) -> None:
        self.shared: list[Any] = []
        """Iterators that could not be copied: original and copy read from the same one."""
        self._made: dict[int, Any] = {}
        self._held: list[Any] = []  # keeps ids from being given away

    def of(self, value: Any) -> Any:
        """A copy; a function or an object that holds nothing that could change may be itself."""
        if isinstance(value, _KEPT):
            return value
        if id(value) not in self._made:
            self._held.append(value)
            self._make(value)
        return self._made[id(value)]

    def known(self, value: Any) -> Any:
        """The copy that was made of something; None where there is none."""
        return self._made.get(id(value))

    def _make(self, value: Any) -> None:
        """Note the copy before what it holds is copied: that may lead back to it."""
        for kinds, make in self._makers:
            if isinstance(value, kinds):
                make(self, value)
                return
        if is_iterator(value):
            self._iterator(value)
        else:
            self._object(value)

    def _note(self, value: Any, made: Any) -> Any:
        self._made[id(value)] = made
        return made

    def _function(self, function: types.FunctionType) -> None:
        if not (function.__closure__ or function.__defaults__ or function.__kwdefaults__ or vars(function)):
            self._note(function, function)
            return
        cells = tuple(self._cell(cell) for cell in function.__closure__ or ())
        made = types.FunctionType(function.__code__, function.__globals__, function.__name__, None, cells or None)
        self._note(function, made)
        for name in ("__qualname__", "__module__", "__doc__", "__annotations__"):
            setattr(made, name, getattr(function, name))
        for cell, own in zip(function.__closure__ or (), cells, strict=True):
            self._fill(cell, own)
        made.__defaults__ = self.of(function.__defaults__)
        made.__kwdefaults__ = self.of(function.__kwdefaults__)
        vars(made).update({name: self.of(held) for name, held in vars(function).items()})

    def _cell(self, cell: types.CellType) -> types.CellType:
        if id(cell) not in self._made:
            self._held.append(cell)
            self._note(cell, types.CellType())
        found: types.CellType = self._made[id(cell)]
        return found

    def _fill(self, cell: types.CellType, own: types.CellType) -> None:
        try:
            held = cell.cell_contents
        except ValueError:
            return
        own.cell_contents = self.of(held)

    def _method(self, method: types.MethodType) -> None:
        self._note(method, types.MethodType(self.of(method.__func__), self.of(method.__self__)))

    def _builtin(self, function: types.BuiltinFunctionType) -> None:
        """A function of a module, or a method of an object that is written in C, such as a generator's."""
        owner: Any = function.__self__
        mine = owner is not None and not isinstance(owner, types.ModuleType | type)
        self._note(function, getattr(self.of(owner), function.__name__) if mine else function)

    def _partial(self, value: functools.partial[Any]) -> None:
        arguments = [self.of(argument) for argument in value.args]
        keywords = {name: self.of(argument) for name, argument in value.keywords.items()}
        self._note(value, functools.partial(self.of(value.func), *arguments, **keywords))

    def _tensor(self, value: Tensor) -> None:
        if is_lazy(value):
            self._deep(value)
            return
        made = value.detach().clone().requires_grad_(value.requires_grad and value.is_leaf)
        made = nn.Parameter(made, value.requires_grad) if isinstance(value, nn.Parameter) else made
        self._note(value, made)
        if value.is_leaf and value.grad is not None:
            made.grad = value.grad.detach().clone()

    def _list(self, value: Any) -> None:
        kind: Any = type(value)
        made = kind.__new__(kind) if kind is not deque else deque(maxlen=value.maxlen)
        self._note(value, made)
        (made.update if isinstance(made, set) else made.extend)([self.of(item) for item in value])
        self._attributes(value, made)

    def _dict(self, value: Any) -> None:
        kind: Any = type(value)
        made = kind.__new__(kind) if kind is not defaultdict else defaultdict(self.of(value.default_factory))
        self._note(value, made)
        for key, item in value.items():
            made[self.of(key)] = self.of(item)
        self._attributes(value, made)

    def _tuple(self, value: tuple[Any, ...]) -> None:
        self._note(value, tuple.__new__(type(value), [self.of(item) for item in value]))

    def _frozen(self, value: frozenset[Any]) -> None:
        self._note(value, frozenset(map(self.of, value)))

    def _deep(self, value: Any) -> None:
        self._note(value, copy.deepcopy(value))

    def _generator(self, value: torch.Generator) -> None:
        made = torch.Generator(value.device)
        made.set_state(value.get_state())
        self._note(value, made)

    def _reference(self, value: weakref.ref[Any]) -> None:
        target = value()
        self._note(value, value if target is None else weakref.ref(self.of(target)))

    def _iterator(self, value: Any) -> None:
        """Most iterators of Python's own are copied with what they go through; a generator cannot be."""
        if all(base.__flags__ & _HEAP_TYPE for base in type(value).__mro__[:-1]):
            self._object(value)
            return
        try:
            self._deep(value)
        except Exception:
            self.shared.append(value)
            self._note(value, value)

    def _object(self, value: Any) -> None:
        """An object of a class that is written in Python, by its attributes; others stay as they are."""
        kind: Any = type(value)
        bases = [base for base in kind.__mro__ if base is not object]
        if is_standard_class(kind) and not isinstance(value, _STANDARD):
            self._note(value, value)
        elif isinstance(value, types.SimpleNamespace) or all(base.__flags__ & _HEAP_TYPE for base in bases):
            self._attributes(value, self._note(value, kind.__new__(kind)))
        else:
            self._note(value, value)

    def _attributes(self, value: Any, made: Any) -> None:
        if hasattr(value, "__dict__"):
            made.__dict__.update({name: self.of(held) for name, held in vars(value).items()})
        for base in type(value).__mro__:
            for name, descriptor in vars(base).items() if not is_standard_class(base) else ():
                if isinstance(descriptor, types.MemberDescriptorType) and hasattr(value, name):
                    descriptor.__set__(made, self.of(getattr(value, name)))

    _makers: tuple[tuple[Any, Callable[..., None]], ...] = (
        (types.FunctionType, _function),
        (types.MethodType, _method),
        (types.BuiltinFunctionType, _builtin),
        (functools.partial, _partial),
        (Tensor, _tensor),
        ((np.ndarray, random.Random, np.random.Generator, np.random.RandomState, torch.jit.ScriptModule), _deep),
        (torch.Generator, _generator),
        (weakref.ref, _reference),
        (tuple, _tuple),
        (frozenset, _frozen),
        ((list, set, deque, bytearray), _list),
        (dict, _dict),
    )  # fmt: skip
