"""Compute the values of tensors that a step makes from constants alone, such as a mask that leaves out the diagonal.

A step is recorded on tensors without data, so a result whose shape depends on a tensor's values (`logits[mask]`) cannot
be recorded, nor can control flow that does (`if (t[1:] > t[:-1]).all():`). Values that do not depend on the batch, the
weights, the buffers or random numbers are the same at every step, so they are computed here during the recording.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

MOST_ELEMENTS = 1_000_000
"""Values of larger tensors are not computed."""
_MAKERS = frozenset(
    {torch.arange, torch.as_tensor, torch.eye, torch.full, torch.linspace, torch.logspace, torch.ones, torch.tensor,
     torch.tril_indices, torch.triu_indices, torch.zeros}
)  # fmt: skip
"""Functions that make a tensor from numbers."""
_LIKE = frozenset(
    {torch.full_like, torch.ones_like, torch.zeros_like, Tensor.new_full, Tensor.new_ones, Tensor.new_zeros}
)
"""Functions that make a tensor like another one, regardless of the values in that one."""
_SELECT = frozenset({torch.masked_select, Tensor.masked_select})
_READ = frozenset(
    {Tensor.__bool__, Tensor.__contains__, Tensor.__float__, Tensor.__index__, Tensor.__int__, Tensor.item,
     Tensor.tolist, torch.allclose, torch.equal, torch.is_nonzero}
)  # fmt: skip
"""Functions that return values of tensors to Python."""
_SHAPED = frozenset(
    {torch.argwhere, torch.bincount, torch.nonzero, torch.repeat_interleave, torch.unique, torch.unique_consecutive,
     Tensor.argwhere, Tensor.bincount, Tensor.nonzero, Tensor.repeat_interleave, Tensor.unique,
     Tensor.unique_consecutive}
)  # fmt: skip
"""Functions whose results have shapes that depend on the values."""


class _Known(NamedTuple):
    """A tensor's value, and the version of the tensor for which it holds; writing to the tensor changes the version."""

    value: Tensor
    version: int


class Constants(TorchFunctionMode):
    """Tracks the values of constant tensors, so that code can read them and index other tensors with constant masks."""

    def __init__(self) -> None:
        super().__init__()
        self._known: Any = WeakTensorKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__getitem__:
            args = (args[0], self._as_indices(args[1]))
        elif func in _SELECT and len(args) == 2 and (mask := self._value(args[1])) is not None:
            shape = torch.broadcast_shapes(args[0].shape, mask.shape)  # type: ignore[no-untyped-call]
            return args[0].expand(shape)[_indices(mask, shape)]
        values = self._values(func, args, kwargs)
        if values is None:
            return func(*args, **kwargs)
        if func in _READ or func in _SHAPED:
            with _for_real():
                return func(*values[0], **values[1])
        given = [(tensor, tensor._version) for tensor in _tensors((args, kwargs))]
        out = func(*args, **kwargs)
        try:
            computed = _compute(func, *values)
        except Exception:
            return out
        for tensor, version in given:
            if tensor._version != version:
                self._note_written(tensor, version)
        for tensor, value in zip(_tensors(out), _tensors(computed), strict=True):
            self._note(tensor, value)
        return out

    def _as_indices(self, index: Any) -> Any:
        """Replace boolean masks whose values are known by index tensors."""
        parts: list[Any] = []
        for part in index if isinstance(index, tuple) else (index,):
            mask = self._value(part) if isinstance(part, Tensor) and part.dtype == torch.bool and part.dim() else None
            parts += [part] if mask is None else _indices(mask, mask.shape)
        return tuple(parts) if isinstance(index, tuple) or len(parts) > 1 else parts[0]

    def _values(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Return the arguments with each tensor replaced by its value; None if the result is not a constant."""
        if func in _LIKE and args and _is_plain(args[0]):
            with _for_real():
                like = torch.empty_strided(args[0].shape, args[0].stride(), dtype=args[0].dtype, device=args[0].device)
            return (like, *args[1:]), kwargs
        tensors = _tensors((args, kwargs))
        tensors.sort(key=lambda tensor: type(tensor) is Tensor)  # recorded tensors first: others would be copied
        if not (tensors or func in _MAKERS) or any(self._value(tensor) is None for tensor in tensors):
            return None
        values: tuple[Any, Any] = pytree.tree_map_only(Tensor, self._value, (args, kwargs))
        return values

    def _value(self, tensor: Tensor) -> Tensor | None:
        """Return a tensor's value, or None if it is not known. An ordinary tensor that the step reads is copied."""
        known = self._known.get(tensor)
        if known is None and type(tensor) is Tensor and not tensor.requires_grad and _is_plain(tensor):
            with _for_real():
                self._note(tensor, tensor.clone())
            known = self._known.get(tensor)
        return known.value if known is not None and known.version == tensor._version else None

    def _note(self, tensor: Tensor, value: Tensor) -> None:
        """Record a tensor's value, if both have the same strides.

        Otherwise their views would not be the same elements, and writing to them would give other values.
        """
        if value.stride() == tensor.stride() and _is_plain(tensor):
            self._known[tensor] = _Known(value, tensor._version)

    def _note_written(self, written: Tensor, version: int) -> None:
        """Update the known versions of a tensor and its views after an in-place operation.

        The operation has also been applied to the known value, which the values of the views share memory with.
        """
        memory = self._known[written].value.untyped_storage().data_ptr() if written in self._known else None
        for tensor, known in list(self._known.items()):
            if known.version == version and known.value.untyped_storage().data_ptr() == memory:
                self._known[tensor] = _Known(known.value, tensor._version)


def _tensors(arguments: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]


def _is_plain(tensor: Tensor) -> bool:
    small = not tensor.is_nested and tensor.layout == torch.strided and tensor.numel() <= MOST_ELEMENTS
    return small and tensor.device.type != "meta" and not tensor.is_quantized


def _indices(mask: Tensor, shape: torch.Size) -> tuple[Tensor, ...]:
    """Return the indices at which a mask, expanded to this shape, is true."""
    with _for_real():
        return mask.expand(shape).nonzero(as_tuple=True)


def _compute(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function with real values; raise ValueError if it draws random numbers."""
    devices = {tensor.device for tensor in _tensors((args, kwargs)) if tensor.is_cuda}
    generators = [torch.default_generator, *(torch.cuda.default_generators[device.index] for device in devices)]
    with _for_real():
        before = [generator.get_state() for generator in generators]
        try:
            out = func(*args, **kwargs)
        finally:
            moved = [(g, state) for g, state in zip(generators, before, strict=True) if not g.get_state().equal(state)]
            for generator, state in moved:
                generator.set_state(state)
        if moved:
            raise ValueError("it draws random numbers")
        return out


@contextmanager
def _for_real() -> Iterator[None]:
    """Run operators on real data inside this context, without recording them."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield
