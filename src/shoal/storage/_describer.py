"""What a job's functions and network are, as short texts by place: the same in another process and on another machine.

All that the user's own functions are made of counts: code, closure values, defaults, arguments of a partial, globals
that they read and functions that they call. Code of libraries counts by its name. Attributes and methods of the user's
objects count where that code mentions their names, so that an option that it does not read (`args.verbose`) makes no
other job. What has no stable value (files, loggers, locks, iterators) counts by the name of its type.
"""

from __future__ import annotations

import argparse
import dis
import enum
import functools
import pathlib
import random
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shoal.data.source import as_bytes
from shoal.engine.python_state.user_code import library_of, library_of_module
from shoal.jobs.job import Job
from shoal.storage._codehash import bytecode_hash, digest, source_hash

Texts = dict[str, str]
"""By place: "" is the thing itself, "closure w" a value in its closure, "attribute p of closure f" one in that."""

CODE = "code "
"""How the text of a function begins: two hashes follow."""
_DEEPEST = 12
_MOST = 20_000
"""Values of one job that are looked at."""
_LONGEST = 60
"""Characters of a value that are written as they are."""
_SAMPLED = 1 << 24
"""Bytes of a tensor or an array that are hashed; of a larger one, so many of rows spread evenly over it."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic, torch.dtype, torch.device, torch.Size,
          torch.layout, torch.memory_format, range, slice, type(...), type(NotImplemented))  # fmt: skip
_HOOKS = frozenset({"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"})
_LEFT_OUT = frozenset({
    "_parameters", "_buffers", "_modules", "_flat_weights", "_flat_weight_refs", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs", "_state_dict_hooks", "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
})  # fmt: skip
"""Attributes of a module that are looked at otherwise, or that training does not see."""
_LOOKS_UP = frozenset({"getattr", "vars", "__dict__", "asdict", "astuple", "attrgetter", "eval", "exec"})
"""Names of what reads attributes by names that are not in the code: all attributes count then."""
_NOT_RUN = frozenset({"__init__", "__new__", "__repr__", "__str__", "__reduce__", "__post_init__", "extra_repr"})
"""Methods that have done their work, or that nothing but people reads."""
_SPACES = (argparse.Namespace, types.SimpleNamespace)


class Describer:
    """Describes the parts of one job. Each part, by its name, has its own texts in `parts`."""

    def __init__(self) -> None:
        self.parts: dict[str, Texts] = {}
        self.libraries: set[str] = set()
        self._mentioned: set[str] = set()
        self._waiting: dict[str, list[Callable[[], None]]] = {}
        """What counts once its name is mentioned."""
        self._seen: dict[int, str] = {}
        self._held: list[Any] = []  # keeps ids from being given away
        self._left = _MOST

    def add(self, part: str, value: Any) -> None:
        """Describe a function, an object or a value."""
        self._visit(value, part, "", 0)

    def add_model(self, model: nn.Module) -> None:
        """Describe a network, with a part for each of its modules; its weights are left out."""
        for name, module in model.named_modules():
            part = f"module {name!r}" if name else "model"
            self._see(module, part)
            self._set(part, "", self._type(type(module), 0))
            self._module_attributes(module, part, "", 1)

    def finish(self) -> dict[str, Texts]:
        """All parts, once nothing more is to be added."""
        while True:
            everything = bool(self._mentioned & _LOOKS_UP)
            names = [name for name in self._waiting if everything or name in self._mentioned]
            if not names:
                return self.parts
            for look in [look for name in names for look in self._waiting.pop(name)]:
                look()

    # --- what is noted ----------------------------------------------------------------------------------------------

    def _set(self, part: str, place: str, text: str) -> None:
        self.parts.setdefault(part, {})[place] = text

    def _see(self, value: Any, place: str) -> bool:
        """Note where something is; whether it was not met before."""
        if id(value) in self._seen:
            return False
        self._held.append(value)
        self._seen[id(value)] = place
        return True

    def _later(self, name: str, look: Callable[[], None]) -> None:
        self._waiting.setdefault(name, []).append(look)

    def _visit(self, value: Any, part: str, place: str, depth: int) -> None:
        if isinstance(value, enum.Enum):
            self._set(part, place, f"{type(value).__qualname__}.{value.name}")
        elif isinstance(value, _PLAIN):
            self._set(part, place, _short(value))
        elif isinstance(value, type):
            self._set(part, place, self._type(value, depth))
        elif isinstance(value, types.ModuleType):
            self._python_module(value, part, place, depth)
        elif isinstance(value, (Tensor, np.ndarray)):
            self._set(part, place, describe_tensor(value))
        elif not isinstance(value, tuple) and not self._see(value, f"{place} of {part}" if place else part):
            self._set(part, place, f"the same as {self._seen[id(value)]}")
        elif depth > _DEEPEST or self._left <= 0:
            self._set(part, place, _type_name(type(value)))
        else:
            self._left -= 1
            for kinds, look in self._looks:
                if isinstance(value, kinds):
                    look(self, value, part, place, depth + 1)
                    return
            self._object(value, part, place, depth + 1)

    # --- functions and classes --------------------------------------------------------------------------------------

    def _function(self, function: types.FunctionType, part: str, place: str, depth: int) -> None:
        library = library_of(function)
        if library is None:
            self._set(part, place, f"{CODE}{bytecode_hash(function.__code__)} {source_hash(function)}".rstrip())
            self._globals(function, part, place, depth)
            for name, value in vars(function).items():
                if name != "__wrapped__":
                    look = functools.partial(self._visit, value, part, _in("attribute", name, place), depth)
                    self._later(name, look)
        else:
            self.libraries.add(library)
            wrapped = getattr(function, "__wrapped__", None)
            name = function.__code__.co_qualname if wrapped is not None else function.__qualname__
            self._set(part, place if wrapped is None else _in("wrapper", name, place), f"{library} {name}")
            if wrapped is not None:
                self._visit(wrapped, part, place, depth)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            where = _in("closure", name, place)
            try:
                self._visit(cell.cell_contents, part, where, depth)
            except ValueError:
                self._set(part, where, "nothing yet")
        if library is None:
            self._defaults(function, part, place, depth)

    def _defaults(self, function: types.FunctionType, part: str, place: str, depth: int) -> None:
        code, values = function.__code__, function.__defaults__ or ()
        names = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
        for name, value in (*zip(names, values, strict=True), *(function.__kwdefaults__ or {}).items()):
            self._visit(value, part, _in("default", name, place), depth)

    def _globals(self, function: types.FunctionType, part: str, place: str, depth: int) -> None:
        read, mentioned = _names(function.__code__)
        self._mentioned |= mentioned
        space = function.__globals__
        for name in sorted(read & space.keys()):
            self._visit(space[name], part, _in("global", name, place), depth)

    def _python_module(self, module: types.ModuleType, part: str, place: str, depth: int) -> None:
        library = library_of_module(module)
        self._set(part, place, f"module {module.__name__}")
        if library is not None:
            self.libraries.add(library)
        elif self._see(module, place):
            for name, value in list(vars(module).items()):
                if not name.startswith("__"):
                    look = functools.partial(self._visit, value, part, _in("global", name, place), depth + 1)
                    self._later(name, look)

    def _method(self, method: types.MethodType, part: str, place: str, depth: int) -> None:
        self._visit(method.__func__, part, place, depth)
        self._visit(method.__self__, part, _in("object", method.__func__.__name__, place), depth)

    def _partial(self, value: functools.partial[Any], part: str, place: str, depth: int) -> None:
        self._visit(value.func, part, place, depth)
        for position, item in enumerate(value.args):
            self._visit(item, part, _in("argument", str(position), place), depth)
        for name, item in value.keywords.items():
            self._visit(item, part, _in("argument", name, place), depth)

    def _named(self, value: Any, part: str, place: str, depth: int) -> None:
        owner = getattr(value, "__self__", None)
        self._set(part, place, str(getattr(value, "__qualname__", None) or getattr(value, "__name__", type(value))))
        if owner is not None and not isinstance(owner, types.ModuleType | type):
            self._visit(owner, part, _in("object", str(getattr(value, "__name__", "")), place), depth)
        wrapped = getattr(value, "__wrapped__", None)  # functools.lru_cache
        if wrapped is not None:
            self._visit(wrapped, part, place, depth)

    def _type(self, kind: type, depth: int) -> str:
        """A class by its name; the user's own have a part for each, with their methods."""
        library = library_of(kind)
        if library is not None:
            self.libraries.add(library)
        for base in kind.__mro__:
            if library_of(base) is None and self._see(base, f"class {base.__qualname__}") and depth <= _DEEPEST:
                self._class(base, depth + 1)
        return _type_name(kind)

    def _class(self, kind: type, depth: int) -> None:
        part = f"class {kind.__qualname__}"
        while part in self.parts:  # another class of this name
            part += "'"
        self._set(part, "", ", ".join(_type_name(base) for base in kind.__bases__))
        for name, value in list(vars(kind).items()):
            if isinstance(value, types.MemberDescriptorType | types.GetSetDescriptorType) or name in _NOT_RUN:
                continue
            code = getattr(value, "fget", None) or getattr(value, "__func__", value)
            code = getattr(code, "func", code) if isinstance(code, functools.cached_property) else code
            look = functools.partial(self._visit, code, part, name, depth)
            if isinstance(code, types.FunctionType) and (name.startswith("__") or _overrides(kind, name)):
                look()  # Python and libraries call these by themselves
            elif not name.startswith("__"):
                self._later(name, look)

    # --- objects ----------------------------------------------------------------------------------------------------

    def _module(self, module: nn.Module, part: str, place: str, depth: int) -> None:
        """A network that is not the job's own: a teacher, a loss with weights."""
        self._set(part, place, self._type(type(module), depth))
        self._module_attributes(module, part, place, depth)
        for group in (module._parameters, module._buffers):
            for name, tensor in group.items():
                if tensor is not None and not is_lazy(tensor):
                    self._set(part, _in("tensor", name, place), describe_tensor(tensor))
        for name, child in module._modules.items():
            if child is not None:
                self._visit(child, part, _in("module", name, place), depth - 1)

    def _module_attributes(self, module: nn.Module, part: str, place: str, depth: int) -> None:
        for name, value in list(vars(module).items()):
            if name in _HOOKS:
                for number, hook in enumerate(value.values()):  # their keys count all hooks of the process
                    self._visit(hook, part, _in("hook", str(number), place), depth)
            elif name not in _LEFT_OUT:
                self._visit(value, part, _in("attribute", name, place), depth)

    def _items(self, value: Mapping[Any, Any], part: str, place: str, depth: int) -> None:
        self._set(part, place, f"{_type_name(type(value))} of {len(value)}")
        for key, item in list(value.items()):
            self._visit(item, part, _in("item", _key(key), place), depth)

    def _sequence(self, value: Any, part: str, place: str, depth: int) -> None:
        items = list(value)
        if len(items) > 8 and all(isinstance(item, _PLAIN) for item in items):
            text = f"{len(items)} values {digest(repr(list(map(_short, items))))}"
            self._set(part, place, text if len(items) > 64 else _cut(str(list(map(_short, items)))))
            return
        self._set(part, place, f"{_type_name(type(value))} of {len(items)}")
        for position, item in enumerate(items):
            self._visit(item, part, _in("item", str(position), place), depth)

    def _set_of(self, value: Any, part: str, place: str, depth: int) -> None:
        self._set(part, place, _cut(f"{{{', '.join(sorted(map(_key, value)))}}}"))

    def _generator(self, value: Any, part: str, place: str, depth: int) -> None:
        """Random numbers by their seed where there is one: a run moves them."""
        self._set(part, place, f"{_type_name(type(value))} {_seed(value)}".rstrip())

    def _script(self, value: Any, part: str, place: str, depth: int) -> None:
        self._set(part, place, f"TorchScript {digest(str(value.code))}")

    def _unknown(self, value: Any, part: str, place: str, depth: int) -> None:
        self._set(part, place, _type_name(type(value)))

    def _object(self, value: Any, part: str, place: str, depth: int) -> None:
        kind = type(value)
        self._set(part, place, self._type(kind, depth))
        attributes = dict(_attributes(value))
        if kind.__module__.startswith("torch._dynamo"):
            return
        if library_of(kind) is None or isinstance(value, _SPACES):
            for name, item in attributes.items():
                look = functools.partial(self._visit, item, part, _in("attribute", name, place), depth)
                self._later(name, look)
        elif callable(value) or all(map(_settings, attributes.values())):
            for name, item in attributes.items():
                self._visit(item, part, _in("attribute", name, place), depth + 3)

    _looks: tuple[tuple[Any, Callable[..., None]], ...] = (
        (types.FunctionType, _function),
        (types.MethodType, _method),
        (functools.partial, _partial),
        ((torch.jit.ScriptFunction, torch.jit.ScriptModule), _script),
        (nn.Module, _module),
        ((torch.Generator, random.Random, np.random.Generator, np.random.RandomState), _generator),
        ((Job, torch.utils.data.Dataset, torch.utils.data.DataLoader, pathlib.PurePath), _unknown),
        (Mapping, _items),
        ((list, tuple, deque), _sequence),
        ((set, frozenset), _set_of),
        (Iterator, _unknown),
        ((types.BuiltinFunctionType, types.MethodWrapperType, types.WrapperDescriptorType, types.MethodDescriptorType,
          np.ufunc, type(functools.lru_cache(len))), _named),
    )  # fmt: skip


