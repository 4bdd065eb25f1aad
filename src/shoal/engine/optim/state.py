"""Convert one member's optimizer state between the stack and torch's `optimizer.state_dict()`."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.engine.optim.rule import Rule, State, scalar_dtype


def torch_entry(rule: Rule, state: State, h: Mapping[str, float]) -> State:
    """Return torch's state of a parameter, with torch's names, shapes and dtypes; empty if torch has none.

    Args:
        state: The member's state on the host, which becomes part of the entry.
        h: The hyper-parameters of its parameter group.
    """
    if float(state["step"]) == 0 and "sum" not in state:
        return {}  # torch creates its state at the first step (Adagrad: when the optimizer is built)
    entry = rule.torch_entry(state, h)
    if "step" in entry:
        entry["step"] = entry["step"].to("cpu", scalar_dtype())
    return entry


def torch_values(
    rule: Rule, entry: Mapping[str, Any], state: Mapping[str, Tensor], *, step: int | None = None
) -> list[tuple[Tensor, Tensor]]:
    """Return pairs (tensor of the stack, value for the member's row of it) from torch's state of one parameter.

    State that torch does not have (with momentum 0) becomes zero. A value of one element is meant for the whole row.

    Args:
        step: How many steps the member took, needed for SGD only, which does not count them.
    """
    if not entry:
        counts_started = step is not None and "started" in state
        return [(state["step"], torch.tensor(step, dtype=state["step"].dtype))] if counts_started else []
    by_name = rule.from_entry(entry)
    if step is not None and "step" not in entry:
        by_name["step"] = float(step)
    missing = sorted(set(state) - set(by_name) - {"momentum_buffer"})
    unknown = sorted(set(by_name) - set(state))
    if missing or unknown:
        raise ValueError(f"state for {rule!r}: missing {missing}, unknown {unknown}; it has {sorted(state)}")
    values = []
    for name, stacked in state.items():
        value = torch.as_tensor(by_name.get(name, 0.0))
        if value.ndim and value.shape != stacked.shape[1:]:
            raise ValueError(f"{name} has shape {tuple(value.shape)}, the parameter {tuple(stacked.shape[1:])}")
        values.append((stacked, value.to(stacked.dtype)))
    return values


def load_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Call `optimizer.load_state_dict(state)`, and keep the dtype of scalars such as NAdam's `mu_product`.

    Torch casts them to the dtype of their parameter; in float64 they would then be rounded differently than before.
    States of a parameter's shape get its memory layout.
    The dicts of groups and state stay the same objects, because an optimizer inside of this one may refer to them, and
    this one to those of the optimizer inside.
    A state in a form of the class's own (Lookahead: the inner state and the slow weights) is left to the class.
    """
    held = [(o, o.param_groups, list(o.param_groups), vars(o).get("state")) for o in _with_inner(optimizer)]
    optimizer.load_state_dict(dict(state))
    for one, groups, dicts, entries in held:
        pairs = zip(dicts, one.param_groups, strict=False)
        groups[:] = [*(_refilled(group, content) for group, content in pairs), *one.param_groups[len(dicts) :]]
        if "param_groups" in vars(one):  # otherwise it is a property
            one.param_groups = groups
        if entries is not None:
            one.state = _refilled(entries, one.state)
    if not in_torch_form(state):
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    indices = [index for group in state["param_groups"] for index in group["params"]]
    for index, param in zip(indices, params, strict=True):
        for name, value in state["state"].get(index, {}).items():
            loaded = optimizer.state[param].get(name)
            if not isinstance(value, Tensor) or not isinstance(loaded, Tensor):
                continue
            if not value.ndim:
                optimizer.state[param][name] = loaded.to(value.dtype)
            elif _has_other_layout(loaded, param):
                optimizer.state[param][name] = torch.empty_like(param, dtype=loaded.dtype).copy_(loaded)


def _with_inner(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Yield an optimizer and those that it wraps."""
    yield optimizer
    for value in vars(optimizer).values():
        if isinstance(value, Optimizer):
            yield from _with_inner(value)


def in_torch_form(state: Mapping[str, Any]) -> bool:
    """Return whether a `state_dict()` has the entries that torch's optimizers give it."""
    return "state" in state and "param_groups" in state


def copy_settings(optimizer: Optimizer, other: Optimizer) -> None:
    """Give the groups of an optimizer the settings of another one's groups."""
    for group, settings in zip(optimizer.param_groups, other.param_groups, strict=True):
        group.update(copy.deepcopy({name: value for name, value in settings.items() if name != "params"}))


def _has_other_layout(value: Tensor, param: Tensor) -> bool:
    """Return whether a state of its parameter's shape lies in memory in another order; fused updates need the same."""
    return value.layout == torch.strided and value.shape == param.shape and value.stride() != param.stride()


def _refilled(held: Any, content: Any) -> Any:
    """The same dict as before, with the content of another."""
    if held is not content:
        content = dict(content)
        held.clear()
        held.update(content)
    return held


def optimizer_state_dict(
    skeleton: Sequence[Mapping[str, Any]], entries: Sequence[Mapping[str, Tensor]], groups: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return a complete `state_dict()` for a member that trained in a stack.

    Args:
        skeleton: The param groups of the real optimizer's `state_dict()`: their keys, and the order of the parameters.
        entries: The state of each parameter, in that order.
        groups: The current settings.
    """
    assert len(entries) == sum(len(group["params"]) for group in skeleton), "a state for every parameter"
    param_groups = [
        {**group, **{name: _in_form_of(group.get(name), value) for name, value in settings.items() if name != "params"}}
        for group, settings in zip(skeleton, groups, strict=True)
    ]
    return {"state": {i: dict(entry) for i, entry in enumerate(entries) if entry}, "param_groups": param_groups}


def _in_form_of(old: Any, new: Any) -> Any:
    """Return the new value in the form that the group has: a tensor stays a tensor, and an equal number stays as
    written."""
    if isinstance(old, Tensor):
        return old.detach().clone().fill_(float(new))
    return copy.deepcopy(old) if type(old) in (int, float) and old == new else new
