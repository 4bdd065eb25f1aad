"""Turn the arguments of `shoal.Pack` into members: settings for all or for each member, and a copied network."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.data import View
from shoal.engine.members.member import Member, draws
from shoal.engine.members.optimizers import make_optimizer, trying
from shoal.engine.members.ownership import build_model
from shoal.engine.optim.state import load_optimizer
from shoal.errors import JobError
from shoal.jobs.job import Job
from shoal.preparation.checks import field_problems, optimizer_problems
from shoal.utils.numpy_values import plain_int

ENDLESS = 2**62
"""The number of steps of a job whose length is decided by the user's loop."""


Settings = dict[str, Any]
"""Arguments of `Pack` for its members by name; each is one value for all, or a list with one value for each."""


def settings_of_each(settings: Settings, models: Any) -> list[Settings]:
    """Return every member's own settings.

    Raises:
        JobError: With a line for each list of the wrong length.
    """
    if isinstance(models, nn.Module) and not isinstance(models, nn.ModuleList):
        raise JobError("models is a single network; pass a list of them")
    if not isinstance(models, Sequence | nn.ModuleList):
        kind = getattr(models, "__name__", type(models).__name__)
        raise JobError(f"models is {kind}; pass a list of networks, such as [make_net() for _ in range(8)]")
    count = len(models)
    if not count:
        raise JobError("models is empty; pass at least one network")
    for name, value in settings.items():
        if isinstance(value, np.ndarray | Tensor) and value.ndim:
            settings[name] = value.tolist()
    lines = [
        f"{name} has {len(value)} entries for {count} models; pass one for each, or one for all"
        for name, value in settings.items()
        if _is_per_member(value) and len(value) != count
    ]
    if settings["seeds"] is not None and not _is_per_member(settings["seeds"]):
        lines.append(f"seeds is {settings['seeds']!r}; pass a whole number for each model")
    if lines:
        raise JobError(*lines)
    return [
        {name: value[i] if _is_per_member(value) else value for name, value in settings.items()} for i in range(count)
    ]


def settings_of_new_member(shared: Settings, given: Settings) -> Settings:
    """Return the settings of a member that is added later."""
    unknown = sorted(set(given) - set(shared))
    if unknown:
        raise TypeError(
            f"add() takes no {unknown[0]!r}; it takes {', '.join(n for n in shared if n != 'seeds')} and seed"
        )
    missing = [name for name, value in shared.items() if name not in given and _is_per_member(value)]
    if missing:
        raise JobError(f"{missing[0]} was given one for each member; give the new member's too: {missing[0]}=...")
    return shared | given


def _is_per_member(value: Any) -> bool:
    """Return whether a setting is a list with one value for each member."""
    return isinstance(value, Sequence) and not isinstance(value, str)


def make_member(model: Any, id: int, data: View, device: torch.device, settings: dict[str, Any]) -> Member:
    """Return a member with a copy of this network.

    Raises:
        JobError: With a line for each invalid setting.
    """
    name = f"member {id}"
    if not isinstance(model, nn.Module):
        function = getattr(model, "__name__", None) if callable(model) else None
        what = f"a {type(model).__name__}; pass an nn.Module"
        what = what if function is None else f"the function {function}; call it: {function}()"
        raise JobError(f"{name}: the model is {what}")
    job_settings = dict(settings)
    seed = plain_int(job_settings.pop("seeds"))
    seed = id if seed is None else seed
    try:
        job = Job(**job_settings, seed=seed, model=model, data=data, batch_size=1, steps=ENDLESS, shuffle=False)
    except JobError as error:
        raise JobError(*(line.replace("job: ", f"{name}: ", 1) for line in error.lines)) from None
    rng = torch.Generator().manual_seed(seed)
    try:
        copied_model = build_model(job).to(device)
    except JobError as error:
        lines_without_fix = [line.partition("; pass a function")[0] for line in error.lines]
        raise JobError(
            *(f"{name}: {line}; set it in params=, which is given the copy" for line in lines_without_fix)
        ) from None
    member = Member(job, id, name, device, copied_model, rng, torch.Generator(), data)
    member.enter_train_mode()
    lines = field_problems(job) or [line for line in optimizer_problems(member) if "needs a watched value" not in line]
    if lines:
        plateau = "its schedule watches a value, and a pack's moves on after every step; use shoal.train for such"
        raise JobError(*(f"{name}: {plateau if 'ReduceLROnPlateau' in line else line}" for line in lines))
    return member


def refill(
    member: Member, state_dict: Mapping[str, Any], optimizer_state: Mapping[str, Any] | None, seed: int | None
) -> None:
    """Replace a member's weights and optimizer state by copies; a member that had stopped runs again."""
    own_state = copy.deepcopy(dict(optimizer_state or {}))
    _check_state(member, state_dict, own_state)
    member.model.load_state_dict(state_dict)
    member.optimizer_state = own_state
    member.status, member.error = "running", None
    if optimizer_state is None:
        member.step = 0
    if seed is not None:
        member.job = replace(member.job, seed=seed)
        member.rng.manual_seed(seed)
        member.batches = 0


def _check_state(member: Member, state_dict: Mapping[str, Any], optimizer_state: Mapping[str, Any]) -> None:
    """Raise the error of `load_state_dict` if the member's network or optimizer does not take a state."""
    model = copy.deepcopy(member.model)
    model.load_state_dict(state_dict)
    if optimizer_state:
        with draws(member, keep=False), trying(member.job):
            load_optimizer(make_optimizer(member.job, model), optimizer_state)


def device_of(models: Sequence[nn.Module], device: str | torch.device | None) -> torch.device:
    """Return the requested device, or the device of the first network."""
    from shoal.settings import pick_device

    if device is not None:
        return pick_device(device)
    first = next(models[0].parameters(), None) if isinstance(models[0], nn.Module) else None
    return first.device if first is not None else torch.device("cpu")
