"""Describe the code and attributes of a model or a function as one hashable value, its fingerprint.

Steps with equal fingerprints run the same Python code on the same values, so one trace serves both. Objects of unknown
types are compared by identity: at worst this costs a second trace, while a false match would give wrong results.
"""

from __future__ import annotations

import functools
import hashlib
import types
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shoal.data.source import parts

_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size, torch.layout)
_SKIPPED = frozenset({"_parameters", "_buffers", "_modules", "_flat_weights", "_flat_weight_refs"})
"""Attributes of a module that are handled separately. The last two are an RNN's second list of its parameters."""
_USUAL = frozenset({int, str, bool, type(None), torch.dtype})
_CONTAINERS = frozenset({dict, OrderedDict, list, tuple})
_MAX_DEPTH = 12


def fingerprint(value: Any, *, hold: list[Any] | None = None) -> Hashable:
    """Return a hashable description of `value`.

    The contents of a module's own parameters and buffers are left out, since training changes them.

    Args:
        hold: Receives the objects that are compared by id. Keep them alive as long as the fingerprint is used, since
            Python reuses the ids of deleted objects.
    """
    walker = _Walker([] if hold is None else hold)
    if isinstance(value, nn.Module):
        walker.trained = {id(t) for t in (*value.parameters(), *value.buffers())}
    return walker.visit(value, 0)


def _in_plain_memory(tensor: Tensor) -> bool:
    """Return whether a tensor's values can be read as bytes, which is not possible for sparse and quantized tensors."""
    return tensor.layout == torch.strided and not tensor.is_quantized


def split_floats(print: Hashable) -> tuple[Hashable, list[str]]:
    """Return a fingerprint without its floating-point numbers, and these numbers in order.

    The former is equal for steps that differ only in such numbers.
    """
    floats: list[str] = []

    def without(part: Any) -> Hashable:
        if type(part) is not tuple:
            return part  # type: ignore[no-any-return]
        if len(part) == 2 and part[0] is float:
            floats.append(part[1])
            return float
        return tuple([without(inner) for inner in part])

    return without(print), floats


class _Walker:
    def __init__(self, held: list[Any]) -> None:
        self.held = held
        self.seen: dict[int, int] = {}
        self.trained: set[int] = set()

    def visit(self, value: Any, depth: int) -> Hashable:
        kind = type(value)
        if kind in _USUAL:
            return (kind, value)
        if isinstance(value, _PLAIN):
            return (kind, repr(value) if isinstance(value, float) else value)
        if kind in _CONTAINERS and not value:  # a shortcut for modules' hooks, most of which are empty
            if id(value) in self.seen:
                return ("again", self.seen[id(value)])
            self.seen[id(value)] = len(self.seen)
            return (kind,)
        if isinstance(value, type | types.ModuleType | types.BuiltinFunctionType | np.ufunc | types.CodeType):
            return self._identity(value)
        if id(value) in self.seen:
            return ("again", self.seen[id(value)])
        self.seen[id(value)] = len(self.seen)
        if depth > _MAX_DEPTH:
            return self._identity(value)
        return self._visit_object(value, depth + 1)

    def _identity(self, value: Any) -> Hashable:
        self.held.append(value)
        return ("identity", id(value))

    def _visit_object(self, value: Any, depth: int) -> Hashable:
        if isinstance(value, nn.Module):
            return self._module(value, depth)
        if isinstance(value, Tensor | np.ndarray):
            return self._tensor(value)
        if isinstance(value, types.FunctionType):
            return self._function(value, depth)
        if isinstance(value, types.MethodType):
            return ("method", self.visit(value.__func__, depth), self.visit(value.__self__, depth))
        if isinstance(value, functools.partial):
            return ("partial", *(self.visit(v, depth) for v in (value.func, value.args, value.keywords)))
        if isinstance(value, list | tuple):
            return (type(value), *(self.visit(v, depth) for v in value))
        if isinstance(value, Mapping):
            return (type(value), *((self.visit(k, depth), self.visit(v, depth)) for k, v in value.items()))
        if isinstance(value, set | frozenset):
            return (type(value), frozenset(self.visit(v, depth) for v in value))
        attributes = getattr(value, "__dict__", None)
        if attributes is None or getattr(type(value), "__slots__", None):
            return self._identity(value)
        return (type(value), *((name, self.visit(v, depth)) for name, v in attributes.items()))

    def _module(self, module: nn.Module, depth: int) -> Hashable:
        tensors = tuple(
            (name, self._state(t))
            for group in (module._parameters, module._buffers)
            for name, t in group.items()
            if t is None or not is_lazy(t)
        )
        plain = tuple((k, self.visit(v, depth)) for k, v in vars(module).items() if k not in _SKIPPED)
        children = tuple((k, self.visit(v, depth - 1)) for k, v in module._modules.items())
        return (type(module), tensors, plain, children)

    def _state(self, tensor: Tensor | None) -> Hashable:
        """Describe a parameter or buffer, with a number that is equal for tied weights."""
        if tensor is None:
            return None
        tie = self.seen.setdefault(id(tensor), len(self.seen))
        content = None if id(tensor) in self.trained else self._tensor(tensor)
        strides = tensor.stride() if tensor.layout == torch.strided else str(tensor.layout)
        return (tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad, strides, tie, content)

    def _tensor(self, value: Any) -> Hashable:
        if isinstance(value, Tensor) and value.is_nested:
            return ("identity", id(value))
        shape = (tuple(value.shape), str(value.dtype))
        if isinstance(value, Tensor):
            held = parts(value)
            if held[0] is not value:
                return ("sparse", shape, str(value.layout), *map(self._tensor, held))
            if value.numel() > 1_000_000 or value.device.type == "meta" or not _in_plain_memory(value):
                return self._identity(value)
            # copied, since a tensor that shares memory with numpy can no longer be resized
            value = value.detach().cpu().clone(memory_format=torch.contiguous_format)
            value = value.view(torch.uint8).numpy() if value.dim() else value.reshape(1).view(torch.uint8).numpy()
        return ("tensor", shape, hashlib.blake2b(np.ascontiguousarray(value).tobytes(), digest_size=16).digest())

    def _function(self, function: types.FunctionType, depth: int) -> Hashable:
        cells = tuple(self._cell(cell, depth) for cell in function.__closure__ or ())
        defaults = (self.visit(function.__defaults__, depth), self.visit(function.__kwdefaults__, depth))
        self.held += (function.__code__, function.__globals__)
        return ("function", id(function.__code__), id(function.__globals__), cells, defaults)

    def _cell(self, cell: types.CellType, depth: int) -> Hashable:
        try:
            return self.visit(cell.cell_contents, depth)
        except ValueError:  # the cell is empty
            return "empty"
