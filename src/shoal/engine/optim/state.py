"""One member's optimizer state, between the stack and what torch's `optimizer.state_dict()` holds."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.engine.optim.rule import Rule, State, scalar_dtype


def torch_entry(rule: Rule, state: State, h: Mapping[str, float]) -> State:
    """The entry torch has for a parameter: names, shapes and dtypes as torch's. Empty: torch has no entry.

    `state`: the member's state on the host, which becomes part of the entry. `h`: the numbers of its parameter group.
    """
    if float(state["step"]) == 0 and "sum" not in state:
        return {}  # torch makes its state at the first step (Adagrad: when it is built)
    entry = rule.torch_entry(state, h)
    if "step" in entry:
        entry["step"] = entry["step"].to("cpu", scalar_dtype())
    return entry


def torch_values(
    rule: Rule, entry: Mapping[str, Any], state: Mapping[str, Tensor], *, step: int | None = None
) -> list[tuple[Tensor, Tensor]]:
    """What torch's entry for one parameter says: tensors of the stack, and a value in its dtype for a row of each.

    `step`: how many steps the member took, for SGD alone, which does not count them. What torch does not have
    (momentum 0) becomes zero. A value of one element is meant for the whole row.
    """
    if not entry:
        known = step is not None and "started" in state
        return [(state["step"], torch.tensor(step, dtype=state["step"].dtype))] if known else []
    values_of = rule.from_entry(entry)
    if step is not None and "step" not in entry:
        values_of["step"] = float(step)
    missing = sorted(set(state) - set(values_of) - {"momentum_buffer"})
    unknown = sorted(set(values_of) - set(state))
    if missing or unknown:
        raise ValueError(f"state for {rule!r}: missing {missing}, unknown {unknown}; it has {sorted(state)}")
    values = []
    for name, stacked in state.items():
        value = torch.as_tensor(values_of.get(name, 0.0))
        if value.ndim and value.shape != stacked.shape[1:]:
            raise ValueError(f"{name} has shape {tuple(value.shape)}, the parameter {tuple(stacked.shape[1:])}")
        values.append((stacked, value.to(stacked.dtype)))
    return values


def load_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """`optimizer.load_state_dict(state)`, with numbers such as NAdam's `mu_product` in the dtype they have in `state`.

    torch gives them that of their parameter, and in float64 they would continue with another rounding than before.
    The dicts of groups and state stay the same objects: an optimizer inside of this one may have them too.
    """
    groups, entries = list(optimizer.param_groups), vars(optimizer).get("state")
    optimizer.load_state_dict(dict(state))
    for place, (group, content) in enumerate(zip(groups, optimizer.param_groups, strict=False)):
        optimizer.param_groups[place] = _refilled(group, content)
    if entries is not None:  # otherwise it is a property
        optimizer.state = _refilled(entries, optimizer.state)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    places = [place for group in state["param_groups"] for place in group["params"]]
    for place, param in zip(places, params, strict=True):
        for name, value in state["state"].get(place, {}).items():
            loaded = optimizer.state[param].get(name)
            if isinstance(value, Tensor) and isinstance(loaded, Tensor) and not value.ndim:
                optimizer.state[param][name] = loaded.to(value.dtype)


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
    """A whole `state_dict()` for a member that trained in a stack.

    `skeleton` is the param groups as the real optimizer's `state_dict()` has them: their keys, and the order of the
    parameters. `entries` has one state per parameter in that order; `groups` the current settings.
    """
    assert len(entries) == sum(len(group["params"]) for group in skeleton), "a state for every parameter"
    param_groups = [
        {**group, **{name: _like(group.get(name), value) for name, value in settings.items() if name != "params"}}
        for group, settings in zip(skeleton, groups, strict=True)
    ]
    return {"state": {i: dict(entry) for i, entry in enumerate(entries) if entry}, "param_groups": param_groups}


def _like(old: Any, new: Any) -> Any:
    """The new value, in the form the group has it: a tensor stays a tensor, an equal number stays as written."""
    if isinstance(old, Tensor):
        return old.detach().clone().fill_(float(new))
    return copy.deepcopy(old) if type(old) in (int, float) and old == new else new
