"""Pieces of Python state: each knows its path, what it holds now, and how to put something back there."""

from __future__ import annotations

import contextvars
import copy
import itertools
import random
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.pack.compare import same_bits, same_numbers, same_value, version

Path = tuple[str, ...]
"""The way to a piece of state from a named root, such as `("step", "<cfg>", "['beta']")`: closure cells are written
`<name>`, attributes `.name`, items `[key]`. Globals and classes have roots of their own, `("globals", module, name)`
and `("class", module.name)`, so that a path means the same in another process that has built the same objects."""

MISSING: Any = object()
"""Stands for a name or a closure cell that holds nothing."""
MAX_ELEMENTS = 1_000_000
"""Larger tensors are compared by version alone, larger arrays by a sample; neither is put back."""
_SAMPLED = 4096
_COPYABLE: tuple[type, ...] = (
    itertools.count, type(iter([])), type(iter(())), type(iter(range(0))), type(reversed([])), type(iter("")),
)  # fmt: skip
"""Iterators whose copy goes on from the same place and shares nothing with them."""


def say(path: Path) -> str:
    """A path in the words of the user's code.

    >>> say(("globals", "train", "cfg", "['beta']")), say(("step", "<cfg>", "['beta']"))
    ("cfg['beta'] of module train", "cfg['beta'] in the closure of step")
    """
    if path[0] == "globals":
        return f"{''.join(path[2:])} of module {path[1]}"
    if path[0] == "class":
        return "".join(path[1:])
    cell = next((i for i in range(len(path) - 1, 0, -1) if path[i].startswith("<")), None)
    if cell is None:
        return "".join(path)
    return f"{path[cell][1:-1]}{''.join(path[cell + 1 :])} in the closure of {''.join(path[:cell])}"


class Place:
    """One piece of state. `get` copies what it holds, not what that holds in turn: those have places of their own."""

    restorable = True
    """Whether `put` can bring back what `get` gave."""
    data = False
    """Whether it is the content of a tensor."""

    def __init__(self, path: Path, owner: Any) -> None:
        self.path, self.owner = path, owner

    def __repr__(self) -> str:
        return f"{type(self).__name__}({say(self.path)})"

    def get(self) -> Any:
        """What it holds now, as a copy one level deep."""
        raise NotImplementedError

    def put(self, value: Any) -> None:
        """Hold this again; whatever is the same already is not written to."""
        raise NotImplementedError

    def note(self) -> Any:
        """What `changed` and `restore` need to know later."""
        return self.get()

    def changed(self, note: Any) -> bool:
        """Whether it holds something else than when the note was taken."""
        return not same_value(self.get(), note)

    def restore(self, note: Any) -> None:
        """Hold what it held when the note was taken."""
        if self.changed(note):
            self.put(note)

    def difference(self, note: Any) -> Path:
        """The path of the first thing that is another than it was."""
        return self.path

    def swap(self, note: Any, fresh: Mapping[int, Any]) -> Any:
        """The note with some of the objects in it, by their ids, replaced by others."""
        return note


class Names(Place):
    """Named values: attributes of an object or a class, a module's globals. `get` gives a dict."""

    def get(self) -> dict[str, Any]:
        raise NotImplementedError

    def _set(self, name: str, value: Any) -> None:
        raise NotImplementedError

    def _delete(self, name: str) -> None:
        raise NotImplementedError

    def element(self, name: str) -> str:
        """The name as a part of a path."""
        return f".{name}"

    def changed(self, note: dict[str, Any]) -> bool:
        now = self.get()
        return now.keys() != note.keys() or any(not same_value(value, note[name]) for name, value in now.items())

    def put(self, value: dict[str, Any]) -> None:
        now = self.get()
        for name in now.keys() - value.keys():
            self._delete(name)
        for name, held in value.items():
            if name not in now or not same_value(now[name], held):
                self._set(name, held)

    def difference(self, note: dict[str, Any]) -> Path:
        now = self.get()
        names = [n for n in {**note, **now} if not same_value(now.get(n, MISSING), note.get(n, MISSING))]
        return (*self.path, self.element(names[0])) if names else self.path

    def swap(self, note: dict[str, Any], fresh: Mapping[int, Any]) -> dict[str, Any]:
        return {name: fresh.get(id(value), value) for name, value in note.items()}


class Attributes(Names):
    """An object's own attributes, read and written past properties and `__setattr__`."""

    def __init__(self, path: Path, owner: Any, without: frozenset[str] = frozenset()) -> None:
        super().__init__(path, owner)
        self.space: dict[str, Any] = owner.__dict__
        self.without = without

    def get(self) -> dict[str, Any]:
        space = self.space.copy()
        for name in self.without:
            space.pop(name, None)
        return space

    def _set(self, name: str, value: Any) -> None:
        self.space[name] = value

    def _delete(self, name: str) -> None:
        self.space.pop(name, None)


