"""Optimizers with a column of hyper-parameters per member, and what goes with a step: schedule, clip, loss scale.

Rules exist for SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, RMSprop, Adadelta, ASGD and Rprop, with all their
settings but `differentiable`. `foreach`, `fused` and `capturable` say how torch launches its kernels, not what they
compute: they are accepted and have no effect on a rule. Any other class runs as itself, a member at a time.
"""

from shoal.engine.optim._clip import clip_
from shoal.engine.optim._columns import Columns
from shoal.engine.optim._hparams import RULES, merge_flags, numbers, rule_for, split_hparams, with_defaults
from shoal.engine.optim._rule import Flags, Rule
from shoal.engine.optim._scaler import MemberScaler
from shoal.engine.optim._state import (
    from_torch_state,
    group_settings,
    load_optimizer,
    optimizer_state_dict,
    to_torch_state,
    torch_entry,
    torch_values,
)
from shoal.engine.optim.schedules import ScheduleRunner, make_scheduler, needs_metric

__all__ = [
    "RULES",
    "Columns",
    "Flags",
    "MemberScaler",
    "Rule",
    "ScheduleRunner",
    "clip_",
    "from_torch_state",
    "group_settings",
    "load_optimizer",
    "make_scheduler",
    "merge_flags",
    "needs_metric",
    "numbers",
    "optimizer_state_dict",
    "rule_for",
    "split_hparams",
    "to_torch_state",
    "torch_entry",
    "torch_values",
    "with_defaults",
]
