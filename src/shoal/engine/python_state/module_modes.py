"""Train and eval mode of a network's modules, where a class may have a `train()` of its own.

Such a method keeps a frozen backbone in eval mode, or merges adapters into weights for evaluation. It is called as a
plain loop calls it: before each epoch and after each validation. Apart from that modules keep the mode that they were
built in, so that the function that builds a network may freeze a batch norm with `eval()`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import nn

from shoal.engine.python_state.places import Path
from shoal.engine.python_state.preserve import PythonState

Network = TypeVar("Network", bound=nn.Module)


def in_eval_mode(model: Network) -> Network:
    """The network itself, in eval mode; a `train()` of its own may not return it."""
    model.eval()
    return model


def built_in_eval_mode(model: nn.Module) -> frozenset[str]:
    """Names of modules of a new network that are in eval mode; none where all of it is, as it is after inference."""
    return frozenset(name for name, module in model.named_modules() if model.training and not module.training)


def enter_train_mode(model: nn.Module, built_in_eval: frozenset[str]) -> None:
    """As `model.train()`, but modules stay in eval mode that were built in it."""
    if not model.training:
        model.train()
    for name, module in own_train_methods(model):
        if name not in built_in_eval:
            module.train()
    for name in built_in_eval:
        model.get_submodule(name).training = False


def own_train_methods(model: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules that have a `train()` of their own, by their names."""
    if getattr(model.train, "__func__", None) is not nn.Module.train:
        yield name, model
        return
    for child, module in model.named_children():
        yield from own_train_methods(module, f"{name}.{child}" if name else child)


def change_by_eval(model: nn.Module) -> Path | None:
    """Put a network into eval mode, and say what its own `train()` changes by that besides modes of modules."""
    if not any(own_train_methods(model)):
        model.eval()
        return None
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    state = PythonState({"model": model}, skip=model)
    model.eval()
    changed: list[Path] = [
        ("model", f".{name}") for name, value in values.items() if not torch.equal(tensors[name], value)
    ]
    changed += [path for path in state.changes() if path[-1] != ".training"]
    return changed[0] if changed else None
