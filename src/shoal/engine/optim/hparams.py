"""From a torch.optim class and its hyper-parameters to a rule: which settings are structure, which are numbers."""

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
"""Settings that torch takes as a pair, and the two columns they become."""

NEUTRAL = frozenset({"foreach", "fused", "capturable"})
"""How torch's kernels are launched. The arithmetic is the same up to rounding, so a rule takes and ignores them."""

BOOKKEEPING = frozenset(
    {"params", "param_names", "name", "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"}
)
"""Keys of a param group that no optimizer reads: names, and what torch's schedulers note down for themselves."""


signature = cache(inspect.signature)


def with_defaults(cls: type[Optimizer], hparams: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a param group in full: the class's own defaults where `hparams` is silent."""
    parameters = list(signature(cls.__init__).parameters.values())[2:]
    full = {p.name: p.default for p in parameters if p.default is not p.empty}
    if cls is torch.optim.AdamW:
        full["decoupled_weight_decay"] = True
    return {**full, **hparams}


def numbers(settings: Mapping[str, Any]) -> dict[str, float]:
    """Every number in a param group, pairs taken apart, by column name; tensors of one element count."""
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
    """One group's settings as (flags, numbers per column); None when there is no rule and the real class must run.

    `scheduled` names the columns a schedule may change (`ScheduleRunner.moves`): a term that is zero now but may not
    stay so stays in. No rule: a class that is not exactly one of torch's (a subclass may override anything),
    differentiable=True, a tensor that requires grad, an unknown key, or a number that is none.

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
    known = {*rule.columns, *rule.structural, *pairs, *NEUTRAL}
    if not set(settings) <= known:
        return None
    try:
        given = numbers({name: value for name, value in settings.items() if name not in rule.structural})
    except (TypeError, ValueError):
        return None
    if not set(rule.columns) <= set(given):
        return None
    columns = {name: given[name] for name in rule.columns}
    flags = {name for name in rule.structural if settings[name]}
    flags |= {name for name in rule.optional if columns[name] != 0 or name in scheduled}
    return Flags(flags), columns


def merge_flags(cls: type[Optimizer], members: Sequence[Flags]) -> Flags | None:
    """The flags of one rule that serves all these members, or None when their structure differs.

    A term that only some members have (weight decay, momentum) is switched on; the others have zero in its column.
    """
    same = len({structure(cls, flags) for flags in members}) == 1
    return Flags().union(*members) if same else None


def structure(cls: type[Optimizer], flags: Flags) -> Flags:
    """The flags that all members of one rule have in common."""
    return flags.intersection(RULES[cls].structural)


def rule_for(cls: type[Optimizer], flags: Flags) -> Rule:
    """The rule of a class for which `split_hparams` gave these flags."""
    return RULES[cls](flags)


def _flat(settings: Mapping[str, Any]) -> list[Any]:
    flat: list[Any] = []
    for value in settings.values():
        flat.extend(value if isinstance(value, (tuple, list)) else [value])
    return flat
