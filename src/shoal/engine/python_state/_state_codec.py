"""Python values as plain data: numbers, strings, lists, dicts and tensors, from which the same values are made again.

Objects that another process has as well, since it builds the same jobs, are written as the way to them (see
`state_walk`). Others are written by what they hold, each once, however often it occurs. No code of a user's is called
when they are read: objects are made without `__init__`, and only of classes that the program has loaded already.
"""

from __future__ import annotations

import enum
import functools
import inspect
import itertools
import random
import sys
import types
import warnings
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shoal.engine.python_state.places import Path

Plain = Any
"""None, numbers, strings, bytes; or a list whose first element says what it is."""

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_DICTS: dict[str, type] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_LISTS: dict[str, type] = {"list": list, "set": set, "bytearray": bytearray}
_ITERATORS: dict[str, Callable[..., Any]] = {
    "iter": iter, "reversed": reversed, "count": itertools.count, "cycle": itertools.cycle, "repeat": itertools.repeat,
    "islice": itertools.islice, "chain": itertools.chain, "enumerate": enumerate, "zip": zip,
}  # fmt: skip
"""What makes an iterator again, from what its `__reduce__` says."""
_HEAP_TYPE = 1 << 9
"""A flag of classes that are written in Python."""
_MANY = 64
"""Numbers in a list from which they are written as an array."""


class NotSavable(Exception):
    """A value that cannot be written; the message says what it is."""


