"""What Python objects consist of: taken apart for a file or a copy, and put together again.

No code of a user's is called on the way: objects are made without `__init__`, and attributes are set past properties.
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
"""Classes written in C whose objects, and those of classes made from them, can be taken apart."""
_ITERATORS: dict[str, Callable[..., Any]] = {
    "iter": iter, "reversed": reversed, "count": itertools.count, "cycle": itertools.cycle, "repeat": itertools.repeat,
    "islice": itertools.islice, "chain": itertools.chain, "enumerate": enumerate, "zip": zip,
}  # fmt: skip
"""What makes an iterator again, from what its `__reduce__` says."""
_SOURCES: dict[str, Any] = {
    "python": random.Random, "torch": torch.Generator, "numpy": np.random.Generator, "old numpy": np.random.RandomState,
}  # fmt: skip
"""Generators of random numbers."""
_HEAP_TYPE = 1 << 9
"""A flag of classes that are written in Python."""


class NotSavable(Exception):
    """A value that cannot be taken apart or written; the message says what it is."""


@dataclass(slots=True)
class Parts:
    """What an object consists of."""

    kind: str
    """Which entry of `MAKE` makes it."""
    arguments: tuple[Any, ...]
    """What is needed to make it."""
    items: list[Any] = field(default_factory=list)
    """What is put into it afterwards, and so may hold the object itself; of a dict, keys and values in turn."""
    attributes: dict[str, Any] = field(default_factory=dict)


def take_apart(value: Any) -> Parts:
    """Say what an object consists of, one level deep; NotSavable where that cannot be said.

    Not for tensors, arrays, functions and modules.
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
    if base is object and kind.__module__ in ("builtins", "types"):
        raise NotSavable(name_kind(value))
    return Parts("object", (kind, getattr(value, "maxlen", None)), items, _attributes(value))


def _take_apart_iterator(value: Any) -> Parts:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # itertools will lose this one day
            make, arguments, *state = value.__reduce__()
    except Exception:
        raise NotSavable(name_kind(value)) from None
    name = next((name for name, known in _ITERATORS.items() if known is make), None)
    if name is None or len(state) > 1:
        raise NotSavable(name_kind(value))
    return Parts("iterator", (name, *arguments), state)


def _attributes(value: Any) -> dict[str, Any]:
    """An object's attributes, those in `__slots__` included."""
    attributes = dict(getattr(value, "__dict__", {}))
    for base in type(value).__mro__:
        for name, descriptor in vars(base).items():
            if isinstance(descriptor, types.MemberDescriptorType) and name != "__dict__" and hasattr(value, name):
                attributes[name] = getattr(value, name)
    return attributes


def _container(kind: type) -> Any:
    return next((base for base in CONTAINERS if issubclass(kind, base)), object)


def is_written_in_python(kind: type) -> bool:
    """Whether a class and all that it is made from are written in Python."""
    return all(base.__flags__ & _HEAP_TYPE for base in kind.__mro__[:-1])


def name_kind(value: Any) -> str:
    """Say what a value is, in two words: "a generator"."""
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


# --- putting together -------------------------------------------------------------------------------------------------


def fill(made: Any, items: Sequence[Any], attributes: Mapping[str, Any]) -> None:
    """Put into a new object what it holds."""
    base = _container(type(made))
    if issubclass(base, dict):
        for key, value in zip(items[::2], items[1::2], strict=True):
            base.__setitem__(made, key, value)
    elif base is set:
        set.update(made, items)
    elif base is not object and items:
        base.extend(made, items)
    elif items:  # of an iterator
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
