"""Which parameters are trainable: as the network was built, and as steps have changed it (gradual unfreezing)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from torch import nn

_as_built: WeakKeyDictionary[nn.Module, dict[str, bool]] = WeakKeyDictionary()
"""For each member's network, `requires_grad` of its parameters when it was built."""


def note_trainable(model: nn.Module) -> None:
    """Note which parameters of a new network are trainable."""
    _as_built[model] = _flags(model)


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
