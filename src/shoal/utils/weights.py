"""Weights and buffers of a network, put back as they were."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

LARGE = 1 << 14
"""Bytes from which a copy is worth being avoided."""


def _uses(tensor: Tensor) -> tuple[int, int]:
    """How many tensors use a tensor's memory, and how many hold the Python object of it, of which there is one."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


_EXAMPLE = torch.empty(1)
_ALONE = _uses(_EXAMPLE)
"""Of a tensor whose memory nobody else uses."""


def load_weights(model: nn.Module, state: Mapping[str, Any], *, give: bool = False) -> None:
    """`model.load_state_dict(state)`, also where a buffer has had another shape when the state was taken.

    `give`: nobody else uses the state. Its large tensors become the model's own then, instead of being copied.
    """
    for name, buffer in model.named_buffers():
        saved = state.get(name)
        if isinstance(saved, Tensor) and saved.shape != buffer.shape:
            owner, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(owner), own_name, torch.empty_like(saved, device=buffer.device))
    model.load_state_dict(_given(model, state) if give else state)


def _given(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """The state, with tensors that the model has been given replaced by the model's own: those are not copied."""
    given = dict(state)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        saved = state.get(name)
        if type(saved) is Tensor and not is_lazy(tensor) and give_memory(tensor, saved):
            given[name] = tensor
    return given


def give_memory(tensor: Tensor, value: Tensor) -> bool:
    """Let a tensor have the memory of another, of which nobody else knows, instead of a copy of it; whether it does.

    It does not where that could be seen, by whoever else has a part in its memory, or is not worth it.
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
    """Whether nobody else has a part in a tensor's memory: no other tensor, no array, no process, no user."""
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
