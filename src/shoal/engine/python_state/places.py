"""Pieces of Python state: each knows its path, what it holds now, and how to put something back there."""

from __future__ import annotations

import contextvars
import types
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from shoal.engine.python_state._compare import equal_value, same_value
from shoal.engine.python_state.user_code import is_standard_class

Path = tuple[str, ...]
"""The way to a piece of state from a named root, such as `("step", "<cfg>", "['beta']")`: closure cells are written
`<name>`, attributes `.name`, items `[key]`. Globals and classes have roots of their own, `("globals", module, name)`
and `("class", module.name)`, so that a path means the same in another process that has built the same objects."""

MISSING: Any = object()
"""Stands for a name or a closure cell that holds nothing."""
_OMITTED = frozenset({".__dict__", ".__next__", ".cell_contents"})
"""Parts of paths that only tell two places of the same object apart."""


def say(path: Path) -> str:
    """A path in the words of the user's code.

    >>> say(("globals", "train", "cfg", "['beta']")), say(("step", "<cfg>", "['beta']"))
    ("cfg['beta'] of module train", "cfg['beta'] in the closure of step")
    """
    path = tuple(part for part in path if part not in _OMITTED)
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
        """Hold this again; whatever is the same already is not written to. Of a place that cannot: do nothing."""

    def note(self) -> Any:
        """What `changed` and `restore` need to know later."""
        return self.get()

    def changed(self, note: Any) -> bool:
        """Whether it holds something else than when the note was taken; an equal copy of it is nothing else."""
        return not equal_value(self.get(), note)

    def restore(self, note: Any) -> None:
        """Hold the very things that it held when the note was taken."""
        self.put(note)

    def differences(self, note: Any) -> dict[Path, Any]:
        """Of a place that has changed: the paths of what is another thing than it was, and what is there now."""
        return {self.path: self.get()}

    def swap(self, note: Any, fresh: Mapping[int, Any]) -> Any:
        """The note with some of the objects in it, by their ids, replaced by others."""
        return note


class Names(Place):
    """Named values: attributes of an object or a class, a module's globals. `get` gives a dict."""

    space: dict[str, Any]
    """Where the values are; a class has none."""

    def _set(self, name: str, value: Any) -> None:
        self.space[name] = value

    def _delete(self, name: str) -> None:
        self.space.pop(name, None)

    def element(self, name: str) -> str:
        """The name as a part of a path."""
        return f".{name}"

    def changed(self, note: dict[str, Any]) -> bool:
        now = self.get()
        return now.keys() != note.keys() or any(not equal_value(value, note[name]) for name, value in now.items())

    def put(self, value: dict[str, Any]) -> None:
        now = self.get()
        for name in now.keys() - value.keys():
            self._delete(name)
        for name, held in value.items():
            if name not in now or not same_value(now[name], held):
                self._set(name, held)

    def differences(self, note: dict[str, Any]) -> dict[Path, Any]:
        now = self.get()
        pairs = {name: (now.get(name, MISSING), note.get(name, MISSING)) for name in {**note, **now}}
        return {(*self.path, self.element(name)): a for name, (a, b) in pairs.items() if not equal_value(a, b)}

    def swap(self, note: dict[str, Any], fresh: Mapping[int, Any]) -> dict[str, Any]:
        return {name: fresh.get(id(value), value) for name, value in note.items()}


class Attributes(Names):
    """An object's own attributes, also those in `__slots__`, read and written past properties and `__setattr__`."""

    def __init__(self, path: Path, owner: Any, without: frozenset[str] = frozenset()) -> None:
        super().__init__(path, owner)
        self.space = getattr(owner, "__dict__", {})
        kind: Any = type(owner)
        self.slots = slot_names(kind)
        self.without = without

    def get(self) -> dict[str, Any]:
        space = self.space.copy()
        for name in self.without:
            space.pop(name, None)
        held = ((name, getattr(self.owner, name, MISSING)) for name in self.slots)
        return space | {name: value for name, value in held if value is not MISSING}

    def _set(self, name: str, value: Any) -> None:
        if name in self.slots:
            object.__setattr__(self.owner, name, value)
        else:
            self.space[name] = value

    def _delete(self, name: str) -> None:
        if name in self.slots:
            object.__delattr__(self.owner, name)
        else:
            self.space.pop(name, None)


@lru_cache(maxsize=8192)
def slot_names(kind: Any) -> tuple[str, ...]:
    """Names in the `__slots__` of a class and of what it is made from, without the standard library's."""
    bases = [base for base in kind.__mro__ if not is_standard_class(base)]
    descriptors = (pair for base in bases for pair in vars(base).items())
    return tuple(name for name, value in descriptors if isinstance(value, types.MemberDescriptorType))


