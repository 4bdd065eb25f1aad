"""Loss scaling for half precision, each member its own: what torch.amp.GradScaler is for one network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.engine.optim._rule import coefficient_dtype


class MemberScaler:
    """torch.amp.GradScaler with a scale and a growth count per member.

        losses = scaler.scale(losses_M)                 # backward through their sum
        found_inf_M = scaler.unscale_(grads)            # then clip
        rule.update_all_(..., active=~found_inf_M)      # an overflow skips that member's step alone
        scaler.update_(found_inf_M)

    No value is read back on the host, so it traces and captures.
    """

    def __init__(
        self,
        size: int,
        *,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        device: torch.device | str | None = None,
    ) -> None:
        if growth_factor <= 1.0:
            raise ValueError(f"growth_factor is {growth_factor}; a scale that grows needs more than 1")
        if backoff_factor >= 1.0:
            raise ValueError(f"backoff_factor is {backoff_factor}; a scale that backs off needs less than 1")
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval
        self.scale_M = torch.full((size,), init_scale, dtype=torch.float32, device=device)
        self.growth_tracker_M = torch.zeros(size, dtype=torch.int32, device=device)

    def scale(self, losses_M: Tensor) -> Tensor:
        """The losses times each member's scale."""
        return losses_M * self.scale_M

    @torch.no_grad()
    def unscale_(self, grads: Sequence[Tensor]) -> Tensor:
        """Divide each member's gradients by its scale, in place; [M] bool: whose gradients are not all finite."""
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
        """After the step: back off where it was skipped, grow where the last `growth_interval` were not."""
        done = torch.where(found_inf_M, 0, self.growth_tracker_M + 1)
        full = done == self.growth_interval
        scale = self.scale_M.double()
        grown = (scale * self.growth_factor).float()
        grow = full & torch.isfinite(grown)
        backed_off = (scale * self.backoff_factor).float()
        self.scale_M.copy_(torch.where(found_inf_M, backed_off, torch.where(grow, grown, self.scale_M)))
        self.growth_tracker_M.copy_(torch.where(full, 0, done))

    def state_dict(self, slot: int) -> dict[str, Any]:
        """One member's state, as torch.amp.GradScaler's `state_dict()` has it."""
        return {
            "scale": float(self.scale_M[slot]),
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": int(self.growth_tracker_M[slot]),
        }

    def cpu(self) -> MemberScaler:
        """The same on the host, where looking at a member's state waits for nothing."""
        found = object.__new__(MemberScaler)
        found.__dict__.update(self.__dict__)
        found.scale_M, found.growth_tracker_M = self.scale_M.cpu(), self.growth_tracker_M.cpu()
        return found

    def load_state_dict(self, slot: int, state: dict[str, Any]) -> None:
        """One member's state from torch.amp.GradScaler's; the factors must be this scaler's own."""
        for name in ("growth_factor", "backoff_factor", "growth_interval"):
            if state[name] != getattr(self, name):
                raise ValueError(f"{name} is {state[name]} in the state and {getattr(self, name)} in this pack")
        self.scale_M[slot] = state["scale"]
        self.growth_tracker_M[slot] = state["_growth_tracker"]

    def keep(self, slots: Sequence[int]) -> MemberScaler:
        """The same scaler with these members only."""
        kept = MemberScaler(
            len(slots),
            growth_factor=self.growth_factor,
            backoff_factor=self.backoff_factor,
            growth_interval=self.growth_interval,
            device=self.scale_M.device,
        )
        kept.scale_M.copy_(self.scale_M[list(slots)])
        kept.growth_tracker_M.copy_(self.growth_tracker_M[list(slots)])
        return kept
