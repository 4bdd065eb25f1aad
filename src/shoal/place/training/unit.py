"""A placed job as a unit of the engine: turns, validation, early stopping and checkpoints work as for any other job."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from shoal.engine.members.member import Member
from shoal.engine.tiers.serial import SerialUnit
from shoal.place.training.server import Batch, Server


class PlacedUnit(SerialUnit):
    """One member, whose batches are computed by a server, which is this process, and its workers."""

    tier = "placed"

    def __init__(self, member: Member, server: Server) -> None:
        super().__init__(member)
        self.server = server
        self._factor: float | None = None
        """The factor by which the gradients of the last step were clipped."""
        server.optimizer, server.scaler = self.optimizer, self.scaler

    def _step(self, feed: Iterator[Any]) -> tuple[float, dict[str, Any]]:
        """Compute one batch with all workers, and run the optimizer at the end of its group."""
        member, job = self.member, self.job
        place, k = member.place, job.accumulate
        group_start = place - place % k
        group = min(k, member.num_batches - group_start)
        batch = next(feed)
        if place == group_start:
            self._clear()
        assert member.order is not None
        rows = member.order[place * job.batch_size : (place + 1) * job.batch_size]
        result = self.server.compute(Batch(batch, rows.cpu(), member.epoch, 1.0 / group))
        if result.loss - result.loss != 0.0:
            return result.loss, result.logs
        apply = place + 1 == group_start + group
        options = [_plain(parameters) for parameters in self.optimizer.param_groups] if apply else []
        self._factor = None
        if apply:
            self._apply()
        self.server.committed(apply=apply, clip=self._factor, options=options)
        if apply and self.schedule is not None and job.schedule_every == "step":
            self._rate = self._current_rate()
            self._advance_schedule()
        return result.loss, result.logs

    def _clip(self) -> None:
        """Scale all gradients, including those of the workers, to the job's largest norm, and clip values."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if self.job.clip_norm is not None:
            squares = sum(float(gradient.double().square().sum()) for gradient in gradients) + self.server.squares
            self._factor = float(min(1.0, self.job.clip_norm / (squares**0.5 + 1e-6)))
            for gradient in gradients:
                gradient.mul_(self._factor)
        if self.job.clip_value is not None:
            for gradient in gradients:
                gradient.clamp_(-self.job.clip_value, self.job.clip_value)

    def write_back(self, slots: list[int] | None = None) -> None:
        self.server.pull()
        super().write_back(slots)


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group that can be sent: numbers, flags and tuples of them."""
    plain: dict[str, Any] = {}
    for name, value in group.items():
        if isinstance(value, Tensor) and value.numel() == 1:
            plain[name] = float(value)
        elif isinstance(value, (bool, int, float)) or (
            isinstance(value, tuple) and all(isinstance(x, (int, float)) for x in value)
        ):
            plain[name] = value
    return plain
