"""What a split cost: bytes, seconds and memory, predicted and measured."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from shoal.engine.members.optimizers import make_optimizer
from shoal.jobs.job import Job
from shoal.net.links import Traffic
from shoal.split.core.method import Method, Worker
from shoal.split.core.moments import moments_of
from shoal.split.core.parts import Outcome, Part, Task, Tensors
from shoal.split.core.state import State
from shoal.utils.tables import duration, size

MANY = 64
"""With more rounds than this, the prediction is made from some of them."""


@dataclass(kw_only=True, slots=True)
class SplitReport:
    """What a split did and what it cost. Bytes are counted both ways, over all workers and rounds, without headers."""

    method: str
    workers: int
    tier: str
    """How the parts were trained: serial, packed, or distributed."""
    rounds: int
    rounds_done: int = 0
    bytes_predicted: int = 0
    """Predicted before the first round, from the shapes of the slices."""
    bytes_measured: int = 0
    """Bytes of the tensors that were sent and received; measured at the sockets if workers are elsewhere."""
    seconds_predicted: float = 0.0
    """Predicted from the first round."""
    seconds_measured: float = 0.0
    """Seconds of all rounds, without evaluation."""
    peak_predicted: dict[str, int] = field(default_factory=dict)
    """Predicted peak bytes of training: "whole" for the whole network, and each part of the first round by its
    number."""
    peak_measured: dict[str, int] = field(default_factory=dict)
    """Measured peak bytes, by the same names; "recovery" for rounds that train the whole network after rounds of
    parts."""
    lost: int = 0
    """How many parts gave no outcome because their worker was lost or their loss was not finite."""
    notes: list[str] = field(default_factory=list)
    history: list[dict[str, float]] = field(default_factory=list)
    """The history of the result: what was reached after how many bytes and seconds."""

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return asdict(self)

    def __str__(self) -> str:
        parts = [value for name, value in self.peak_measured.items() if name != "recovery"]
        whole = self.peak_predicted.get("whole", 0)
        share = f", {max(parts) / whole:.0%} of the whole's {size(whole)}" if parts and whole else ""
        lines = [
            f"{self.method}: {self.workers} workers, {self.rounds_done} of {self.rounds} rounds, {self.tier}",
            f"bytes    {size(self.bytes_measured)} (predicted {size(self.bytes_predicted)})",
            f"seconds  {duration(self.seconds_measured)} (predicted {duration(self.seconds_predicted)})",
        ]
        if parts:
            lines.append(f"memory   {size(max(parts))} for the largest part{share}")
        if self.lost:
            lines.append(f"lost     {self.lost} parts")
        return "\n".join([*lines, *self.notes])


def tensor_bytes(content: Task | Outcome) -> int:
    """Count the bytes of the tensors of a task or an outcome."""
    groups = (content.tensors, content.moments, content.extras)
    return sum(tensor.nbytes for group in groups for tensor in group.values())


class Forecast:
    """Predicts the bytes of rounds from a method's tasks and outcomes, made of tensors without data.

    `size` counts the bytes of a task or an outcome: its tensors alone, or its whole message.
    """

    def __init__(self, method: Method, size: Callable[[Task | Outcome], int] = tensor_bytes) -> None:
        self.method, self.size = method, size
        self.state = State.of(method.model, method.extra_tensors(), device="meta")
        self.travels = method.moments == "travel" and method.merge == "weights"
        self.moments = _all_moments(method) if self.travels else {}
        self.owners = self.state.tensors.keys()

    def part(self, number: int, part: Part, owners: Collection[str] | None = None) -> Traffic:
        """Predict the bytes of one part of a round, there and back.

        `owners` are the tensors whose optimizer state exists already; None means all.
        """
        method, state = self.method, self.state
        owned = self.owners if owners is None else owners
        state.moments = {key: moment for key, moment in self.moments.items() if key.rpartition("/")[0] in owned}
        sent_extras, returned_extras = method.predicted_extras(part)
        sent = self.size(state.task(number, part, method.slices(part), moments=self.travels, extras=sent_extras))
        state.moments = self.moments
        result = state.task(number, part, method.returns(part) if part.steps else {}, moments=self.travels)
        outcome = Outcome(
            round=number, number=part.number, tensors=result.tensors, moments=result.moments, extras=returned_extras,
            losses=(0.0,) * part.steps,
        )  # fmt: skip
        return Traffic(sent, self.size(outcome))

    def all_rounds(self, workers: Sequence[Worker]) -> Traffic:
        """Predict the bytes of the whole run with these workers. Of many rounds, only some are computed."""
        rounds, total, typical, owners = self.method.rounds, Traffic(), Traffic(), set[str]()
        for number in range(rounds) if rounds <= MANY else [*range(MANY // 2), *range(rounds - MANY // 2, rounds)]:
            parts = self.method.parts(number, workers)
            round_traffic = sum((self.part(number, part, owners) for part in parts), Traffic())
            owners |= {piece.name for part in parts if part.steps for piece in self.method.returns(part).values()}
            total += round_traffic
            typical = round_traffic if number < MANY // 2 else typical
        missing = max(0, rounds - MANY)
        return total + Traffic(typical.sent * missing, typical.received * missing)


def _all_moments(method: Method) -> Tensors:
    """Return the optimizer state of the network's parameters and of extra tensors, on the meta device."""
    job, beside = method.member.job, method.extra_tensors()
    moments = optimizer_state(job, method.model)
    if beside:
        extra = optimizer_state(replace(job, params=None), nn.ParameterList(beside.values()))
        names = list(beside)
        moments |= {f"{names[int(key.partition('/')[0])]}/{key.partition('/')[2]}": t for key, t in extra.items()}
    return moments


def optimizer_state(job: Job, network: nn.Module) -> Tensors:
    """Return the optimizer state after one step on the meta device, by "<parameter>/<name>".

    Empty if the optimizer needs more than gradients.
    """
    for device in ("meta", "cpu"):  # some optimizers read values, which meta tensors do not have
        copied = copy.deepcopy(network).to(device)
        for parameter in copied.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        try:
            optimizer = make_optimizer(job, copied)
            optimizer.step()
        except Exception:
            continue
        return {name: value.to("meta") for name, value in moments_of(optimizer, copied).items()}
    return {}
