"""`shoal.replay` trains one job alone for some steps, so that a debugger can look at them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from shoal.jobs.job import Job
from shoal.reference import train_alone


@dataclass(frozen=True, slots=True)
class Replay:
    """The losses and the final state of some steps of one job, trained alone."""

    from_step: int
    losses: list[float]
    """The mean batch loss of each step, beginning with step `from_step`."""
    model: nn.Module
    """The network after the last of these steps."""
    optimizer_state: dict[str, Any]
    status: str
    error: str | None


def replay(job: Job, *, from_step: int = 0, steps: int | None = None, device: str | torch.device = "cpu") -> Replay:
    """Train one job alone with the plain loop for `from_step` + `steps` steps, and return the last `steps` of them.

    This is for debugging: a debugger, or prints in the model, see exactly what the job computes in a pack.
    """
    if from_step < 0 or (steps is not None and steps < 1):
        raise ValueError(
            f"from_step is {from_step} and steps is {steps}; use 0 or more, and 1 or more (or None for all)"
        )
    state = train_alone(job, torch.device(device), until=None if steps is None else from_step + steps, validate=False)
    groups = [state.losses[end - size : end] for size, end in zip(state.groups, accumulate(state.groups), strict=True)]
    means = [sum(group) / len(group) for group in groups if group]
    if from_step >= len(means):
        raise ValueError(f"from_step is {from_step}; this job has {len(means)} steps: use a smaller number")
    return Replay(
        from_step, means[from_step:], state.model.to("cpu"), state.optimizer.state_dict(), state.status, state.error
    )
