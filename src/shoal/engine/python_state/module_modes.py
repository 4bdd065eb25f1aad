"""Switch a network's modules between train and eval mode, also if a class overrides `train()`.

An overridden `train()` may keep a frozen backbone in eval mode, or merge adapters into weights for evaluation. It is
called as in a plain loop: before each epoch and after each validation. Otherwise modules keep the mode in which they
were built, so that the function that builds a network can freeze a batch norm with `eval()`.

Also which parameters are trainable: as the network was built, and as steps have changed it (gradual unfreezing).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar
from weakref import WeakKeyDictionary

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


_as_built: WeakKeyDictionary[nn.Module, dict[str, bool]] = WeakKeyDictionary()
"""For each member's network, `requires_grad` of its parameters when it was built."""


def note_trainable(model: nn.Module) -> None:
    """Note which parameters of a new network are trainable."""
    _as_built[model] = _flags(model)


def note_trainable_as(copy: nn.Module, original: nn.Module) -> None:
    """Note for a copy of a network what was noted for the original."""
    if original in _as_built:
        _as_built[copy] = dict(_as_built[original])


def changed_trainable(model: nn.Module) -> dict[str, bool]:
    """Return `requires_grad` of the parameters for which it was changed since the network was built."""
    built = _as_built.get(model, {})
    return {name: flag for name, flag in _flags(model).items() if built.get(name, flag) != flag}


def set_trainable(model: nn.Module, changed: Mapping[str, bool]) -> None:
    """Set `requires_grad` as when the network was built, but for those in `changed`."""
    flags = {**_as_built.get(model, {}), **changed}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad != flags.get(name, parameter.requires_grad):
            parameter.requires_grad_(flags[name])


@contextmanager
def trainable_as_built(model: nn.Module) -> Iterator[None]:
    """Set `requires_grad` as when the network was built inside this context: for code that selects the optimizer's
    parameters by it, and is called again later."""
    changed = changed_trainable(model)
    if not changed:
        yield
        return
    set_trainable(model, {})
    try:
        yield
    finally:
        set_trainable(model, changed)


def _flags(model: nn.Module) -> dict[str, bool]:
    return {name: parameter.requires_grad for name, parameter in model.named_parameters()}