class Encoder:
    """Writes values. `paths`: the ways to objects that the reader has as well, by their ids."""

    def __init__(self, paths: Mapping[int, Path]) -> None:
        self.nodes: list[Plain] = []
        self._paths = paths
        self._numbers: dict[int, int] = {}
        self._held: list[Any] = []

    def value(self, value: Any, *, anew: bool = False) -> Plain:
        """A value as plain data, with what it holds in `nodes`; NotSavable, and nothing written, where it cannot be.

        `anew`: so that the reader makes an object like it, also where it has one already.
        """
        count = len(self.nodes)
        try:
            return self._number(value) if anew else self._value(value)
        except (NotSavable, RecursionError) as error:
            del self.nodes[count:]
            self._numbers = {key: number for key, number in self._numbers.items() if number < count}
            raise NotSavable(str(error) if isinstance(error, NotSavable) else "a structure nested too deeply") from None

    def _value(self, value: Any) -> Plain:
        if type(value) in _PLAIN:
            return value
        path = self._paths.get(id(value))
        if path is not None:
            return ["at", *path]
        direct = self._direct(value)
        return self._number(value) if direct is None else direct

    def _number(self, value: Any) -> Plain:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = number = len(self.nodes)
            self._held.append(value)
            self.nodes.append(None)
            self.nodes[number] = self._node(value)
        return ["node", self._numbers[id(value)]]

    def _direct(self, value: Any) -> Plain:
        """What has no identity that matters; None for the rest."""
        kind = type(value)
        if kind is tuple or kind is frozenset or kind is torch.Size:
            return [kind.__name__, *map(self._value, value)]
        if isinstance(value, enum.Enum):
            return ["enum", self._class(kind), value.name]
        if isinstance(value, np.generic):
            return ["number", value]
        if kind is range or kind is slice:
            return [kind.__name__, value.start, value.stop, value.step]
        if kind is torch.dtype or kind is torch.device:
            return [kind.__name__, str(value)]
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, types.BuiltinFunctionType) and not isinstance(value.__self__, types.ModuleType | type):
            return ["bound", self._value(value.__self__), value.__name__]
        if isinstance(value, types.FunctionType | types.BuiltinFunctionType | np.ufunc):
            return ["name", *_name(value, "a function that was made on the way")]
        if isinstance(value, types.ModuleType):
            return ["module", value.__name__]
        return None

    def _class(self, kind: type) -> Plain:
        path = self._paths.get(id(kind))
        return ["at", *path] if path is not None else ["name", *_name(kind, "a class that was made on the way")]

    def _node(self, value: Any) -> Plain:
        kind = type(value)
        if isinstance(value, Tensor):
            return ["tensor", *self._tensor(value)]
        if kind is np.ndarray and value.dtype.kind in "biufc":
            return ["array", value]
        if kind in _LISTS.values():
            return self._list(kind.__name__, list(value))
        if kind is deque:
            return ["deque", value.maxlen, *self._list("list", list(value))]
        if kind in _DICTS.values():
            return [kind.__name__, *([self._value(k), self._value(v)] for k, v in value.items())]
        if kind is defaultdict:
            items = ([self._value(k), self._value(v)] for k, v in value.items())
            return ["defaultdict", self._value(value.default_factory), *items]
        return self._object(value)

    def _list(self, name: str, items: list[Any]) -> Plain:
        kinds = set(map(type, items))
        if len(items) >= _MANY and kinds == {float}:
            return [name, "numbers", np.array(items, dtype=np.float64)]
        if len(items) >= _MANY and kinds == {int} and all(abs(item) < 1 << 62 for item in items):
            return [name, "numbers", np.array(items, dtype=np.int64)]
        return [name, "items", *map(self._value, items)]

    def _tensor(self, value: Tensor) -> list[Plain]:
        if (
            type(value) not in (Tensor, nn.Parameter)
            or value.layout != torch.strided
            or is_lazy(value)
            or value.is_meta
        ):
            raise NotSavable(f"a {type(value).__name__}")
        grad = self._value(value.grad) if value.is_leaf and value.grad is not None else None
        needs = value.is_leaf and value.requires_grad
        return [value.detach(), type(value) is nn.Parameter, needs, value.device.type != "cpu", grad]

    def _object(self, value: Any) -> Plain:
        if isinstance(value, torch.Generator):
            return ["torch generator", value.device.type != "cpu", value.get_state()]
        if type(value) is random.Random:
            return ["random", self._value(value.getstate())]
        if isinstance(value, np.random.RandomState):
            return ["random state", self._value(value.get_state(legacy=False))]
        if isinstance(value, np.random.Generator):
            state = value.bit_generator.state
            return ["numpy generator", state["bit_generator"], self._value(state)]
        if isinstance(value, functools.partial):
            return ["partial", *map(self._value, (value.func, value.args, dict(value.keywords)))]
        if isinstance(value, types.MethodType):
            return ["method", self._value(value.__func__), self._value(value.__self__)]
        if isinstance(value, weakref.ref):
            return ["weakref", self._value(value())]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return ["named tuple", self._class(type(value)), *map(self._value, value)]
        if hasattr(value, "__next__"):
            return self._iterator(value)
        return self._instance(value)

    def _iterator(self, value: Any) -> Plain:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # itertools will lose this one day
                make, arguments, *state = value.__reduce__()
        except Exception:
            raise NotSavable(_an(value)) from None
        name = next((name for name, known in _ITERATORS.items() if known is make), None)
        if name is None or len(state) > 1:
            raise NotSavable(_an(value))
        return ["iterator", name, [self._value(item) for item in arguments], *map(self._value, state)]

    def _instance(self, value: Any) -> Plain:
        """An object of a class that is written in Python: its class and its attributes."""
        kind = type(value)
        bases = [base for base in kind.__mro__ if base is not object]
        if kind.__module__ in ("builtins", "types") or not all(base.__flags__ & _HEAP_TYPE for base in bases):
            raise NotSavable(_an(value))
        held = dict(getattr(value, "__dict__", {}))
        for base in bases:
            for name, descriptor in vars(base).items():
                if isinstance(descriptor, types.MemberDescriptorType) and hasattr(value, name):
                    held[name] = getattr(value, name)
        try:
            return ["object", self._class(kind), *([name, self._value(item)] for name, item in held.items())]
        except NotSavable as error:
            raise NotSavable(f"{_an(value)} with {error}") from None


