"""Turn a torch.optim class and its hyper-parameters into a rule: which settings change the arithmetic, and which are
numbers."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.engine.optim._adam import Adam, Adamax, AdamW, NAdam, RAdam
from shoal.engine.optim._adaptive import Adadelta, Adagrad, RMSprop
from shoal.engine.optim._averaged import ASGD, Rprop
from shoal.engine.optim._sgd import SGD
from shoal.engine.optim.rule import Flags, Rule

RULES: dict[type[Optimizer], type[Rule]] = {
    rule.torch_class: rule for rule in (SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, RMSprop, Adadelta, ASGD, Rprop)
}

PAIRS: dict[str, tuple[str, str]] = {
    "betas": ("beta1", "beta2"),
    "etas": ("etaminus", "etaplus"),
    "step_sizes": ("step_size_min", "step_size_max"),
}
"""Settings that torch takes as a pair, and the two columns that they become."""

NEUTRAL = frozenset({"foreach", "fused", "capturable"})
"""Settings that say how torch launches its kernels. The arithmetic is the same up to rounding, so rules accept and
ignore them."""

BOOKKEEPING = frozenset(
    {"params", "param_names", "name", "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"}
)
"""Keys of a param group that no optimizer reads: names, and values that torch's schedulers store for themselves."""


signature = cache(inspect.signature)


def with_defaults(cls: type[Optimizer], hparams: Mapping[str, Any]) -> dict[str, Any]:
    """Return all settings of a param group, with the class's defaults where `hparams` has none."""
    parameters = list(signature(cls.__init__).parameters.values())[2:]
    full = {p.name: p.default for p in parameters if p.default is not p.empty}
    if cls is torch.optim.AdamW:
        full["decoupled_weight_decay"] = True
    return {**full, **hparams}


def numbers(settings: Mapping[str, Any]) -> dict[str, float]:
    """Return every number in a param group by column name, with pairs split; tensors of one element count as
    numbers."""
    by_name: dict[str, float] = {}
    for name, value in settings.items():
        if name in BOOKKEEPING:
            continue
        parts = zip(PAIRS[name], value, strict=True) if name in PAIRS else [(name, value)]
        for part, number in parts:
            if isinstance(number, bool) or number is None:
                continue
            if isinstance(number, Tensor) and (number.numel() != 1 or number.is_complex()):
                continue
            try:
                by_name[part] = float(number)
            except (TypeError, ValueError):
                continue
    return by_name


def split_hparams(
    cls: type[Optimizer], hparams: Mapping[str, Any], *, scheduled: Collection[str] = ()
) -> tuple[Flags, dict[str, float]] | None:
    """Return one group's settings as (flags, numbers per column), or None if there is no rule and the real class must
    run.

    There is no rule for a class that is not exactly one of torch's (a subclass may override anything), for
    differentiable=True, a tensor that requires grad, an unknown key, or a value that is not a number.

    Args:
        scheduled: Columns that a schedule may change (`ScheduleRunner.moves`). A term that is zero now is kept if its
            column may change.

    >>> split_hparams(torch.optim.SGD, {"lr": 0.1, "nesterov": True})
    (frozenset({'nesterov'}), {'lr': 0.1, 'momentum': 0.0, 'dampening': 0.0, 'weight_decay': 0.0})
    """
    rule = RULES.get(cls)
    if rule is None:
        return None
    settings = {name: value for name, value in with_defaults(cls, hparams).items() if name not in BOOKKEEPING}
    if settings.pop("differentiable", False) or any(isinstance(v, Tensor) and v.requires_grad for v in _flat(settings)):
        return None
    pairs = {name: parts for name, parts in PAIRS.items() if parts[0] in rule.columns}
    accepted = {*rule.columns, *rule.structural, *pairs, *NEUTRAL}
    if not set(settings) <= accepted:
        return None
    try:
        values = numbers({name: value for name, value in settings.items() if name not in rule.structural})
    except (TypeError, ValueError):
        return None
    if not set(rule.columns) <= set(values):
        return None
    columns = {name: values[name] for name in rule.columns}
    flags = {name for name in rule.structural if settings[name]}
    flags |= {name for name in rule.optional if columns[name] != 0 or name in scheduled}
    return Flags(flags), columns


def merge_flags(cls: type[Optimizer], members: Sequence[Flags]) -> Flags | None:
    """Return the flags of one rule that serves all these members, or None if their structure differs.

    A term that only some members have (weight decay, momentum) is switched on; the others have zero in its column.
    """
    same = len({structure(cls, flags) for flags in members}) == 1
    return Flags().union(*members) if same else None


def structure(cls: type[Optimizer], flags: Flags) -> Flags:
    """Return the flags that all members of one rule must have in common."""
    return flags.intersection(RULES[cls].structural)


def all_flags(cls: type[Optimizer]) -> Flags:
    """Return every flag that a rule of this class can have."""
    return Flags({*RULES[cls].structural, *RULES[cls].optional})


def rule_for(cls: type[Optimizer], flags: Flags) -> Rule:
    """Return the rule of a class for flags that `split_hparams` returned."""
    return RULES[cls](flags)


def _flat(settings: Mapping[str, Any]) -> list[Any]:
    flat: list[Any] = []
    for value in settings.values():
        flat.extend(value if isinstance(value, (tuple, list)) else [value])
    return flat
