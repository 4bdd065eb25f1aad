"""Hooks on a network's parameters and modules: those that a copy would lose, and those that `params` and `optimizer`
set."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.parameter import is_lazy

Hooks = MutableMapping[int, Any]

_OF_MODULES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")

_set_by_optimizers: WeakKeyDictionary[nn.Module, list[tuple[Hooks, int]]] = WeakKeyDictionary()
"""For each network, the hooks that were set while its optimizer was made."""


def _all_hooks(model: nn.Module) -> list[tuple[Hooks, int]]:
    holders: list[tuple[Any, str]] = [(module, name) for module in model.modules() for name in _OF_MODULES]
    holders += [(param, name) for param in model.parameters() if not is_lazy(param) for name in _OF_PARAMETERS]
    present: list[Hooks] = [hooks for holder, name in holders if (hooks := getattr(holder, name, None))]
    return [(hooks, number) for hooks in present for number in hooks]


@contextmanager
def hooks_set_once(model: nn.Module) -> Iterator[None]:
    """Make an optimizer inside this context, which happens more than once for a network: to inspect it, and to train.

    Hooks that `params` or the optimizer set on the network replace those that they set before.
    """
    for hooks, number in _set_by_optimizers.pop(model, ()):
        hooks.pop(number, None)
    before = {number for _, number in _all_hooks(model)}  # torch numbers all hooks in a process
    yield
    added = [(hooks, number) for hooks, number in _all_hooks(model) if number not in before]
    if added:
        _set_by_optimizers[model] = added


def hooked_parameter(model: nn.Module) -> str | None:
    """Return the name of a parameter with a gradient hook, which `copy.deepcopy` omits; None if there is none."""
    for name, param in model.named_parameters():
        if not is_lazy(param) and any(getattr(param, hooks, None) for hooks in _OF_PARAMETERS):
            return name
    return None


def lost_in_a_copy(model: nn.Module) -> str | None:
    """Describe the hooks that a copy of a network in training would lose or have twice; None if there are none."""
    name = hooked_parameter(model)
    if name is not None:
        return f"a gradient hook on parameter {name!r}"
    return "hooks that its params= or optimizer= set" if _set_by_optimizers.get(model) else None