class Slots(Names):
    """Attributes of an object that are kept in `__slots__`."""

    def __init__(self, path: Path, owner: Any, names: Iterable[str]) -> None:
        super().__init__(path, owner)
        self.names = tuple(names)

    def get(self) -> dict[str, Any]:
        return {name: value for name in self.names if (value := getattr(self.owner, name, MISSING)) is not MISSING}

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self.owner, name, value)

    def _delete(self, name: str) -> None:
        object.__delattr__(self.owner, name)


class ClassAttributes(Names):
    """Attributes and methods of a class."""

    def get(self) -> dict[str, Any]:
        return {name: value for name, value in list(vars(self.owner).items()) if _of_class(name, value)}

    def _set(self, name: str, value: Any) -> None:
        type.__setattr__(self.owner, name, value)

    def _delete(self, name: str) -> None:
        type.__delattr__(self.owner, name)


class Globals(Names):
    """Some of a module's globals: those that the code in question mentions."""

    def __init__(self, path: Path, owner: dict[str, Any], names: Iterable[str]) -> None:
        super().__init__(path, owner)
        self.names = tuple(names)

    def element(self, name: str) -> str:
        return name

    def get(self) -> dict[str, Any]:
        return {name: value for name in self.names if (value := self.owner.get(name, MISSING)) is not MISSING}

    def _set(self, name: str, value: Any) -> None:
        self.owner[name] = value

    def _delete(self, name: str) -> None:
        self.owner.pop(name, None)


class Cell(Place):
    """A variable of a closure."""

    def get(self) -> Any:
        try:
            return self.owner.cell_contents
        except ValueError:
            return MISSING

    def put(self, value: Any) -> None:
        if value is not MISSING:
            self.owner.cell_contents = value
        elif self.get() is not MISSING:
            del self.owner.cell_contents

    def swap(self, note: Any, fresh: Mapping[int, Any]) -> Any:
        return fresh.get(id(note), note)


class ContextVariable(Place):
    """A `contextvars.ContextVar`, in the context of whoever asks."""

    owner: contextvars.ContextVar[Any]

    def get(self) -> Any:
        try:
            return self.owner.get()
        except LookupError:
            return MISSING

    def put(self, value: Any) -> None:
        if value is not MISSING:
            self.owner.set(value)


class Items(Place):
    """A dict, or a mapping that can be written to. `get` gives its items in order."""

    def get(self) -> list[tuple[Any, Any]]:
        return list(self.owner.items())

    def changed(self, note: list[tuple[Any, Any]]) -> bool:
        now = self.get()
        return len(now) != len(note) or any(
            not (same_value(x, a) and same_value(y, b)) for (x, y), (a, b) in zip(now, note, strict=True)
        )

    def put(self, value: list[tuple[Any, Any]]) -> None:
        wanted = dict(value)
        for key in [key for key in list(self.owner) if key not in wanted]:
            del self.owner[key]
        for key, held in value:
            if key not in self.owner or not same_value(self.owner[key], held):
                self.owner[key] = held
        if list(self.owner) != [key for key, _ in value]:
            self.owner.clear()
            self.owner.update(value)

    def difference(self, note: list[tuple[Any, Any]]) -> Path:
        now, before = dict(self.get()), dict(note)
        keys = [k for k in {**before, **now} if not same_value(now.get(k, MISSING), before.get(k, MISSING))]
        return (*self.path, key_name(keys[0], 0)) if keys else self.path

    def swap(self, note: list[tuple[Any, Any]], fresh: Mapping[int, Any]) -> list[tuple[Any, Any]]:
        return [(key, fresh.get(id(value), value)) for key, value in note]


class ReadOnlyItems(Items):
    """A mapping that cannot be written to, but whose owner can."""

    restorable = False

    def put(self, value: Any) -> None:
        return


class Elements(Place):
    """A list or a deque."""

    def get(self) -> list[Any]:
        return list(self.owner)

    def changed(self, note: list[Any]) -> bool:
        now = self.get()
        return len(now) != len(note) or any(not same_value(a, b) for a, b in zip(now, note, strict=True))

    def put(self, value: list[Any]) -> None:
        self.owner.clear()
        self.owner.extend(value)

    def swap(self, note: list[Any], fresh: Mapping[int, Any]) -> list[Any]:
        return [fresh.get(id(value), value) for value in note]


