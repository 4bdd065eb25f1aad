"""Find the Python state that some functions and objects can reach: closures, globals, attributes, containers.

The search covers the user's functions, objects, modules and classes. It also covers objects of library classes that the
user's code refers to, but never the globals and classes of libraries.
"""

from __future__ import annotations

import argparse
import collections
import contextvars
import dis
import functools
import queue
import random
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import Dataset

from shoal.engine.python_state import _contents, places
from shoal.engine.python_state.places import Path, Place, key_name, slot_names
from shoal.engine.python_state.user_code import (
    is_library_class,
    is_library_function,
    is_library_module,
    is_standard_class,
)
from shoal.utils.random_state import GENERATORS, NUMPY, PYTHON, Generator

MOST_OBJECTS = 200_000
"""The most objects that are searched; `Walk.complete` says whether these were all."""
TENSORS = frozenset({"_parameters", "_buffers", "_modules", "_flat_weights", "_flat_weight_refs"})
"""Attributes of a module that are handled separately. The last two are an RNN's second list of its parameters."""
HOOKS = tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, dict | set))
"""Containers that every module has and that are usually empty."""
_PLAIN = (
    int, float, complex, str, bytes, type(None), np.generic, torch.dtype, torch.device, torch.Size, torch.layout,
    Dataset, random.SystemRandom, types.CodeType, range, slice,
)  # fmt: skip
"""Classes of values that have no state, or whose state does not belong to the step, such as datasets."""
_STANDARD = (
    types.SimpleNamespace, argparse.Namespace, collections.UserDict, collections.UserList, collections.ChainMap,
    functools.cached_property, functools.partialmethod,
)  # fmt: skip
"""Classes of the standard library whose objects contain values of the user, unlike loggers, threads and files."""


