"""The weights that validation and results use if they differ from those in training: averages, or those of an
optimizer's eval mode, as in schedule-free optimizers."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shoal.engine.members.member import Member, draws
from shoal.engine.members.optimizers import make_optimizer, trying
from shoal.engine.members.stretches import stored
from shoal.engine.optim.kinds import has_modes, set_mode
from shoal.engine.optim.state import load_optimizer
from shoal.jobs.averaging import EMA, SWA, is_due
from shoal.utils.weights import load_weights


def averaged_tensors(model: nn.Module, average: EMA | SWA) -> dict[str, Tensor]:
    """Return the tensors to average by name: trained parameters, and floating-point buffers if `use_buffers`.

    Parameters of lazy modules are left out until they have a shape.
    """
    tensors: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if average.use_buffers:
        tensors |= dict(model.named_buffers())
    made = {name: t.detach() for name, t in tensors.items() if not is_lazy(t)}
    return {name: t for name, t in made.items() if t.is_floating_point() or t.is_complex()}


@torch.no_grad()
def update_average(member: Member, step: int) -> None:
    """Update a member's average with its weights, if that is due after this step."""
    rule = member.job.average
    if rule is None or not is_due(rule, step, member.steps_per_epoch):
        return
    held = member.average or {"count": 0, "values": {}}
    values: dict[str, Tensor] = held["values"]
    now = averaged_tensors(member.model, rule)
    for name, value in now.items():
        if name not in values or values[name].shape != value.shape:
            values[name] = value.clone()
        elif not held["count"]:
            values[name].copy_(value)
        else:
            values[name] = values[name].to(value.device).lerp_(value, rule.weight(held["count"]))
    member.average = {"count": held["count"] + 1, "values": values}


def complete_average(member: Member) -> None:
    """Add to an average what a stack leaves out: weights that no step has changed, which are their own average."""
    rule, held = member.job.average, member.average
    if rule is not None and held is not None and held["count"]:
        for name, value in averaged_tensors(member.model, rule).items():
            if name not in held["values"]:
                held["values"][name] = value.clone()


def evaluation_weights(member: Member) -> dict[str, Tensor]:
    """Return the weights that differ from those in training by name, for a member that was written back."""
    if member.trained is not None or not member.optimizer_state:
        return {}  # the model has these weights already, or training has not begun
    if member.average is not None:
        return dict(member.average["values"]) if member.average["count"] else {}
    other = _in_eval_mode(member)
    return {} if other is None else other[0]


def _in_eval_mode(member: Member) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Return a member's weights and optimizer state in the optimizer's eval mode; None if it has no modes.

    Another optimizer object on the same parameters is put into eval mode, and the parameters are restored.
    """
    kind = member.job.optimizer
    if isinstance(kind, type) and not has_modes(kind):
        return None
    params = {name: p for name, p in member.model.named_parameters() if p.requires_grad}
    saved = {name: p.detach().clone() for name, p in params.items()}
    with draws(member, keep=False), trying(member.job):
        optimizer = make_optimizer(member.job, member.model)
    if not has_modes(optimizer):
        return None
    try:
        load_optimizer(optimizer, member.optimizer_state)
        set_mode(optimizer, "eval")
        return {name: p.detach().clone() for name, p in params.items()}, optimizer.state_dict()
    finally:
        _put(params, saved)


@contextmanager
def with_evaluation_weights(member: Member) -> Iterator[None]:
    """Put the weights of validation into the member's network inside this context; restore it afterwards, bit for
    bit."""
    values = evaluation_weights(member)
    if not values:
        yield
        return
    places = {**dict(member.model.named_parameters()), **dict(member.model.named_buffers())}
    saved = {name: places[name].detach().clone() for name in values}
    try:
        _put(places, values)
        yield
    finally:
        _put(places, saved)


@torch.no_grad()
def _put(places: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        places[name].copy_(value)


def finish_weights(member: Member) -> None:
    """Set the weights that a member returns when it ends: its best ones, or those of evaluation.

    What it would need to continue training is stored in `member.trained`.
    """
    values = evaluation_weights(member)
    if values:
        names = [name for name, p in member.model.named_parameters() if p.requires_grad]
        trained: dict[str, Any] = {"model": _training_state(member.model), "parameters": names}
        other = None if member.average is not None else _in_eval_mode(member)
        if other is not None:
            trained["optimizer"], member.optimizer_state = copy.deepcopy(stored(member.optimizer_state)), other[1]
        _put({**dict(member.model.named_parameters()), **dict(member.model.named_buffers())}, values)
        member.trained = trained
    if member.best is not None:
        load_weights(member.model, member.best)


def training_weights(trained: Mapping[str, Any] | None) -> dict[str, Tensor]:
    """Return the parameters in `Member.trained` by name; none if the result has the weights of training itself."""
    return {} if trained is None else {name: trained["model"][name] for name in trained["parameters"]}


def _training_state(model: nn.Module) -> dict[str, Any]:
    """Copy a model's `state_dict()` without frozen weights."""
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    return {
        name: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)
        for name, value in model.state_dict().items()
        if name not in frozen
    }
