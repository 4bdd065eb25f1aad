"""Which parameters of a traced step get a gradient: those are the ones an optimizer touches."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.engine.tracing.trace import Trace, autocast


def used_params(recorded: Trace) -> list[bool]:
    """Which parameters the first output (the loss) gives a gradient to: those are the ones an optimizer touches."""
    if recorded.used is None:
        recorded.used = _used_params(recorded) if recorded.first is None else used_params(recorded.first)
    return recorded.used


def _used_params(recorded: Trace) -> list[bool]:
    mode = next(
        value.fake_mode
        for node in recorded.nodes
        for value in pytree.tree_leaves(node.meta.get("val"))
        if hasattr(value, "fake_mode")
    )
    inputs = [node for node in recorded.nodes if node.op == "placeholder"]
    count = len(recorded.params)
    with mode, torch.enable_grad(), autocast(recorded.precision, inputs[0].meta["val"].device):
        values = [node.meta["val"] for node in inputs[:count]]
        leaves = [torch.empty_like(v, requires_grad=t) for v, t in zip(values, recorded.trainable, strict=True)]
        rest = [torch.empty_like(node.meta["val"]) for node in inputs[count:]]
        loss = recorded.module([*leaves, *rest])[0]
        if loss.is_cuda and any(node.target in _RECURRENT for node in recorded.nodes):
            reached = _reached(loss)  # cuDNN's backward cannot be run without memory
            return [id(leaf) in reached for leaf in leaves]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        grads = torch.autograd.grad(loss, wanted, allow_unused=True) if loss.requires_grad and wanted else ()
    gradients = dict(zip(map(id, wanted), grads, strict=False))
    return [gradients.get(id(leaf)) is not None for leaf in leaves]


_RECURRENT = {
    getattr(torch.ops.aten, name).input for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
}  # those over a whole sequence


def _reached(loss: Tensor) -> set[int]:
    """The leaves that a backward pass would come to, by their ids."""
    reached: set[int] = set()
    seen, waiting = set(), [loss.grad_fn]
    while waiting:
        function = waiting.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        if hasattr(function, "variable"):
            reached.add(id(function.variable))
        waiting += [other for other, _ in function.next_functions]
    return reached
