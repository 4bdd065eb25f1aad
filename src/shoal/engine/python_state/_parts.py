"""Split Python objects into their parts, to save or copy them, and build them again from such parts.

No user code is called: objects are made without `__init__`, and attributes are set without properties.
"""

from __future__ import annotations

import enum
import functools
import inspect
import itertools
import random
import types
import warnings
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from shoal.utils.random_state import get_state, set_state

CONTAINERS: tuple[Any, ...] = (
    list, set, bytearray, deque, OrderedDict, defaultdict, dict, types.SimpleNamespace,
)  # fmt: skip
"""Classes written in C whose objects can be split into parts, as can those of their subclasses."""
_ITERATORS: dict[str, Callable[..., Any]] = {
    "iter": iter, "reversed": reversed, "count": itertools.count, "cycle": itertools.cycle, "repeat": itertools.repeat,
    "islice": itertools.islice, "chain": itertools.chain, "enumerate": enumerate, "zip": zip,
}  # fmt: skip
"""Functions that an iterator's `__reduce__` may name to build the iterator again."""
_SOURCES: dict[str, Any] = {
    "python": random.Random, "torch": torch.Generator, "numpy": np.random.Generator, "old numpy": np.random.RandomState,
}  # fmt: skip
"""Classes of random generators."""
_HEAP_TYPE = 1 << 9
"""Py_TPFLAGS_HEAPTYPE, the flag of classes that are written in Python."""


class NotSavable(Exception):
    """Raised if a value cannot be split into parts or saved; the message says what it is."""


@dataclass(slots=True)
class Parts:
    """The parts from which an object can be built again."""

    kind: str
    """The entry of `MAKE` that builds it."""
    arguments: tuple[Any, ...]
    """The arguments for that entry."""
    items: list[Any] = field(default_factory=list)
    """Items that are added after it is built, and so may refer to it. For a dict, keys and values alternate."""
    attributes: dict[str, Any] = field(default_factory=dict)


def take_apart(value: Any) -> Parts:
    """Return the parts of an object, one level deep; raise NotSavable if that is not possible.

    The value must not be a tensor, an array, a function or a module.
    """
    kind = type(value)
    if kind in (tuple, frozenset, torch.Size):
        return Parts(kind.__name__, tuple(value))
    if isinstance(value, tuple):
        return Parts("tuple subclass", (kind, *tuple.__iter__(value)), attributes=_attributes(value))
    if isinstance(value, enum.Enum):
        return Parts("enum", (kind, value.name))
    if kind is range or kind is slice:
        return Parts(kind.__name__, (value.start, value.stop, value.step))
    if kind is torch.dtype or kind is torch.device:
        return Parts(kind.__name__, (str(value).removeprefix("torch."),))
    source = next((name for name, known in _SOURCES.items() if known is kind), None)
    if source is not None:
        return Parts("random numbers", (source, getattr(value, "device", None), get_state(value)))
    return _take_apart_object(value)


def _take_apart_object(value: Any) -> Parts:
    kind = type(value)
    if isinstance(value, types.BuiltinFunctionType):
        return Parts("bound", (value.__self__, value.__name__))
    if isinstance(value, types.MethodType):
        return Parts("method", (value.__func__, value.__self__))
    if isinstance(value, functools.partial):
        return Parts("partial", (value.func, value.args, dict(value.keywords)))
    if isinstance(value, weakref.ref) and value() is not None:
        return Parts("weakref", (value(),))
    base = _container(kind)
    if issubclass(base, dict):
        items = [part for pair in value.items() for part in pair]
    else:
        items = list(value) if base not in (object, types.SimpleNamespace) else []
    if base is object and not is_written_in_python(kind):
        if hasattr(value, "__next__"):
            return _take_apart_iterator(value)
        raise NotSavable(name_kind(value))
    if base is object and (kind.__module__ in ("builtins", "types") or not _can_be_made(kind)):
        raise NotSavable(name_kind(value))
    return Parts("object", (kind, getattr(value, "maxlen", None)), items, _attributes(value))


def _take_apart_iterator(value: Any) -> Parts:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # pickling itertools objects is deprecated
            make, arguments, *state = value.__reduce__()
    except Exception:
        raise NotSavable(name_kind(value)) from None
    name = next((name for name, known in _ITERATORS.items() if known is make), None)
    if name is None or len(state) > 1:
        raise NotSavable(name_kind(value))
    return Parts("iterator", (name, *arguments), state)


def _attributes(value: Any) -> dict[str, Any]:
    """Return an object's attributes, including those in `__slots__`."""
    attributes = dict(getattr(value, "__dict__", {}))
    for base in type(value).__mro__:
        for name, descriptor in vars(base).items():
            if isinstance(descriptor, types.MemberDescriptorType) and name != "__dict__" and hasattr(value, name):
                attributes[name] = getattr(value, name)
    return attributes


def _container(kind: type) -> Any:
    return next((base for base in CONTAINERS if issubclass(kind, base)), object)


def is_written_in_python(kind: type) -> bool:
    """Return whether a class and all of its bases are written in Python."""
    return all(base.__flags__ & _HEAP_TYPE for base in kind.__mro__[:-1])


def _can_be_made(kind: type) -> bool:
    """Return whether an object of a class can be made without `__init__`; one of Cython, as in pandas, cannot."""
    return not any(isinstance(vars(base).get("__new__"), types.BuiltinFunctionType) for base in kind.__mro__[:-1])


def name_kind(value: Any) -> str:
    """Return the name of a value's type with an article, such as "a generator"."""
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


# --- building objects -------------------------------------------------------------------------------------------------


def fill(made: Any, items: Sequence[Any], attributes: Mapping[str, Any]) -> None:
    """Add items and attributes to an object that was just built."""
    base = _container(type(made))
    if issubclass(base, dict):
        for key, value in zip(items[::2], items[1::2], strict=True):
            base.__setitem__(made, key, value)
    elif base is set:
        set.update(made, items)
    elif base is not object and items:
        base.extend(made, items)
    elif items:  # the state of an iterator
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made.__setstate__(items[0])
    for name, value in attributes.items():
        object.__setattr__(made, name, value)


def _make_object(kind: type, most: int | None) -> Any:
    made = _container(kind).__new__(kind)
    if most is not None:
        deque.__init__(made, (), most)
    return made


def _make_bound(owner: Any, name: str) -> Any:
    return inspect.getattr_static(type(owner), name).__get__(owner)


def _make_random_numbers(source: str, device: torch.device | None, state: Any) -> Any:
    if source == "numpy":
        bits = vars(np.random)[state["bit_generator"]]
        assert issubclass(bits, np.random.BitGenerator)
        made: Any = np.random.Generator(bits())
    else:
        made = torch.Generator(device) if source == "torch" else _SOURCES[source]()
    set_state(made, state)
    return made


MAKE: dict[str, Callable[..., Any]] = {
    "tuple": lambda *items: items,
    "frozenset": lambda *items: frozenset(items),
    "Size": lambda *items: torch.Size(items),
    "tuple subclass": lambda kind, *items: tuple.__new__(kind, items),
    "enum": lambda kind, name: kind.__members__[name],
    "range": range,
    "slice": slice,
    "dtype": lambda name: vars(torch)[name],
    "device": torch.device,
    "random numbers": _make_random_numbers,
    "bound": _make_bound,
    "method": types.MethodType,
    "partial": lambda function, arguments, keywords: functools.partial(function, *arguments, **keywords),
    "weakref": weakref.ref,
    "object": _make_object,
    "iterator": lambda name, *arguments: _ITERATORS[name](*arguments),
}
"""What makes an object from its arguments, by its kind."""
