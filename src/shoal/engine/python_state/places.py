"""Places where Python state is stored, such as attributes, closure cells and dicts, which can be read and restored."""

from __future__ import annotations

import contextvars
import types
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from shoal.engine.python_state._compare import equal_value, same_objects, same_value
from shoal.engine.python_state.user_code import is_standard_class

Path = tuple[str, ...]
"""The path to a piece of state from a named root, such as `("step", "<cfg>", "['beta']")`: closure cells are written
`<name>`, attributes `.name`, items `[key]`. Globals and classes start at `("globals", module, name)` and
`("class", module.name)`, so that a path is valid in another process that has built the same objects."""

MISSING: Any = object()
"""The value of a name or a closure cell that has none."""
_OMITTED = frozenset({".__dict__", ".__next__", ".cell_contents"})
"""Elements of paths that only distinguish two places of the same object."""


def path_text(path: Path) -> str:
    """Return a path in the words of the user's code.

    >>> path_text(("globals", "train", "cfg", "['beta']")), path_text(("step", "<cfg>", "['beta']"))
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
    """A piece of Python state. Its copies are one level deep, since values inside it have places of their own."""

    restorable = True
    """Whether `put` can restore what `get` returned."""
    data = False
    """Whether it is the content of a tensor."""

    def __init__(self, path: Path, owner: Any) -> None:
        self.path, self.owner = path, owner

    def __repr__(self) -> str:
        return f"{type(self).__name__}({path_text(self.path)})"

    def get(self) -> Any:
        """Return a copy of the current value, one level deep."""
        raise NotImplementedError

    def put(self, value: Any) -> None:
        """Set the value, writing only what differs. Does nothing if the place is not restorable."""

    def note(self) -> Any:
        """Return a note of the current value for `changed` and `restore`."""
        return self.get()

    def changed(self, note: Any) -> bool:
        """Return whether the value differs from the note; an equal copy of a list or dict is no difference."""
        return not equal_value(self.get(), note)

    def restore(self, note: Any) -> None:
        """Restore the objects that it held when the note was taken."""
        self.put(note)

    def differences(self, note: Any) -> dict[Path, Any]:
        """Return, for a place that has changed, the paths that changed and their current values."""
        return {self.path: self.get()}

    def swap(self, note: Any, fresh: Mapping[int, Any]) -> Any:
        """Return the note with objects replaced: `fresh` maps the id of an object to its replacement."""
        return note


class Names(Place):
    """Named values, such as attributes or globals. `get` returns a dict."""

    space: dict[str, Any]
    """The dict that holds the values; not used for classes."""

    def _set(self, name: str, value: Any) -> None:
        self.space[name] = value

    def _delete(self, name: str) -> None:
        self.space.pop(name, None)

    def element(self, name: str) -> str:
        """Return the name as an element of a path."""
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
    """An object's attributes, including `__slots__`, read and written without calling properties or `__setattr__`."""

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
    """Return the names in the `__slots__` of a class and its bases, except those of the standard library."""
    bases = [base for base in kind.__mro__ if not is_standard_class(base)]
    descriptors = (pair for base in bases for pair in vars(base).items())
    return tuple(name for name, value in descriptors if isinstance(value, types.MemberDescriptorType))


class ClassAttributes(Names):
    """The attributes and methods of a class."""

    def get(self) -> dict[str, Any]:
        return {name: _unwrapped(value) for name, value in list(vars(self.owner).items()) if _of_class(name, value)}

    def _set(self, name: str, value: Any) -> None:
        type.__setattr__(self.owner, name, value)

    def _delete(self, name: str) -> None:
        type.__delattr__(self.owner, name)


class Globals(Names):
    """Those of a module's globals that the code in question mentions."""

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
    """The items of a dict or another mutable mapping. `get` returns them in order."""

    def get(self) -> list[tuple[Any, Any]]:
        return list(self.owner.items())

    def changed(self, note: list[tuple[Any, Any]]) -> bool:
        return not self._holds(note) and super().changed(note)

    def _holds(self, note: list[tuple[Any, Any]]) -> bool:
        """Whether the mapping holds the same objects; a vocabulary has many items."""
        now = self.get()
        return all(same_objects([pair[i] for pair in now], [pair[i] for pair in note]) for i in (0, 1))

    def put(self, value: list[tuple[Any, Any]]) -> None:
        if self._holds(value):
            return
        wanted = dict(value)
        for key in [key for key in list(self.owner) if key not in wanted]:
            del self.owner[key]
        for key, held in value:
            if key not in self.owner or not same_value(self.owner[key], held):
                self.owner[key] = held
        if list(map(id, self.owner)) != [id(key) for key, _ in value]:  # keys may be tensors, without a useful `==`
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
    """The items of a read-only view of a mapping, which cannot be restored through the view."""

    restorable = False
    put = Place.put


class Elements(Place):
    """The elements of a list or a deque."""

    def get(self) -> list[Any]:
        return list(self.owner)

    def put(self, value: list[Any]) -> None:
        now = self.get()
        if not same_objects(now, value) and not (len(now) == len(value) and all(map(same_value, now, value))):
            self.owner.clear()
            self.owner.extend(value)

    def swap(self, note: list[Any], fresh: Mapping[int, Any]) -> list[Any]:
        return [fresh.get(id(value), value) for value in note]


class SetMembers(Place):
    """The elements of a set."""

    def get(self) -> set[Any]:
        return set(self.owner)

    def put(self, value: set[Any]) -> None:
        self.owner.difference_update(self.get() - value)
        self.owner.update(value)


class Empties(Place):
    """The empty containers of one object, such as a module's dicts of hooks, as one place."""

    owner: list[Any]

    def get(self) -> list[int]:
        return list(map(len, self.owner))

    def changed(self, note: Any) -> bool:
        return any(self.owner)

    def put(self, value: Any) -> None:
        for container in filter(None, self.owner):
            container.clear()


def key_name(key: Any, place: int) -> str:
    """Return a dict key as an element of a path: its value if other processes have the same, else its position."""
    plain = isinstance(key, str | int | float | bool | bytes | None) or (
        isinstance(key, tuple) and all(isinstance(part, str | int | float | bool | None) for part in key)
    )
    return f"[{key!r}]" if plain else f"[#{place}]"


def _unwrapped(value: Any) -> Any:
    """Remove the wrapper that torch puts around an optimizer's `step` when the class is first used."""
    hooked = isinstance(value, types.FunctionType) and getattr(value, "hooked", False)
    return getattr(value, "__wrapped__", value) if hooked else value


def _of_class(name: str, value: Any) -> bool:
    if isinstance(value, types.MemberDescriptorType | types.GetSetDescriptorType):
        return False
    return isinstance(value, types.FunctionType) or not (name.startswith(("__", "_abc_")))