class SetMembers(Place):
    """A set."""

    def get(self) -> set[Any]:
        return set(self.owner)

    def changed(self, note: set[Any]) -> bool:
        return self.get() != note

    def put(self, value: set[Any]) -> None:
        self.owner.difference_update(self.get() - value)
        self.owner.update(value)


class TensorContent(Place):
    """What is written in a tensor that is neither a parameter nor a buffer of the model."""

    owner: Tensor
    data = True

    @property
    def whole(self) -> bool:
        """Whether its content can be copied and compared."""
        value = self.owner
        plain = type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided and value.device.type != "meta"
        return plain and value.numel() <= MAX_ELEMENTS

    @property
    def restorable(self) -> bool:  # type: ignore[override]
        return self.whole

    def get(self) -> Tensor:
        return self.owner.detach().clone()

    def put(self, value: Tensor) -> None:
        with torch.no_grad():
            self.owner.copy_(value)

    def note(self) -> tuple[int, Tensor | None]:
        return version(self.owner), self.get() if self.whole else None

    def changed(self, note: tuple[int, Tensor | None]) -> bool:
        return version(self.owner) != note[0] or (note[1] is not None and not same_bits(self.owner, note[1]))

    def restore(self, note: tuple[int, Tensor | None]) -> None:
        if note[1] is not None and not same_bits(self.owner, note[1]):
            self.put(note[1])


class ArrayContent(Place):
    """What is written in a numpy array."""

    owner: np.ndarray[Any, Any]

    @property
    def restorable(self) -> bool:  # type: ignore[override]
        return self.owner.size <= MAX_ELEMENTS

    def get(self) -> np.ndarray[Any, Any]:
        if self.owner.size <= MAX_ELEMENTS:
            return self.owner.copy()
        return self.owner.reshape(-1)[:: max(1, self.owner.size // _SAMPLED)].copy()

    def put(self, value: np.ndarray[Any, Any]) -> None:
        if self.restorable and self.owner.flags.writeable:
            self.owner[...] = value

    def changed(self, note: np.ndarray[Any, Any]) -> bool:
        now = self.get()
        if now.shape != note.shape or now.dtype != note.dtype:
            return True
        return list(now.flat) != list(note.flat) if now.dtype.hasobject else now.tobytes() != note.tobytes()


class RandomNumbers(Place):
    """A generator of random numbers: Python's, numpy's or torch's."""

    def get(self) -> Any:
        value = self.owner
        if isinstance(value, random.Random):
            return value.getstate()
        if isinstance(value, np.random.RandomState):
            return value.get_state(legacy=False)
        return value.bit_generator.state if isinstance(value, np.random.Generator) else value.get_state()

    def put(self, value: Any) -> None:
        if isinstance(self.owner, random.Random):
            self.owner.setstate(value)
        elif isinstance(self.owner, np.random.Generator):
            self.owner.bit_generator.state = value
        else:
            self.owner.set_state(value)

    def changed(self, note: Any) -> bool:
        return not same_numbers(self.get(), note)


class Position(Place):
    """How far an iterator has come. Few can be put back: a copy then takes the place of the one that has moved on."""

    @property
    def restorable(self) -> bool:  # type: ignore[override]
        return isinstance(self.owner, _COPYABLE)

    def get(self) -> Any:
        value = self.owner
        if isinstance(value, itertools.count):
            return repr(value)
        if isinstance(value, types.GeneratorType):
            frame = value.gi_frame
            return None if frame is None else (frame.f_lasti, tuple(map(id, frame.f_locals.values())))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # itertools will lose this one day
                return repr(value.__reduce__())
        except Exception:
            return None  # it cannot tell

    def put(self, value: Any) -> None:
        return

    def fresh(self) -> Any:
        """An iterator that is where this one is now."""
        return copy.copy(self.owner)


def key_name(key: Any, place: int) -> str:
    """A key as a part of a path: by value where that means the same elsewhere, by position otherwise."""
    plain = isinstance(key, str | int | float | bool | bytes | None) or (
        isinstance(key, tuple) and all(isinstance(part, str | int | float | bool | None) for part in key)
    )
    return f"[{key!r}]" if plain else f"[#{place}]"


def _of_class(name: str, value: Any) -> bool:
    if isinstance(value, types.MemberDescriptorType | types.GetSetDescriptorType):
        return False
    return isinstance(value, types.FunctionType) or not (name.startswith(("__", "_abc_")))


def is_iterator(value: Any) -> bool:
    """Whether asking for the next element moves it on; files are not looked into."""
    return isinstance(value, Iterator) and not hasattr(value, "fileno")
