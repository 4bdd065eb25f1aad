"""Describe a job's functions and network as short texts, which are the same in other processes and on other machines.

Everything that the user's functions consist of is described: code, closure values, defaults, arguments of a partial,
globals that they read and functions that they call. Library code is described by its name. Attributes and methods of
the user's objects are included if that code mentions their names, so that an option that it does not read
(`args.verbose`) does not make it a different job. Objects without a stable value (files, loggers, locks, iterators) are
described by their type.
"""

from __future__ import annotations

import argparse
import enum
import hashlib
import importlib.util
import random
import types
from collections import deque
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

from shoal.data.source import as_bytes
from shoal.engine.python_state import places
from shoal.engine.python_state.places import Path, Place, path_text
from shoal.engine.python_state.state_walk import HOOKS, Walk, mentioned
from shoal.engine.python_state.user_code import library_of
from shoal.jobs.job import Job

Texts = dict[str, str]
"""Texts by location, in the words of the user's code: "w in the closure of loss"."""

BYTECODE = importlib.util.MAGIC_NUMBER.hex()
"""The bytecode version of this Python; hashes of bytecode of different versions cannot be compared."""
CODE = "code "
"""The beginning of a function's text; a hash of its bytecode follows."""
_FLAGS = 0x04 | 0x08 | 0x20 | 0x80 | 0x100 | 0x200
"""Flags of a code object that count: takes *args, takes **kwargs, is a generator, a coroutine or both."""
_LONGEST = 60
"""The number of characters of a value that are written unchanged."""
_SAMPLED = 1 << 24
"""How many bytes of a tensor or an array are hashed; a larger one is sampled evenly."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic, torch.dtype, torch.device, torch.Size,
          torch.layout, torch.memory_format, range, slice, type(...), type(NotImplemented))  # fmt: skip
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_SCRIPTS = (torch.jit.ScriptFunction, torch.jit.ScriptModule)
_NOT_LOOKED_INTO = (enum.Enum, Job, DataLoader, *_SCRIPTS)
_NOT_SEEN = frozenset({
    "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs", "_state_dict_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
})  # fmt: skip
"""Attributes of a module that do not affect training."""
_LOOKS_UP = frozenset({"getattr", "vars", "__dict__", "asdict", "astuple", "attrgetter", "eval", "exec"})
"""Functions that read attributes by names which are not in the code; if one is used, all attributes count."""
_NOT_RUN = frozenset({"__init__", "__new__", "__repr__", "__str__", "__reduce__", "__post_init__", "extra_repr"})
"""Methods that do not run in training, or only for people to read."""
_SPACES = (argparse.Namespace, types.SimpleNamespace, types.FunctionType)
"""Library classes whose objects have the user's attributes."""


