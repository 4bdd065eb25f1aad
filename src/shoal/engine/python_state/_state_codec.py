"""Encode Python values as plain data (numbers, strings, lists, dicts and tensors), and decode them again.

Objects that the reading process has too, since it builds the same jobs, are encoded as their paths (see `state_walk`).
Other objects are encoded by their parts, each object once. Decoding calls no user code, and can only refer to classes
and functions that the program has already loaded (see `_named`).
"""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shoal.engine.python_state._parts import MAKE, NotSavable, fill, name_kind, take_apart
from shoal.engine.python_state.places import Path
from shoal.errors import OutError

Plain = Any
"""An encoded value: None, a number, a string, bytes, or a list whose first element is the kind of the value."""

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_OPEN = frozenset({
    "argparse", "builtins", "collections", "decimal", "enum", "fractions", "functools", "itertools", "math", "operator",
    "pathlib", "random", "statistics", "types",
})  # fmt: skip
"""Modules of the standard library to whose classes and functions a checkpoint may refer."""

_NAMED = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, np.ufunc)


class Encoder:
    """Encodes values. `paths` has, by id, the paths of objects that the reading process has too."""

    def __init__(self, paths: Mapping[int, Path]) -> None:
        self.nodes: list[Plain] = []
        self._paths = paths
        self._numbers: dict[int, int] = {}
        self._held: list[Any] = []  # keeps the objects alive, so that their ids stay valid

    def value(self, value: Any, *, anew: bool = False) -> Plain:
        """Encode a value, and append the objects that it contains to `nodes`.

        Args:
            anew: Encode the object by its parts even if the reading process has it, so that a new one is built there.

        Raises:
            NotSavable: If the value cannot be encoded; `nodes` is then unchanged.
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
        if isinstance(value, np.generic):
            return ["number", value]
        if isinstance(value, types.ModuleType):
            return ["name", *_name(value, "a module of Python's own")]
        if isinstance(value, type):
            return ["name", *_name(value, "a class that was made on the way")]
        named = isinstance(value, types.FunctionType | np.ufunc) or (
            isinstance(value, types.BuiltinFunctionType) and isinstance(value.__self__, types.ModuleType | type)
        )
        return ["name", *_name(value, "a function that was made on the way")] if named else self._number(value)

    def _number(self, value: Any) -> Plain:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = number = len(self.nodes)
            self._held.append(value)
            self.nodes.append(None)
            self.nodes[number] = self._node(value)
        return ["node", self._numbers[id(value)]]

    def _node(self, value: Any) -> Plain:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if type(value) is np.ndarray and value.dtype.kind in "biufc":
            return ["array", value]
        parts = take_apart(value)
        self._held.append(parts)
        try:
            attributes = {name: self._value(held) for name, held in parts.attributes.items()}
        except NotSavable as error:
            raise NotSavable(f"{name_kind(value)} with {error}") from None
        return [parts.kind, [*map(self._value, parts.arguments)], [*map(self._value, parts.items)], attributes]

    def _tensor(self, value: Tensor) -> Plain:
        plain = type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided
        if not plain or is_lazy(value) or value.is_meta:
            raise NotSavable(f"a {type(value).__name__}")
        grad = self._value(value.grad) if value.is_leaf and value.grad is not None else None
        needs = value.is_leaf and value.requires_grad
        return ["tensor", value.detach(), type(value) is nn.Parameter, needs, value.device.type != "cpu", grad]


class Decoder:
    """Decodes values. `objects` has the existing objects by path; tensors that were on a GPU are put on `device`."""

    def __init__(self, nodes: list[Plain], objects: Mapping[Path, Any], device: torch.device) -> None:
        self._nodes, self._objects, self._device = nodes, objects, device
        self._made: dict[int, Any] = {}

    def value(self, value: Plain) -> Any:
        """Decode a value."""
        if not isinstance(value, list):
            return value
        kind, *content = value
        if kind == "at":
            return self._objects[tuple(content)]
        if kind == "name":
            return _named(*content)
        if kind == "node":
            if content[0] not in self._made:
                self._make(content[0])
            return self._made[content[0]]
        return content[0]

    def _make(self, number: int) -> None:
        """Build an object before its items and attributes, since these may refer to it."""
        kind, *content = self._nodes[number]
        if kind == "tensor":
            self._made[number] = self._tensor(*content)
        elif kind == "array":
            self._made[number] = content[0].copy()
        else:
            arguments, items, attributes = content
            made = [self.value(argument) for argument in arguments]
            if kind == "random numbers" and made[1] is not None and made[1].type != "cpu":
                made[1] = self._device
            self._made[number] = MAKE[kind](*made)
            held = {name: self.value(value) for name, value in attributes.items()}
            fill(self._made[number], [self.value(item) for item in items], held)

    def _tensor(self, value: Tensor, parameter: bool, needs: bool, away: bool, grad: Plain) -> Tensor:
        value = value.to(self._device) if away else value.clone()
        made = nn.Parameter(value, requires_grad=needs) if parameter else value.requires_grad_(needs)
        made.grad = self.value(grad)
        return made


def _name(value: Any, why: str) -> tuple[str, str]:
    """Return the module and the name of a class or a function, or a module's name and an empty string."""
    module, name = getattr(value, "__module__", None) or "builtins", getattr(value, "__qualname__", value.__name__)
    if isinstance(value, types.ModuleType):
        module, name = value.__name__, ""
    try:
        same = _named(module, name) is value
    except (KeyError, TypeError, OutError):
        same = False
    if not same:
        raise NotSavable(why)
    return module, name


def _named(module: str, name: str = "") -> Any:
    """Return the class, function or module of this name from a module that is already loaded.

    Raises OutError for built-in functions and for most of the standard library, since the user's code may call
    functions in its state, and a manipulated checkpoint could refer to `os.system`.
    """
    value: Any = sys.modules[module]
    modules = {module}
    for part in name.split(".") if name else ():
        value = vars(value)[part]  # getattr could import a module or call user code
        modules.add(value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None) or "")
    tops = {place.partition(".")[0] for place in modules}
    closed = not tops.isdisjoint(sys.stdlib_module_names - _OPEN) or not isinstance(value, _NAMED)
    if closed or ("builtins" in tops and not isinstance(value, type)):
        raise OutError(f"a checkpoint may not name {'.'.join(filter(None, (module, name)))}")
    return value
