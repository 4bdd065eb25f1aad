"""Check a model for hooks, tensor layouts and shared memory that make it impossible to record its step."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from shoal.engine.tracing.patches import Untraceable


def refuse_at_sight(model: nn.Module) -> set[str]:
    """Raise Untraceable if the model itself shows that its step cannot be recorded.

    Returns the names of integer buffers that a module also has as a plain attribute. The recorded graph shows whether
    the step writes to them.
    """
    for name, module in model.named_modules():
        where = f"{name or 'the model'} ({type(module).__name__})"
        if isinstance(module, torch.jit.ScriptModule):
            raise Untraceable(f"{where} is a TorchScript module")
        if getattr(module, "_backward_hooks", None) or getattr(module, "_backward_pre_hooks", None):
            raise Untraceable(f"{where} has a backward hook")
        if isinstance(module, torch._dynamo.eval_frame.OptimizedModule):
            raise Untraceable(f"{where} is already compiled; give Shoal the plain module")
        if isinstance(module, LazyModuleMixin):  # even if a checkpoint has its weights, so that a resume runs as before
            raise Untraceable(f"{where} is built lazily, at the first batch")
    for name, param in model.named_parameters():
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise Untraceable(f"{name} is built lazily, at the first batch")
        if param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None):
            raise Untraceable(f"parameter {name} has a gradient hook")
        if param.layout != torch.strided or type(param) is not nn.Parameter:
            raise Untraceable(f"parameter {name} is a {type(param).__name__} of layout {param.layout}")
    for name, buffer in model.named_buffers():
        if is_lazy(buffer):
            raise Untraceable(f"{name} is built lazily, at the first batch")
        if buffer.layout != torch.strided or buffer.is_quantized:
            raise Untraceable(f"buffer {name} has layout {buffer.layout}")
    if not any(True for _ in model.parameters()):
        raise Untraceable("it has no parameters")
    spans = sorted(
        (*_memory(tensor), name)
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if tensor.numel()
    )
    for (_, end, name), (start, _, other) in pairwise(spans):
        if start < end:  # tensors may be adjacent in one storage, as the weights of an LSTM on a GPU are
            raise Untraceable(f"{other} and {name} are two names of the same memory")
    aliases, whole = set[str](), {name for name, b in model.named_buffers() if not b.dtype.is_floating_point}
    for module in model.modules():
        attributes = [value for name, value in vars(module).items() if not name.startswith("_")]
        for tensor in pytree.tree_leaves(attributes):
            if type(tensor) is Tensor and tensor.layout == torch.strided and tensor.numel():
                begin, past = _memory(tensor)
                owner = next((name for start, end, name in spans if begin < end and start < past), None)
                # batch_norm updates floating-point buffers without an operator that says so
                if owner is not None and owner not in whole:
                    raise Untraceable(f"an attribute is another name of {owner}")
                aliases |= {owner} if owner is not None else set()
    return aliases


def _memory(tensor: Tensor) -> tuple[int, int]:
    """Return the address of a tensor's first byte, and the address after its last byte."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (reach + 1) * tensor.element_size()