class Decoder:
    """Reads values. `objects`: those that are here already, by the ways to them. `device`: for tensors of a GPU's."""

    def __init__(self, nodes: list[Plain], objects: Mapping[Path, Any], device: torch.device) -> None:
        self._nodes, self._objects, self._device = nodes, objects, device
        self._made: dict[int, Any] = {}

    def value(self, value: Plain) -> Any:
        if not isinstance(value, list):
            return value
        kind, *content = value
        if kind == "at":
            return self._objects[tuple(content)]
        if kind == "node":
            number = content[0]
            if number not in self._made:
                self._node(number, *self._nodes[number])
            return self._made[number]
        if kind in ("tuple", "frozenset", "Size"):
            return {"tuple": tuple, "frozenset": frozenset, "Size": torch.Size}[kind](map(self.value, content))
        if kind in ("range", "slice"):
            return (range if kind == "range" else slice)(*content)
        if kind == "enum":
            return self.value(content[0])[content[1]]
        if kind == "bound":
            owner = self.value(content[0])
            return inspect.getattr_static(type(owner), content[1]).__get__(owner)
        if kind == "dtype":
            return getattr(torch, content[0].removeprefix("torch."))
        if kind == "device":
            return torch.device(content[0])
        if kind == "module":
            return sys.modules[content[0]]
        return _named(*content) if kind == "name" else content[0]

    def _node(self, number: int, kind: str, *content: Any) -> None:
        """Make an object, and only then what it holds: that may hold it in turn."""
        if kind in _DICTS or kind == "defaultdict":
            made: Any = _DICTS[kind]() if kind in _DICTS else defaultdict(self.value(content[0]))
            self._made[number] = made
            for key, item in content if kind in _DICTS else content[1:]:
                made[self.value(key)] = self.value(item)
        elif kind == "deque":
            self._made[number] = made = deque(maxlen=content[0])
            made.extend(self._items(content[2:]))
        elif kind in _LISTS:
            self._made[number] = made = _LISTS[kind]()
            (made.update if kind == "set" else made.extend)(self._items(content))
        elif kind == "object":
            self._made[number] = made = object.__new__(self.value(content[0]))
            for name, item in content[1:]:
                object.__setattr__(made, name, self.value(item))
        else:
            self._made[number] = self._whole(kind, *content)

    def _items(self, content: tuple[Any, ...]) -> list[Any]:
        how, *items = content
        numbers: list[Any] = items[0].tolist() if how == "numbers" else [self.value(item) for item in items]
        return numbers

    def _whole(self, kind: str, *content: Any) -> Any:
        """What is made in one go."""
        if kind == "tensor":
            return self._tensor(*content)
        if kind == "array":
            return content[0].copy()
        if kind == "torch generator":
            generator = torch.Generator(self._device if content[0] else "cpu")
            generator.set_state(content[1])
            return generator
        if kind == "random":
            source = random.Random()
            source.setstate(self.value(content[0]))
            return source
        if kind == "random state":
            state = np.random.RandomState()
            state.set_state(self.value(content[0]))
            return state
        if kind == "numpy generator":
            bits = getattr(np.random, content[0])()
            bits.state = self.value(content[1])
            return np.random.Generator(bits)
        return self._linked(kind, *map(self.value, content)) if kind != "iterator" else self._iterator(*content)

    def _linked(self, kind: str, *content: Any) -> Any:
        if kind == "partial":
            return functools.partial(content[0], *content[1], **content[2])
        if kind == "method":
            return types.MethodType(*content)
        if kind == "weakref":
            return weakref.ref(content[0])
        assert kind == "named tuple", kind
        return tuple.__new__(content[0], content[1:])

    def _iterator(self, name: str, arguments: list[Plain], *state: Plain) -> Any:
        made = _ITERATORS[name](*map(self.value, arguments))
        for content in state:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made.__setstate__(self.value(content))
        return made

    def _tensor(self, value: Tensor, parameter: bool, needs: bool, away: bool, grad: Plain) -> Tensor:
        value = value.to(self._device) if away else value.clone()
        made = nn.Parameter(value, requires_grad=needs) if parameter else value.requires_grad_(needs)
        made.grad = self.value(grad)
        return made


def _an(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def _name(value: Any, why: str) -> tuple[str, str]:
    """The module and name under which a class or a function is found again."""
    module, name = getattr(value, "__module__", None) or "builtins", getattr(value, "__qualname__", value.__name__)
    try:
        same = _named(module, name) is value
    except (KeyError, TypeError):
        same = False
    if not same:
        raise NotSavable(why)
    return module, name


def _named(module: str, name: str) -> Any:
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = vars(found)[part]  # not getattr, which may import or call something
    return found
