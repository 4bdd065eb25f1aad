"""Load weights and buffers into a network, without copying where possible."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

LARGE = 1 << 14
"""The number of bytes from which avoiding a copy is worth it."""


def _uses(tensor: Tensor) -> tuple[int, int]:
    """Return the reference counts of a tensor's storage: in C++, and of its Python object."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


_EXAMPLE = torch.empty(1)
_ALONE = _uses(_EXAMPLE)
"""The reference counts of a tensor whose memory is not shared."""


def load_weights(model: nn.Module, state: Mapping[str, Any], *, give: bool = False) -> None:
    """Do `model.load_state_dict(state)`, even if a buffer had another shape when the state was taken.

    Args:
        give: The state is not used elsewhere, so the model may take its large tensors instead of copying them.
    """
    for name, buffer in model.named_buffers():
        saved, (owner, _, last) = state.get(name), name.rpartition(".")
        if not isinstance(saved, Tensor) or is_lazy(saved):
            continue
        module = model.get_submodule(owner)
        if is_lazy(buffer) and isinstance(module, LazyModuleMixin):
            continue  # a lazy module sets its shape itself
        if is_lazy(buffer) or saved.shape != buffer.shape:
            setattr(module, last, torch.empty_like(saved, device=buffer.device))
    model.load_state_dict(_give_large_tensors(model, state) if give else state)


def _give_large_tensors(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Give the model the memory of large tensors, and return a state with the model's own tensors in their place."""
    new_state = dict(state)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        saved = state.get(name)
        if type(saved) is Tensor and not is_lazy(tensor) and give_memory(tensor, saved):
            new_state[name] = tensor
    return new_state


def give_memory(tensor: Tensor, value: Tensor) -> bool:
    """Let a tensor take over the memory of `value`, which is not used elsewhere, and return whether it did.

    It does not if its own memory is shared, so that others would see a difference, or if it is small.
    """
    can_take = (
        tensor.layout == value.layout == torch.strided
        and tensor.nbytes >= LARGE
        and (tensor.shape, tensor.dtype, tensor.device) == (value.shape, value.dtype, value.device)
        and tensor.stride() == value.stride()
        and value.untyped_storage().nbytes() == value.nbytes
        and _has_own_memory(tensor)
    )
    if can_take:
        tensor.data = value
    return can_take


def _has_own_memory(tensor: Tensor) -> bool:
    """Return whether a tensor's memory is not shared with another tensor, an array, another process or the user."""
    if any(count > alone for count, alone in zip(_uses(tensor), _ALONE, strict=True)):
        return False
    storage = tensor.untyped_storage()  # memory that torch does not own, such as an array's, cannot be resized
    return storage.nbytes() == tensor.nbytes and storage.resizable() and not storage.is_shared()


def other_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's buffers that are not in its state_dict()."""
    modules = ((f"{name}." if name else "", module) for name, module in model.named_modules())
    buffers = (
        (f"{prefix}{name}", module._buffers.get(name))
        for prefix, module in modules
        if not isinstance(module, torch.jit.ScriptModule)
        for name in sorted(module._non_persistent_buffers_set)
    )
    return {name: buffer for name, buffer in buffers if buffer is not None and not is_lazy(buffer)}


def load_other_buffers(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Restore the buffers that `other_buffers` returned."""
    for name, value in saved.items():
        prefix, _, last = name.rpartition(".")
        module = model.get_submodule(prefix)
        buffers, buffer = module._buffers, module._buffers.get(last)
        if buffer is not None and not is_lazy(buffer) and buffer.shape == value.shape and buffer.dtype == value.dtype:
            buffer.detach().copy_(value)
        else:
            buffers[last] = value.clone()
            module._non_persistent_buffers_set.add(last)  # a step may have registered it
