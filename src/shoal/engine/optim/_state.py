"""One member's optimizer state, between the stack and what torch's `optimizer.state_dict()` holds."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.engine.optim._hparams import PAIRS
from shoal.engine.optim._rule import Rule, State, scalar_dtype


def to_torch_state(rule: Rule, state: Mapping[str, Tensor], slot: int, h: Mapping[str, float]) -> State:
    """The entry torch has for this parameter: names, shapes and dtypes as torch's. Empty: torch has no entry.

    `h` is the member's numbers for the parameter's group (`Columns.row(slot)[group]`). Every tensor is a copy: a view
    would be saved with the whole stack behind it. It is the host's: a full GPU has no room for those who are sent away.
    """
    return torch_entry(rule, {name: value[slot].detach().to("cpu", copy=True) for name, value in state.items()}, h)


def torch_entry(rule: Rule, own: State, h: Mapping[str, float]) -> State:
    """The same from a member's own state on the host, which becomes part of it."""
    if float(own["step"]) == 0 and "sum" not in own:
        return {}  # torch makes its state at the first step (Adagrad: when it is built)
    entry = rule.torch_entry(own, h)
    if "step" in entry:
        entry["step"] = entry["step"].to("cpu", scalar_dtype())
    return entry


def from_torch_state(
    rule: Rule, entry: Mapping[str, Any], state: Mapping[str, Tensor], slot: int, *, step: int | None = None
) -> None:
    """Write torch's entry for one parameter into a member's slot, in place; an empty entry leaves the slot fresh.

    `state` comes from `rule.init` (or `init_all`: then the shared clock is written too).
    """
    with torch.no_grad():
        for stacked, value in torch_values(rule, entry, state, step=step):
            stacked[slot] = value.to(stacked.device)


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
    found = rule.from_entry(entry)
    if step is not None and "step" not in entry:
        found["step"] = float(step)
    missing = sorted(set(state) - set(found) - {"momentum_buffer"})
    unknown = sorted(set(found) - set(state))
    if missing or unknown:
        raise ValueError(f"state for {rule!r}: missing {missing}, unknown {unknown}; it has {sorted(state)}")
    values = []
    for name, stacked in state.items():
        value = torch.as_tensor(found.get(name, 0.0))
        if value.ndim and value.shape != stacked.shape[1:]:
            raise ValueError(f"{name} has shape {tuple(value.shape)}, the parameter {tuple(stacked.shape[1:])}")
        values.append((stacked, value.to(stacked.dtype)))
    return values


def load_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """`optimizer.load_state_dict(state)`, with numbers such as NAdam's `mu_product` in the dtype they have in `state`.

    torch gives them that of their parameter, and in float64 they would go on with another rounding than before.
    """
    optimizer.load_state_dict(dict(state))
    params = [param for group in optimizer.param_groups for param in group["params"]]
    places = [place for group in state["param_groups"] for place in group["params"]]
    for place, param in zip(places, params, strict=True):
        for name, value in state["state"].get(place, {}).items():
            loaded = optimizer.state[param].get(name)
            if isinstance(value, Tensor) and isinstance(loaded, Tensor) and not value.ndim:
                optimizer.state[param][name] = loaded.to(value.dtype)


def group_settings(columns: Mapping[str, float]) -> dict[str, Any]:
    """A group's columns under torch's names: beta1 and beta2 are `betas` again.

    >>> group_settings({"lr": 0.1, "beta1": 0.9, "beta2": 0.99})
    {'lr': 0.1, 'betas': (0.9, 0.99)}
    """
    settings: dict[str, Any] = dict(columns)
    for name, parts in PAIRS.items():
        if parts[0] in settings:
            settings[name] = tuple(settings.pop(part) for part in parts)
    return settings


def optimizer_state_dict(
    skeleton: Sequence[Mapping[str, Any]], entries: Sequence[Mapping[str, Tensor]], groups: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """A whole `state_dict()` for a member that trained in a stack.

    `skeleton` is the param groups as the real optimizer's `state_dict()` has them: their keys, and the order of the
    parameters. `entries` has one state per parameter in that order; `groups` the current settings, from
    `group_settings(Columns.row(...))` or `ScheduleRunner.groups()` (which knows `initial_lr` too).
    """
    count = sum(len(group["params"]) for group in skeleton)
    if len(entries) != count or len(groups) != len(skeleton):
        raise ValueError(f"{len(entries)} states in {len(groups)} groups for {count} parameters in {len(skeleton)}")
    kept = [
        {**group, **{name: _like(group.get(name), value) for name, value in settings.items() if name != "params"}}
        for group, settings in zip(skeleton, groups, strict=True)
    ]
    return {"state": {i: dict(entry) for i, entry in enumerate(entries) if entry}, "param_groups": kept}


def _like(old: Any, new: Any) -> Any:
    """The new value, in the form the group has it: a tensor stays a tensor, an equal number stays as written."""
    if isinstance(old, Tensor):
        return old.detach().clone().fill_(float(new))
    return copy.deepcopy(old) if type(old) in (int, float) and old == new else new
