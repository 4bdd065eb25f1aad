"""Loads weights and buffers into a network, without copying where that is possible."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

LARGE = 1 << 14
"""Bytes from which avoiding a copy is worth it."""


def _uses(tensor: Tensor) -> tuple[int, int]:
    """Reference counts of a tensor's storage: in C++, and of its Python object."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


_EXAMPLE = torch.empty(1)
_ALONE = _uses(_EXAMPLE)
"""The counts of a tensor whose memory is not shared."""


def load_weights(model: nn.Module, state: Mapping[str, Any], *, give: bool = False) -> None:
    """`model.load_state_dict(state)`, also where a buffer has had another shape when the state was taken.

    `give`: the state is not used elsewhere, so the model may take its large tensors instead of copying them.
    """
    for name, buffer in model.named_buffers():
        saved = state.get(name)
        if not isinstance(saved, Tensor) or is_lazy(saved) or is_lazy(buffer):
            continue  # a lazy module takes the shape by itself
        if saved.shape != buffer.shape:
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, torch.empty_like(saved, device=buffer.device))
    model.load_state_dict(_given(model, state) if give else state)


def _given(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Give the model the memory of large tensors. In the state returned they are the model's own: nothing to copy."""
    given = dict(state)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        saved = state.get(name)
        if type(saved) is Tensor and not is_lazy(tensor) and give_memory(tensor, saved):
            given[name] = tensor
    return given


def give_memory(tensor: Tensor, value: Tensor) -> bool:
    """Let a tensor take over the memory of `value`, which is not used elsewhere; whether it did.

    It does not where its own memory is shared, so that others would see a difference, or where it is small.
    """
    alike = (
        tensor.layout == value.layout == torch.strided
        and tensor.nbytes >= LARGE
        and (tensor.shape, tensor.dtype, tensor.device) == (value.shape, value.dtype, value.device)
        and tensor.stride() == value.stride()
        and value.untyped_storage().nbytes() == value.nbytes
        and _has_own_memory(tensor)
    )
    if alike:
        tensor.data = value
    return alike


def _has_own_memory(tensor: Tensor) -> bool:
    """Whether a tensor's memory is not shared: with another tensor, an array, another process or the user."""
    if any(count > alone for count, alone in zip(_uses(tensor), _ALONE, strict=True)):
        return False
    storage = tensor.untyped_storage()  # memory that is not torch's own, such as an array's, cannot be resized
    return storage.nbytes() == tensor.nbytes and storage.resizable() and not storage.is_shared()


def other_buffers(model: nn.Module) -> dict[str, Tensor]:
    """A model's buffers that are not in its state_dict()."""
    modules = ((f"{name}." if name else "", module) for name, module in model.named_modules())
    buffers = (
        (f"{prefix}{name}", module._buffers.get(name))
        for prefix, module in modules
        if not isinstance(module, torch.jit.ScriptModule)
        for name in sorted(module._non_persistent_buffers_set)
    )
    return {name: buffer for name, buffer in buffers if buffer is not None and not is_lazy(buffer)}


def load_other_buffers(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Put back what `other_buffers` gave."""
    for name, value in saved.items():
        prefix, _, last = name.rpartition(".")
        buffers = model.get_submodule(prefix)._buffers
        held = buffers.get(last)
        if held is not None and not is_lazy(held) and held.shape == value.shape and held.dtype == value.dtype:
            held.detach().copy_(value)
        else:
            buffers[last] = value.clone()