class Describer(Walk):
    """Describes one job: `parts` has its texts, and `libraries` the names of the libraries that it uses."""

    most = 20_000

    def __init__(self, roots: Mapping[str, Any], model: nn.Module) -> None:
        """Describe the job.

        Args:
            roots: The job's functions and objects.
            model: Its network, whose weights are left out.
        """
        self.libraries: set[str] = set()
        self.parts: dict[str, Texts] = {}
        """Texts by part: a root, a module of the network, a class, or the globals of a Python module."""
        self._settings_alone: dict[int, tuple[Any, bool]] = {}
        """Objects by id, which stay alive here, and whether all of their attributes are settings."""
        self._read_names: set[str] = set()
        self._waiting: dict[str, list[tuple[Path, Any, bool]]] = {}
        """Attributes that are included once their name is mentioned."""
        super().__init__({**roots, "model": model}, skip=model)
        networks = {path for path, value in self.reached if path[0] == "model" and isinstance(value, nn.Module)}
        root_values = (((name,), value) for name, value in roots.items())
        for path, value in (*root_values, *self.reached, *self._values()):
            text = self._text(value)
            if path[-1] not in (".__class__", ".__bases__"):  # an object's text has their names
                self.parts.setdefault(_part(path, networks), {})[path_text(path)] = text

    # --- what counts ------------------------------------------------------------------------------------------------

    def _go(self) -> None:
        super()._go()
        while self._waiting and self._read_names & _LOOKS_UP:
            self._count(set(self._waiting))
            super()._go()

    def _visit(self, path: Path, value: Any) -> None:
        if isinstance(value, types.FunctionType) and library_of(value) is None:
            self._count(mentioned(value.__code__)[0])
        if not isinstance(value, _NOT_LOOKED_INTO) and not str(type(value).__module__).startswith("torch._dynamo"):
            super()._visit(path, value)

    def _count(self, names: set[str] | frozenset[str]) -> None:
        self._read_names |= names
        for name in names & self._waiting.keys():
            self._queue.extend(self._waiting.pop(name))

    def _push_attribute(self, path: Path, owner: Any, name: str, value: Any) -> None:
        if self._counts(owner, name, value):
            self._push(path, f".{name}", value)
        elif name not in _NOT_RUN and not isinstance(owner, nn.Module):
            self._waiting.setdefault(name, []).append(((*path, f".{name}"), value, self._private))

    def _counts(self, owner: Any, name: str, value: Any) -> bool:
        """Return whether an attribute is included, given the names mentioned so far."""
        if isinstance(owner, nn.Module):
            return name not in _NOT_SEEN and not (name in HOOKS and not value)
        if isinstance(owner, type):
            code = getattr(value, "fget", None) or getattr(value, "__func__", value)
            called_implicitly = name.startswith("__") or _overrides(owner, name)  # by Python and libraries themselves
            return name not in _NOT_RUN and (
                (called_implicitly and isinstance(code, types.FunctionType)) or name in self._read_names
            )
        if library_of(type(owner)) is not None and not isinstance(owner, _SPACES):
            if name.endswith("hash") and type(value) is int:
                return False  # what `hash` returns for texts is another number in each process
            return callable(owner) or self._has_settings_alone(owner)
        return name in self._read_names

    def _has_settings_alone(self, owner: Any) -> bool:
        """Return whether all attributes of a library's object are settings; found once, since it has many of them."""
        if id(owner) not in self._settings_alone:
            attributes = places.Attributes((), owner).get().values()
            self._settings_alone[id(owner)] = owner, all(map(_is_setting, attributes))
        return self._settings_alone[id(owner)][1]

    # --- the texts --------------------------------------------------------------------------------------------------

    def _values(self) -> Iterator[tuple[Path, Any]]:
        """Yield the value of each included location with its path."""
        for place in self.places:
            if isinstance(place, places.ClassAttributes):
                yield place.path, tuple(map(_type_name, place.owner.__bases__))
            if isinstance(place, places.Names):
                for name, value in place.get().items():
                    if isinstance(place, places.Globals) or self._counts(place.owner, name, value):
                        yield (*place.path, place.element(name)), value
            elif isinstance(place, places.Cell | places.ContextVariable):
                yield place.path, place.get()
            else:
                yield from _plain_items(place)

    def _text(self, value: Any) -> str:
        """Describe a value, and record the library of a function, module or class."""
        if not isinstance(value, types.FunctionType | types.ModuleType | type):
            return describe(value)
        library = library_of(value)
        self.libraries.add(library or "shoal")
        if isinstance(value, types.ModuleType):
            return f"module {value.__name__}"
        if isinstance(value, type):
            return _type_name(value)
        return f"{CODE}{_bytecode_hash(value.__code__)}" if library is None else f"{library} {value.__qualname__}"


def describe(value: Any) -> str:
    """Return a value as a short text."""
    if value is places.MISSING:
        return "nothing yet"
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, _PLAIN):
        return _cut(value if isinstance(value, (torch.dtype, torch.device, torch.layout)) else repr(value))
    if isinstance(value, (Tensor, np.ndarray)):
        return _describe_tensor(value)
    if isinstance(value, tuple):
        return _cut(f"({', '.join(map(_brief, value))})")
    if isinstance(value, (set, frozenset)):
        return _cut(f"{{{', '.join(sorted(map(_brief, value)))}}}")
    if _is_long(value):
        content = value.items() if isinstance(value, Mapping) else value
        return f"{len(value)} values {_digest(repr(list(map(describe, content))))}"
    if isinstance(value, (list, deque, Mapping)):
        return f"{_type_name(type(value))} of {len(value)}"
    if isinstance(value, _SCRIPTS):
        return f"TorchScript {_digest(str(value.code))}"
    if isinstance(value, _GENERATORS):
        return f"{_type_name(type(value))} {_seed(value)}".rstrip()
    if isinstance(value, types.BuiltinFunctionType | np.ufunc):
        return str(getattr(value, "__qualname__", value.__name__))
    return _type_name(type(value))


def _brief(value: Any) -> str:
    """Describe an item of a tuple or a set; nested containers have their own text, or no order."""
    return describe(value) if isinstance(value, (*_PLAIN, tuple, enum.Enum)) else _type_name(type(value))