class Walk:
    """A breadth-first search for all places that can be reached from some roots, each with its shortest path."""

    most: int | None = None
    """The most objects that are searched, if not `MOST_OBJECTS`."""

    def __init__(
        self,
        roots: Mapping[str, Any],
        *,
        skip: nn.Module | None = None,
        private: Mapping[str, Any] | None = None,
        known: Iterable[int] = (),
    ) -> None:
        """Search the roots.

        Args:
            roots: The functions and objects where the search starts, by name.
            skip: A model whose parameters and buffers are left out; its other attributes are not.
            private: More roots, such as a copy of a model, whose own attributes no other code can change. Only state
                that copies share is included, such as that of functions and classes.
            known: Ids of objects to leave out.
        """
        self.places: list[Place] = []
        self.complete = True
        self._skipped = set(map(id, skip.modules())) if skip is not None else set()
        tensors = (*skip.parameters(), *skip.buffers()) if skip is not None else ()
        self._seen: set[int] = {*known, *map(id, tensors)}
        self.reached: list[tuple[Path, Any]] = []
        """All objects that were searched, with their paths. The list keeps them alive, so that ids stay valid."""
        self.datasets: list[Dataset[Any]] = []
        """Datasets that the code refers to. They are not searched."""
        self._queue: deque[tuple[Path, Any, bool]] = deque(((name,), root, False) for name, root in roots.items())
        self._private = False
        self._mentioned: dict[int, tuple[dict[str, Any], set[str]]] = {}
        """The globals of Python modules, and the names among them that the code mentions."""
        self._modules: set[tuple[int, frozenset[str]]] = set()
        """The Python modules whose globals were searched, and for which names."""
        self._go()
        self._queue.extend(((name,), root, True) for name, root in (private or {}).items())
        self._go()
        for space, names in self._mentioned.values():
            path = ("globals", str(space.get("__name__", "?")))
            self.places.append(places.Globals(path, space, sorted(names)))

    @property
    def written(self) -> frozenset[str]:
        """The names of globals that the user's code writes to."""
        functions = [held for held in self.visited if isinstance(held, types.FunctionType)]
        return frozenset().union(*(mentioned(f.__code__)[1] for f in functions if not is_library_function(f)))

    @property
    def may_draw(self) -> bool:
        """Whether the user's code may draw from `random` or `numpy.random`, since it mentions or refers to them."""
        functions = [held for held in self.visited if isinstance(held, types.FunctionType)]
        mentions = any(_mentions_random(f) for f in functions if not is_library_function(f))
        return not self.complete or mentions or any(held is PYTHON or held is NUMPY for held in self.visited)

    @property
    def reads_environment(self) -> bool:
        """Whether the user's code may read environment variables, since it mentions `environ` or `getenv`."""
        functions = [held for held in self.visited if isinstance(held, types.FunctionType)]
        codes = [f.__code__ for f in functions if not is_library_function(f)]
        return any(not mentioned(code)[0].isdisjoint(("environ", "getenv")) for code in codes)

    @property
    def visited(self) -> list[Any]:
        """All objects that were searched."""
        return [value for _, value in self.reached]

    def _go(self) -> None:
        while self._queue:
            path, value, self._private = self._queue.popleft()
            self._visit(path, value)

    def _visit(self, path: Path, value: Any) -> None:
        if isinstance(value, _PLAIN) or id(value) in self._seen:
            return
        if len(self.reached) >= (self.most or MOST_OBJECTS):
            self.complete = False
            return
        self._seen.add(id(value))
        self.reached.append((path, value))
        kind: Any = type(value)
        look = _look_of(kind, self._looks)
        if look is not None:
            look(self, path, value)
            return
        if _contents.is_frame(value):
            self._note(_contents.FrameContent(path, value))
            return
        if _contents.is_iterator(value):
            self._note(_contents.Position((*path, ".__next__"), value))
        self._object(path, value)

    def _note(self, place: Place) -> None:
        if not self._private:
            self.places.append(place)

    def _push(self, path: Path, element: str, value: Any) -> None:
        if isinstance(value, Dataset):
            self.datasets.append(value)
        if id(value) not in self._seen and not isinstance(value, _PLAIN):
            self._queue.append(((*path, element), value, self._private))

    def _push_attribute(self, path: Path, owner: Any, name: str, value: Any) -> None:
        self._push(path, f".{name}", value)

    # --- code -------------------------------------------------------------------------------------------------------

    def _function(self, path: Path, function: types.FunctionType) -> None:
        self._private = False  # copies of a model share their functions and classes
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            if id(cell) not in self._seen:
                self._seen.add(id(cell))
                place = places.Cell((*path, f"<{name}>", ".cell_contents"), cell)
                self._note(place)
                self._push(path, f"<{name}>", place.get())
        self._push(path, ".__defaults__", function.__defaults__)
        self._push(path, ".__kwdefaults__", function.__kwdefaults__)
        self._attributes(path, function)
        if not is_library_function(function):
            self._names(function.__globals__, *mentioned(function.__code__))

    def _names(self, space: dict[str, Any], read: frozenset[str], written: frozenset[str]) -> None:
        """Search the globals that code mentions, also in other Python modules of the user that it mentions."""
        _, known = self._mentioned.setdefault(id(space), (space, set()))
        for name in sorted(read - known):
            if name not in space and name not in written:
                continue
            known.add(name)
            value = space.get(name)
            if not isinstance(value, types.ModuleType):
                self._push(("globals", str(space.get("__name__", "?"))), name, value)
        for name in sorted(read):
            value = space.get(name)
            if (
                isinstance(value, types.ModuleType)
                and vars(value) is not space
                and (id(value), read) not in self._modules
            ):
                self._modules.add((id(value), read))
                if not is_library_module(value.__name__, getattr(value, "__file__", None)):
                    self._names(vars(value), read, frozenset())

    def _method(self, path: Path, method: types.MethodType) -> None:
        self._push(path, ".__func__", method.__func__)
        self._push(path, ".__self__", method.__self__)

    def _builtin(self, path: Path, function: types.BuiltinFunctionType) -> None:
        """Search the object of a bound method that is written in C, such as `items.append`."""
        if not isinstance(function.__self__, types.ModuleType | type):
            self._push(path, ".__self__", function.__self__)

    def _partial(self, path: Path, value: functools.partial[Any]) -> None:
        for name, part in (("func", value.func), ("args", value.args), ("keywords", value.keywords)):
            self._push(path, f".{name}", part)
        self._attributes(path, value)

    def _wrapped(self, path: Path, value: Any) -> None:
        """Search a function with a `functools.cache`."""
        self._note(_contents.CachedCalls(path, value))
        self._push(path, ".__wrapped__", getattr(value, "__wrapped__", None))

    def _descriptor(self, path: Path, value: Any) -> None:
        for name in ("fget", "fset", "__func__", "func"):
            self._push(path, f".{name}", getattr(value, name, None))

    def _class(self, path: Path, kind: type) -> None:
        """Search the attributes and methods of a class of the user."""
        if is_library_class(kind):
            return
        self._private = False
        path = ("class", f"{kind.__module__}.{kind.__qualname__}")
        place = places.ClassAttributes(path, kind)
        self._note(place)
        for name, value in place.get().items():
            self._push_attribute(path, kind, name, value)
        for base in kind.__bases__:
            self._push(path, ".__bases__", base)

    # --- objects ----------------------------------------------------------------------------------------------------

    def _module(self, path: Path, module: nn.Module) -> None:
        groups = {"_modules": module._modules}
        if id(module) not in self._skipped:
            groups |= {"_parameters": module._parameters, "_buffers": module._buffers}  # type: ignore[dict-item]
        for attribute, group in groups.items():
            if isinstance(group, dict) and group:  # in a ScriptModule it is not a dict
                self._note(places.Items((*path, f".{attribute}"), group))
            for name, value in list(group.items()):
                self._push(path, f".{name}", value)
        empty = [value for name in HOOKS if (value := vars(module).get(name)) is not None and not len(value)]
        self._note(places.Empties((*path, ".hooks"), empty))
        self._seen.update(map(id, empty))
        self._attributes(path, module, TENSORS)
        self._push(path, ".__class__", type(module))

    def _object(self, path: Path, value: Any) -> None:
        kind = type(value)
        if is_standard_class(kind) and not isinstance(value, _STANDARD):
            return
        self._private &= not hasattr(kind, "__deepcopy__")  # `__deepcopy__` may return the object itself
        self._attributes(path, value)
        self._push(path, ".__class__", kind)

    def _attributes(self, path: Path, value: Any, without: frozenset[str] = frozenset()) -> None:
        kind: Any = type(value)
        if not isinstance(getattr(value, "__dict__", None), dict) and not slot_names(kind):
            return
        place = places.Attributes(path, value, without)
        held = place.get()
        if held or not isinstance(value, types.FunctionType):
            self._note(place)
        for name, attribute in held.items():
            self._push_attribute(path, value, name, attribute)

    def _reference(self, path: Path, value: weakref.ref[Any]) -> None:
        self._push(path, "()", value())

    # --- containers -------------------------------------------------------------------------------------------------

    def _list(self, path: Path, value: Any) -> None:
        self._note(places.Elements(path, value))
        self._tuple(path, value)
        self._subclass(path, value)

    def _tuple(self, path: Path, value: Iterable[Any]) -> None:
        items = tuple.__iter__(value) if isinstance(value, tuple) else list(value)  # its `__len__` may raise
        for index, item in enumerate(items):
            self._push(path, f"[{index}]", item)

    def _dict(self, path: Path, value: Any) -> None:
        writable = isinstance(value, MutableMapping)
        self._note(places.Items(path, value) if writable else places.ReadOnlyItems(path, value))
        hooks = path[-1].removeprefix(".") in HOOKS  # their keys differ between processes
        for index, (key, item) in enumerate(list(value.items())):
            if isinstance(item, _PLAIN):  # a vocabulary has many items
                continue
            self._push(path, f"[#{index}]" if hooks else key_name(key, index), item)
        self._subclass(path, value)

    def _set(self, path: Path, value: set[Any]) -> None:
        self._note(places.SetMembers(path, value))
        self._subclass(path, value)

    def _subclass(self, path: Path, value: Any) -> None:
        """Search the attributes and the class of a container whose class is the user's."""
        if not is_standard_class(type(value)):
            self._attributes((*path, ".__dict__"), value)
            self._push(path, ".__class__", type(value))

    def _waiting_items(self, path: Path, value: queue.Queue[Any]) -> None:
        self._push(path, ".queue", value.queue)
        self._object(path, value)

    def _tensor(self, path: Path, value: Tensor) -> None:
        if not is_lazy(value):
            self._note(_contents.TensorContent(path, value))

    def _variable(self, path: Path, value: contextvars.ContextVar[Any]) -> None:
        place = places.ContextVariable(path, value)
        self._note(place)
        self._push(path, ".get()", place.get())

    def _random_numbers(self, path: Path, value: Generator) -> None:
        if value is not PYTHON and value is not NUMPY:  # `ModuleStreams` keeps these
            self._note(_contents.RandomNumbers(path, value))

    def _as(kind: type[Place]) -> Callable[[Walk, Path, Any], None]:  # type: ignore[misc]
        return lambda self, path, value: self._note(kind(path, value))

    def _nothing(self, path: Path, value: Any) -> None:
        return

    _looks: tuple[tuple[Any, Callable[..., None]], ...] = (
        (Tensor, _tensor),
        (np.ndarray, _as(_contents.ArrayContent)),
        ((types.ModuleType, np.ufunc), _nothing),
        (types.FunctionType, _function),
        (types.MethodType, _method),
        (types.BuiltinFunctionType, _builtin),
        (functools.partial, _partial),
        (functools._lru_cache_wrapper, _wrapped),
        ((property, staticmethod, classmethod, functools.cached_property), _descriptor),
        (type, _class),
        (nn.Module, _module),
        (GENERATORS, _random_numbers),
        (contextvars.ContextVar, _variable),
        (weakref.ref, _reference),
        (tuple, _tuple),
        ((list, deque), _list),
        ((dict, types.MappingProxyType, weakref.WeakKeyDictionary, weakref.WeakValueDictionary), _dict),
        (set, _set),
        (queue.Queue, _waiting_items),
        (_contents.BUFFERS, _as(_contents.BufferContent)),
    )  # fmt: skip


@functools.lru_cache(maxsize=8192)
def _look_of(kind: Any, looks: tuple[tuple[Any, Callable[..., None]], ...]) -> Callable[..., None] | None:
    """Return the method that searches objects of a class; None for objects that are searched by their attributes."""
    return next((look for kinds, look in looks if issubclass(kind, kinds)), None)


def _mentions_random(function: types.FunctionType) -> bool:
    names = mentioned(function.__code__)[0]
    held = [function.__globals__.get(name) for name in names]
    return "random" in names or any(value is random or value is np.random for value in held)


@functools.lru_cache(maxsize=8192)
def mentioned(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names that code and its inner functions mention, and the names of globals that they write to."""
    read = set(code.co_names)
    written = {i.argval for i in dis.get_instructions(code) if i.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = mentioned(constant)
            read |= inner[0]
            written |= inner[1]
    return frozenset(read), frozenset(written)