class ClassAttributes(Names):
    """Attributes and methods of a class."""

    def get(self) -> dict[str, Any]:
        return {name: _unwrapped(value) for name, value in list(vars(self.owner).items()) if _of_class(name, value)}

    def _set(self, name: str, value: Any) -> None:
        type.__setattr__(self.owner, name, value)

    def _delete(self, name: str) -> None:
        type.__delattr__(self.owner, name)


class Globals(Names):
    """Some of a module's globals: those that the code in question mentions."""

    def __init__(self, path: Path, owner: dict[str, Any], names: Iterable[str]) -> None:
        super().__init__(path, owner)
        self.space, self.names = owner, tuple(names)

    def element(self, name: str) -> str:
        return name

    def get(self) -> dict[str, Any]:
        return {name: value for name in self.names if (value := self.owner.get(name, MISSING)) is not MISSING}


class Cell(Place):
    """A variable of a closure."""

    def get(self) -> Any:
        try:
            return self.owner.cell_contents
        except ValueError:
            return MISSING

    def put(self, value: Any) -> None:
        if same_value(self.get(), value):
            return
        if value is MISSING:
            del self.owner.cell_contents
        else:
            self.owner.cell_contents = value

    def swap(self, note: Any, fresh: Mapping[int, Any]) -> Any:
        return fresh.get(id(note), note)


class ContextVariable(Place):
    """A `contextvars.ContextVar`, in the caller's context."""

    owner: contextvars.ContextVar[Any]

    def get(self) -> Any:
        try:
            return self.owner.get()
        except LookupError:
            return MISSING

    def put(self, value: Any) -> None:
        if value is not MISSING and not same_value(self.get(), value):
            self.owner.set(value)


class Items(Place):
    """A dict, or a mapping that can be written to. `get` gives its items in order."""

    def get(self) -> list[tuple[Any, Any]]:
        return list(self.owner.items())

    def put(self, value: list[tuple[Any, Any]]) -> None:
        wanted = dict(value)
        for key in [key for key in list(self.owner) if key not in wanted]:
            del self.owner[key]
        for key, held in value:
            if key not in self.owner or not same_value(self.owner[key], held):
                self.owner[key] = held
        if list(map(id, self.owner)) != [id(key) for key, _ in value]:  # a key may be a tensor, which has no `==`
            self.owner.clear()
            self.owner.update(value)

    def differences(self, note: list[tuple[Any, Any]]) -> dict[Path, Any]:
        now, before = dict(self.get()), dict(note)
        pairs = {key: (now.get(key, MISSING), before.get(key, MISSING)) for key in {**before, **now}}
        names = {key: (*self.path, key_name(key, place)) for place, key in enumerate(pairs)}
        return {names[key]: a for key, (a, b) in pairs.items() if not equal_value(a, b)} or {self.path: self.get()}

    def swap(self, note: list[tuple[Any, Any]], fresh: Mapping[int, Any]) -> list[tuple[Any, Any]]:
        return [(key, fresh.get(id(value), value)) for key, value in note]


class ReadOnlyItems(Items):
    """A mapping that cannot be written to, but whose owner can."""

    restorable = False
    put = Place.put


class Elements(Place):
    """A list or a deque."""

    def get(self) -> list[Any]:
        return list(self.owner)

    def put(self, value: list[Any]) -> None:
        now = self.get()
        if len(now) != len(value) or not all(map(same_value, now, value)):
            self.owner.clear()
            self.owner.extend(value)

    def swap(self, note: list[Any], fresh: Mapping[int, Any]) -> list[Any]:
        return [fresh.get(id(value), value) for value in note]


class SetMembers(Place):
    """A set."""

    def get(self) -> set[Any]:
        return set(self.owner)

    def put(self, value: set[Any]) -> None:
        self.owner.difference_update(self.get() - value)
        self.owner.update(value)


class Empties(Place):
    """Containers of one object that hold nothing, such as a module's tables of hooks."""

    owner: list[Any]

    def get(self) -> list[int]:
        return list(map(len, self.owner))

    def changed(self, note: Any) -> bool:
        return any(self.owner)

    def put(self, value: Any) -> None:
        for container in filter(None, self.owner):
            container.clear()


def key_name(key: Any, place: int) -> str:
    """A key as a part of a path: by value where that means the same elsewhere, by position otherwise."""
    plain = isinstance(key, str | int | float | bool | bytes | None) or (
        isinstance(key, tuple) and all(isinstance(part, str | int | float | bool | None) for part in key)
    )
    return f"[{key!r}]" if plain else f"[#{place}]"


def _unwrapped(value: Any) -> Any:
    """A function without the wrapper that torch puts around an optimizer's `step` when the class is first used."""
    hooked = isinstance(value, types.FunctionType) and getattr(value, "hooked", False)
    return getattr(value, "__wrapped__", value) if hooked else value


def _of_class(name: str, value: Any) -> bool:
    if isinstance(value, types.MemberDescriptorType | types.GetSetDescriptorType):
        return False
    return isinstance(value, types.FunctionType) or not (name.startswith(("__", "_abc_")))