def _is_long(value: Any) -> bool:
    """Return whether a list or dict of plain values is so long that one text describes all of them."""
    if isinstance(value, Mapping):
        return len(value) > 64 and all(isinstance(part, _PLAIN) for pair in value.items() for part in pair)
    return isinstance(value, (list, deque)) and len(value) > 8 and all(isinstance(item, _PLAIN) for item in value)


def _plain_items(place: Place) -> Iterator[tuple[Path, Any]]:
    """Yield the plain values in a list or a dict; other values have been visited separately."""
    if _is_long(place.owner):
        return
    if isinstance(place, places.Items):
        pairs = ((places.key_name(key, number), item) for number, (key, item) in enumerate(place.get()))
    elif isinstance(place, places.Elements):
        pairs = ((f"[{number}]", item) for number, item in enumerate(place.get()))
    else:
        return
    yield from (((*place.path, element), item) for element, item in pairs if isinstance(item, _PLAIN))


def _part(path: Path, networks: set[Path]) -> str:
    if path[0] in ("class", "globals"):
        return " ".join(path[:2])
    inner = next((path[:end] for end in range(len(path), 0, -1) if path[:end] in networks), path[:1])
    return "".join(inner)


def _describe_tensor(value: Tensor | np.ndarray[Any, Any]) -> str:
    """Return the shape, the dtype and a hash of the values."""
    kind = str(value.dtype).removeprefix("torch.")
    shape = f"{type(value).__name__} {list(value.shape)} {kind}"
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biufc":
            return shape
        value = torch.from_numpy(np.ascontiguousarray(value).view(np.uint8).reshape(-1).copy())
    if value.layout != torch.strided or value.is_meta or value.is_quantized or is_lazy(value):
        return f"{shape} {value.layout}"
    if value.nbytes > _SAMPLED:
        value = value.detach().reshape(-1)[:: -(-value.nbytes // _SAMPLED)]
    return f"{shape} {_digest(as_bytes(value))}"


def _overrides(kind: type, name: str) -> bool:
    """Return whether a class defines something that a library's class defines too, such as `forward`."""
    return any(name in vars(base) for base in kind.__mro__ if base is not object and library_of(base) is not None)


def _is_setting(value: Any, depth: int = 0) -> bool:
    """Return whether a value consists only of settings: plain values, and containers of them."""
    if isinstance(value, (Mapping, list, tuple, set, frozenset)):
        items = value.values() if isinstance(value, Mapping) else value
        return depth < 6 and all(_is_setting(item, depth + 1) for item in items)
    return isinstance(value, (*_PLAIN, enum.Enum, type))


def _seed(value: Any) -> str:
    """Return the seed or state of a random generator, or "" if it was seeded by the system."""
    if isinstance(value, torch.Generator):
        return f"of seed {value.initial_seed()}"
    if isinstance(value, np.random.Generator):
        entropy = getattr(getattr(value.bit_generator, "seed_seq", None), "entropy", None)
        unseeded = not isinstance(entropy, int) or entropy >= 1 << 64  # 128 bits from the system
        return "" if unseeded else f"of seed {entropy}"
    if type(value) is random.Random:
        return f"in state {_digest(repr(value.getstate()))}"
    return f"in state {_digest(repr(value.get_state()))}" if isinstance(value, np.random.RandomState) else ""


def _type_name(kind: type) -> str:
    short = library_of(kind) is None or kind.__module__ == "builtins"
    return kind.__qualname__ if short else f"{kind.__module__}.{kind.__qualname__}"


def _cut(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 20]}... {_digest(text)}"


def _digest(text: str | bytes) -> str:
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()[:16]


@lru_cache(maxsize=4096)
def _bytecode_hash(code: types.CodeType) -> str:
    """Return a hash of what runs: instructions, constants, names and nested functions, without comments and line
    numbers."""
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags & _FLAGS)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    first = next(iter(code.co_consts), None)
    has_docstring = isinstance(first, str) and code.co_name != "<lambda>"
    constants = list(map(_constant, (None, *code.co_consts[1:]) if has_docstring else code.co_consts))
    return _digest(repr((code.co_code.hex(), code.co_exceptiontable.hex(), counts, names, constants)))


def _constant(value: Any) -> str:
    if isinstance(value, types.CodeType):
        return _bytecode_hash(value)
    if isinstance(value, tuple):
        return f"({', '.join(map(_constant, value))})"
    if isinstance(value, frozenset):  # its order differs between processes
        return f"{{{', '.join(sorted(map(_constant, value)))}}}"
    return f"{type(value).__name__} {value!r}"