def describe_tensor(value: Tensor | np.ndarray[Any, Any]) -> str:
    """Shape, dtype and a hash of the values."""
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
    return f"{shape} {digest(as_bytes(value))}"


def _names(code: types.CodeType) -> tuple[set[str], set[str]]:
    """Names that code reads as globals, and all names that it mentions; functions inside it included."""
    read = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    mentioned = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            more, others = _names(constant)
            read, mentioned = read | more, mentioned | others
    return read, mentioned


def _overrides(kind: type, name: str) -> bool:
    """Whether a class has something that a library's class has as well, such as `forward`."""
    return any(name in vars(base) for base in kind.__mro__ if base is not object and library_of(base) is not None)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    yield from list((getattr(value, "__dict__", None) or {}).items())
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            descriptor = kind.__dict__.get(name)
            if isinstance(descriptor, types.MemberDescriptorType) and hasattr(value, name):
                yield name, getattr(value, name)


def _settings(value: Any, depth: int = 0) -> bool:
    """Whether a value is nothing but settings: plain values, and containers of them."""
    if depth > 6:
        return False
    if isinstance(value, Mapping):
        return all(_settings(item, depth + 1) for item in value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(_settings(item, depth + 1) for item in value)
    return isinstance(value, (*_PLAIN, enum.Enum, type))


def _seed(value: Any) -> str:
    if isinstance(value, torch.Generator):
        return f"of seed {value.initial_seed()}"
    if isinstance(value, np.random.Generator):
        entropy = getattr(getattr(value.bit_generator, "seed_seq", None), "entropy", None)
        unseeded = not isinstance(entropy, int) or entropy >= 1 << 64  # 128 bits from the system
        return "" if unseeded else f"of seed {entropy}"
    if type(value) is random.Random:
        return f"in state {digest(repr(value.getstate()))}"
    return f"in state {digest(repr(value.get_state()))}" if isinstance(value, np.random.RandomState) else ""


def _in(kind: str, name: str, place: str) -> str:
    return f"{kind} {name} of {place}" if place else f"{kind} {name}"


def _type_name(kind: type) -> str:
    short = library_of(kind) is None or kind.__module__ == "builtins"
    return kind.__qualname__ if short else f"{kind.__module__}.{kind.__qualname__}"


def _key(value: Any) -> str:
    return _short(value) if isinstance(value, _PLAIN) else _type_name(type(value))


def _short(value: Any) -> str:
    return _cut(value if isinstance(value, (torch.dtype, torch.device, torch.layout)) else repr(value))


def _cut(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 20]}... {digest(text)}"
