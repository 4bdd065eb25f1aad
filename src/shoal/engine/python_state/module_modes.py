"""Switch a network's modules between train and eval mode, also if a class overrides `train()`.

An overridden `train()` may keep a frozen backbone in eval mode, or merge adapters into weights for evaluation. It is
called as in a plain loop: before each epoch and after each validation. Otherwise modules keep the mode in which they
were built, so that the function that builds a network can freeze a batch norm with `eval()`.
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
    """Put a network into eval mode and return it. An overridden `train()` may return something else."""
    model.eval()
    return model


def built_in_eval_mode(model: nn.Module) -> frozenset[str]:
    """Return the names of modules that were built in eval mode; none if the whole network is in eval mode."""
    return frozenset(name for name, module in model.named_modules() if model.training and not module.training)


def enter_train_mode(model: nn.Module, built_in_eval: frozenset[str]) -> None:
    """Put a network into train mode, except for modules that were built in eval mode."""
    if not model.training:
        model.train()
    for name, module in own_train_methods(model):
        if name not in built_in_eval:
            module.train()
    for name in built_in_eval:
        model.get_submodule(name).training = False


def own_train_methods(model: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost modules that override `train()`, with their names."""
    if getattr(model.train, "__func__", None) is not nn.Module.train:
        yield name, model
        return
    for child, module in model.named_children():
        yield from own_train_methods(module, f"{name}.{child}" if name else child)


def change_by_eval(model: nn.Module) -> Path | None:
    """Put a network into eval mode, and return the path of something other than a mode that this changed, if any."""
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
