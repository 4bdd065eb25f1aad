"""Python state around a step: what closures, globals and objects hold, noticed and put back.

A step is tried before any training (on a copy of the model, on tensors without data). Whatever it reaches besides the
model (a counter in a closure, a generator of random numbers, a loss with a buffer) is not copied with the model; it is
noted here before, compared after, and put back as it was, so that the training itself finds what its solo loop finds.
"""

from __future__ import annotations

import functools
import random
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_MAX_DEPTH = 12
_MAX_ELEMENTS = 1_000_000
"""Larger tensors are compared by version alone, and not put back."""
_OURS = ("torch.", "numpy.", "shoal.", "builtins.", "collections.", "random.", "typing.", "abc.", "enum.")
"""Code that keeps no state of a user's in its globals."""
_LOOKED_AT = frozenset({"_parameters", "_buffers", "_modules", "_flat_weights", "_flat_weight_refs"})
_DESCRIBING = (types.MemberDescriptorType, types.GetSetDescriptorType)
_EMPTY = object()


class Kept:
    """The state that can be reached from some functions and objects."""

    def __init__(self, *roots: Any, skip: nn.Module | None = None) -> None:
        """`skip`: a model whose own parameters and buffers are somebody else's business."""
        modules = () if skip is None else tuple(skip.modules())
        tensors = () if skip is None else (*skip.parameters(), *skip.buffers())
        self._skipped = set(map(id, modules))
        self._seen: set[int] = set(map(id, tensors))
        self._held: list[Any] = []  # keeps ids from being given away
        self._checks: list[Callable[[], bool]] = []
        self._written: list[Callable[[], bool]] = []
        self._undo: list[Callable[[], None]] = []
        for root in roots:
            self._visit(root, 0)

    @property
    def changed(self) -> bool:
        """Whether anything is another thing than it was."""
        return any(check() for check in self._checks)

    @property
    def written(self) -> bool:
        """Whether a tensor was written to."""
        return any(check() for check in self._written)

    def restore(self) -> None:
        """Put back everything that can be."""
        for undo in self._undo:
            undo()

    def _visit(self, value: Any, depth: int) -> None:
        if value is None or isinstance(value, int | float | complex | str | bytes | type | types.ModuleType):
            return
        if id(value) in self._seen or depth > _MAX_DEPTH:
            return
        self._seen.add(id(value))
        self._held.append(value)
        for kinds, look in self._looks:
            if isinstance(value, kinds):
                look(self, value, depth + 1)
                return
        self._object(value, depth + 1)

    def _note(self, get: Callable[[], Any], put: Callable[[Any], None], same: Callable[[Any, Any], bool]) -> Any:
        before = get()
        self._checks.append(lambda: not same(get(), before))
        self._undo.append(lambda: None if same(get(), before) else put(before))
        return before

    def _tensor(self, value: Tensor, depth: int) -> None:
        version = value._version
        self._written.append(lambda: value._version != version)
        if value.numel() <= _MAX_ELEMENTS and type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided:
            before = value.detach().clone()

            def put() -> None:
                if value._version != version:
                    with torch.no_grad():
                        value.copy_(before)

            self._undo.append(put)

    def _array(self, value: np.ndarray[Any, Any], depth: int) -> None:
        if value.size <= _MAX_ELEMENTS:
            self._note(value.copy, lambda before: value.__setitem__(..., before), _same_array)

    def _function(self, function: types.FunctionType, depth: int) -> None:
        for cell in function.__closure__ or ():
            self._cell(cell, depth)
        self._visit(function.__defaults__, depth)
        self._visit(function.__kwdefaults__, depth)
        if not f"{function.__module__}.".startswith(_OURS):
            space = function.__globals__
            for name in _names(function.__code__):
                if name in space:
                    self._item(space, name, depth)

    def _cell(self, cell: types.CellType, depth: int) -> None:
        def put(value: Any) -> None:
            if value is _EMPTY:
                del cell.cell_contents
            else:
                cell.cell_contents = value

        self._visit(self._note(lambda: _contents(cell), put, _is), depth)

    def _item(self, space: dict[Any, Any], name: Any, depth: int) -> None:
        self._visit(self._note(lambda: space.get(name), lambda value: space.__setitem__(name, value), _is), depth)

    def _method(self, method: types.MethodType, depth: int) -> None:
        self._visit(method.__func__, depth)
        self._visit(method.__self__, depth)

    def _partial(self, value: functools.partial[Any], depth: int) -> None:
        for part in (value.func, value.args, value.keywords):
            self._visit(part, depth)

    def _list(self, value: Any, depth: int) -> None:
        def put(items: list[Any]) -> None:
            value.clear()
            value.extend(items)

        for item in self._note(lambda: list(value), put, _all_is):
            self._visit(item, depth)

    def _tuple(self, value: tuple[Any, ...], depth: int) -> None:
        for item in value:
            self._visit(item, depth)

    def _dict(self, value: Any, depth: int) -> None:
        def put(items: list[Any]) -> None:
            value.clear()
            value.update(items)

        def get() -> list[Any]:
            return list(value.items())

        for _, item in self._note(get, put, _same_items):
            self._visit(item, depth)

    def _set(self, value: set[Any], depth: int) -> None:
        def put(items: set[Any]) -> None:
            value.clear()
            value.update(items)

        self._note(lambda: set(value), put, lambda a, b: a == b)

    def _random(self, value: random.Random, depth: int) -> None:
        self._note(value.getstate, value.setstate, lambda a, b: a == b)

    def _numpy(self, value: np.random.Generator | np.random.RandomState, depth: int) -> None:
        bits: Any = value.bit_generator if isinstance(value, np.random.Generator) else value._bit_generator

        def put(state: Any) -> None:
            bits.state = state

        self._note(lambda: bits.state, put, lambda a, b: repr(a) == repr(b))

    def _generator(self, value: torch.Generator, depth: int) -> None:
        def put(state: Tensor) -> None:
            value.set_state(state)

        self._note(value.get_state, put, torch.equal)

    def _iterator(self, value: Any, depth: int) -> None:
        """Iterators cannot be put back; most can tell where they are, the others count as moving."""

        def place() -> Any:
            try:
                return value.__reduce__()
            except Exception:
                return object()

        before = place()
        self._checks.append(lambda: repr(place()) != repr(before))

    def _module(self, module: nn.Module, depth: int) -> None:
        groups = () if id(module) in self._skipped else (module._parameters, module._buffers)
        for group in (*groups, module._modules):
            self._dict(group, depth)
        for name in list(vars(module)):
            if name not in _LOOKED_AT:
                self._item(vars(module), name, depth)
        self._classes(module, depth)

    def _classes(self, value: Any, depth: int) -> None:
        """Attributes of the user's own classes, and what their methods reach."""
        for kind in type(value).__mro__:
            if id(kind) in self._seen or f"{kind.__module__}.".startswith(_OURS):
                continue
            self._seen.add(id(kind))
            for name, held in list(vars(kind).items()):
                if isinstance(held, types.FunctionType | staticmethod | classmethod | property):
                    self._visit(getattr(held, "fget", None) or getattr(held, "__func__", held), depth)
                elif not name.startswith("__") and not isinstance(held, _DESCRIBING):
                    get = functools.partial(getattr, kind, name, None)
                    self._visit(self._note(get, functools.partial(setattr, kind, name), _is), depth)

    def _object(self, value: Any, depth: int) -> None:
        self._attributes(value, depth)
        self._classes(value, depth)
        for kind in type(value).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                    get = functools.partial(getattr, value, name)
                    put = functools.partial(setattr, value, name)
                    self._visit(self._note(get, put, _is), depth)

    def _attributes(self, value: Any, depth: int) -> None:
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            self._dict(attributes, depth)

    def _nothing(self, value: Any, depth: int) -> None:
        return

    _looks: tuple[tuple[Any, Callable[..., None]], ...] = (
        (Tensor, _tensor),
        (np.ndarray, _array),
        ((Optimizer, types.BuiltinFunctionType, torch.dtype, torch.device, torch.utils.data.Dataset), _nothing),
        (types.FunctionType, _function),
        (types.MethodType, _method),
        (functools.partial, _partial),
        (nn.Module, _module),
        (random.Random, _random),
        ((np.random.Generator, np.random.RandomState), _numpy),
        (torch.Generator, _generator),
        (tuple, _tuple),
        ((list, deque), _list),
        (dict, _dict),
        (set, _set),
        (Mapping, _nothing),
        (Iterator, _iterator),
    )  # fmt: skip


@contextmanager
def kept(*roots: Any, skip: nn.Module | None = None) -> Iterator[Kept]:
    """Inside: Python may change what these hold. After: they hold what they held.

    `skip`: a model whose parameters and buffers are not looked at.
    """
    state = Kept(*roots, skip=skip)
    try:
        yield state
    finally:
        state.restore()


def _names(code: types.CodeType) -> set[str]:
    """Global names that code mentions, functions inside it included."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _names(constant)
    return found


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


def _is(a: Any, b: Any) -> bool:
    if a is b:
        return True
    return type(a) is type(b) and isinstance(a, int | float | str) and repr(a) == repr(b)


def _same_items(a: list[tuple[Any, Any]], b: list[tuple[Any, Any]]) -> bool:
    return len(a) == len(b) and all(_is(x[0], y[0]) and _is(x[1], y[1]) for x, y in zip(a, b, strict=True))


def _same_array(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    return a.tobytes() == b.tobytes()


def _all_is(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(_is(x, y) for x, y in zip(a, b, strict=True))
