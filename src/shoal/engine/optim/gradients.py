"""Gradient clipping and loss scaling, separately for each member."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from shoal.engine.optim.rule import coefficient_dtype
from shoal.jobs.job import Job


def clip_gradients(job: Job, model: nn.Module) -> None:
    """Clip a model's gradients as its job says."""
    if job.clip_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
    if job.clip_value is not None:
        nn.utils.clip_grad_value_(model.parameters(), job.clip_value)


def clip_limit(job: Job) -> float:
    """Return how a job clips, as one number: a norm if positive, minus the value for clipping by value, or inf for
    none."""
    if job.clip_value is not None:
        return -float(job.clip_value)
    return math.inf if job.clip_norm is None else float(job.clip_norm)


@torch.no_grad()
def clip_(grads: Sequence[Tensor], limits_M: Tensor, *, by_value: bool = False) -> Tensor:
    """Apply `torch.nn.utils.clip_grad_norm_` to every member at once, in place, and return the total norms [M].

    The norm of a member is over its slices only. A limit of inf means that the member is not clipped: its coefficient
    is exactly one, so its gradients keep every bit. A norm of NaN affects only that member's gradients, as in torch.

    Args:
        by_value: Members with negative limits are clipped by `torch.nn.utils.clip_grad_value_` instead, at minus the
            limit.

    >>> grads = [torch.tensor([[3.0, 4.0], [3.0, 4.0]])]
    >>> clip_(grads, torch.tensor([1.0, float("inf")])).tolist(), grads[0][1].tolist()
    ([5.0, 5.0], [3.0, 4.0])
    """
    if not grads:
        return torch.zeros_like(limits_M)
    norms: list[Tensor] = [torch.linalg.vector_norm(g.reshape(g.shape[0], -1), 2.0, dim=1) for g in grads]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms, dim=1), 2.0, dim=1)
    limit = limits_M.to(total.dtype)
    no_norm_clip = limits_M.isinf() | (limits_M < 0) if by_value else limits_M.isinf()
    coefficient = torch.where(no_norm_clip, 1.0, (limit / (total + 1e-6)).clamp(max=1.0))
    for grad in grads:
        grad.mul_(coefficient.to(coefficient_dtype(grad.dtype)).view(-1, *[1] * (grad.ndim - 1)))
    if by_value:
        largest = torch.where(limits_M < 0, -limits_M, math.inf)
        for grad in grads:
            limit_column = largest.to(grad.dtype).view(-1, *[1] * (grad.ndim - 1))
            grad.clamp_(-limit_column, limit_column)
    return total


class MemberScaler:
    """torch.amp.GradScaler with a scale and a growth count per member.

        losses = scaler.scale(losses_M)                 # backward through their sum
        found_inf_M = scaler.unscale_(grads)            # then clip
        rule.update_all_(..., active=~found_inf_M)      # an overflow skips that member's step alone
        scaler.update_(found_inf_M)

    No value is read back on the host, so it traces and captures.
    """

    init_scale: ClassVar[float] = 2.0**16
    growth_factor: ClassVar[float] = 2.0
    backoff_factor: ClassVar[float] = 0.5
    growth_interval: ClassVar[int] = 2000

    def __init__(self, size: int, *, device: torch.device | str | None = None) -> None:
        self.scale_M = torch.full((size,), self.init_scale, dtype=torch.float32, device=device)
        self.growth_tracker_M = torch.zeros(size, dtype=torch.int32, device=device)

    def scale(self, losses_M: Tensor) -> Tensor:
        """Multiply the losses by each member's scale."""
        return losses_M * self.scale_M

    @torch.no_grad()
    def unscale_(self, grads: Sequence[Tensor]) -> Tensor:
        """Divide each member's gradients by its scale in place, and return [M] booleans: which have non-finite
        gradients."""
        inverse = self.scale_M.double().reciprocal().float()
        found_inf = torch.zeros_like(self.scale_M, dtype=torch.bool)
        for grad in grads:
            if grad.numel() == 0:
                continue
            largest = torch.linalg.vector_norm(grad.reshape(grad.shape[0], -1), float("inf"), dim=1)
            found_inf |= ~torch.isfinite(largest)
            grad.mul_(inverse.to(coefficient_dtype(grad.dtype)).view(-1, *[1] * (grad.ndim - 1)))
        return found_inf

    @torch.no_grad()
    def update_(self, found_inf_M: Tensor) -> None:
        """Update the scales after a step: back off where it was skipped, grow after `growth_interval` steps that were
        not."""
        good_steps = torch.where(found_inf_M, 0, self.growth_tracker_M + 1)
        reached = good_steps == self.growth_interval
        scale = self.scale_M.double()
        grown = (scale * self.growth_factor).float()
        grow = reached & torch.isfinite(grown)
        backed_off = (scale * self.backoff_factor).float()
        self.scale_M.copy_(torch.where(found_inf_M, backed_off, torch.where(grow, grown, self.scale_M)))
        self.growth_tracker_M.copy_(torch.where(reached, 0, good_steps))

    def state_dict(self, slot: int) -> dict[str, Any]:
        """Return one member's state in the form of `torch.amp.GradScaler.state_dict()`."""
        return {
            "scale": float(self.scale_M[slot]),
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": int(self.growth_tracker_M[slot]),
        }

    def on(self, scale_M: Tensor, growth_tracker_M: Tensor) -> MemberScaler:
        """Return the same scaler on other tensors."""
        other = copy.copy(self)
        other.scale_M, other.growth_tracker_M = scale_M, growth_tracker_M
        return other

    def load_state_dict(self, slot: int, state: dict[str, Any]) -> None:
        """Load one member's state from that of a torch.amp.GradScaler."""
        assert state["growth_interval"] == self.growth_interval, "torch's defaults, which jobs do not set"
        self.scale_M[slot] = state["scale"]
        self.growth_tracker_M[slot] = state["_growth_tracker"]
