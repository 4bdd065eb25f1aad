"""What a split cost: bytes, seconds and memory, predicted beside measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shoal.jobs.job import Job
from shoal.split.core.method import Method, Worker
from shoal.split.core.parts import Outcome, Part, Slice, Task
from shoal.split.core.state import tensors_of
from shoal.utils.tables import duration, size

MANY = 64
"""Rounds from which a prediction goes by some of them."""


@dataclass(kw_only=True, slots=True)
class SplitReport:
    """What a split did and what it cost. Bytes go both ways, over all workers and rounds, headers not included."""

    method: str
    workers: int
    tier: str
    """How the parts were carried out: serial, packed, or by workers elsewhere."""
    rounds: int
    rounds_done: int = 0
    bytes_predicted: int = 0
    """Before the first round, from the shapes of the slices."""
    bytes_measured: int = 0
    """Of the tensors that went out and came back; where workers are elsewhere, at their sockets."""
    seconds_predicted: float = 0.0
    """From the first round."""
    seconds_measured: float = 0.0
    """Of all rounds, evaluation not included."""
    peak_predicted: dict[str, int] = field(default_factory=dict)
    """Bytes that training holds at most: "whole", and each part of the first round by its number."""
    peak_measured: dict[str, int] = field(default_factory=dict)
    """The same, as parts were trained; "recovery": where rounds of the whole network are among those of less."""
    cuts: bool = False
    """Whether parts have less than the whole network."""
    lost: int = 0
    """Parts that came to nothing: their worker was lost, or their loss was not finite."""
    notes: list[str] = field(default_factory=list)
    history: list[dict[str, float]] = field(default_factory=list)
    """The result's history: what was reached, by bytes and seconds."""

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
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


def moved(tasks: Sequence[Task], outcomes: Sequence[Outcome | None]) -> int:
    """Bytes of the tensors that go out and come back."""
    groups: list[Mapping[str, Tensor]] = []
    for given in tasks:
        groups += [given.tensors, given.moments, given.extras]
    for outcome in outcomes:
        groups += [outcome.tensors, outcome.moments, outcome.extras] if outcome is not None else []
    return sum(tensor.nbytes for group in groups for tensor in group.values())


class Forecast:
    """Bytes of rounds before they happen, from the shapes of what parts hold and give back."""

    def __init__(self, job: Job, method: Method, whole: nn.Module) -> None:
        self.method = method
        held: dict[str, Tensor] = {**tensors_of(whole), **method.companions()}
        self.sizes = {name: (tuple(t.shape), t.element_size()) for name, t in held.items()}
        still = {name for name, _ in whole.named_buffers()}
        still |= {name for name, p in whole.named_parameters() if not p.requires_grad}
        self.trained = held.keys() - still
        travels = method.moments == "travel" and method.merge == "weights"
        self.kept, self.counts = moments_per_weight(job) if travels else (0.0, 0)

    def round(self, number: int, parts: Sequence[Part]) -> int:
        """Of one round, both ways."""
        total = 0.0
        for part in parts:
            total += sum(self._bytes(piece, with_moments=number > 0) for piece in self.method.slices(part).values())
            if part.steps:
                total += sum(self._bytes(piece, with_moments=True) for piece in self.method.returns(part).values())
        return int(total)

    def all_rounds(self, executor: Sequence[Worker]) -> int:
        """Of the whole run, should this crew stay; where there are many rounds, some stand for those in between."""
        rounds, method = self.method.rounds, self.method

        def one(number: int) -> int:
            return self.round(number, method.parts(number, executor))

        if rounds <= MANY:
            return sum(one(number) for number in range(rounds))
        first = [one(number) for number in range(MANY // 2)]
        last = [one(number) for number in range(rounds - MANY // 2, rounds)]
        return sum(first) + sum(last) + first[-1] * (rounds - MANY)

    def _bytes(self, piece: Slice, *, with_moments: bool) -> float:
        shape, element = self.sizes[piece.name]
        weight = math.prod(piece.shape(shape)) * element
        if not with_moments or piece.name not in self.trained:
            return weight
        return weight * (1 + self.kept) + self.counts


def moments_per_weight(job: Job) -> tuple[float, int]:
    """What one step on a small tensor leaves in the optimizer: bytes for each byte of weights, and bytes of numbers
    that are one for each tensor."""
    parameter = nn.Parameter(torch.zeros(8, 8))
    try:
        optimizer = job.optimizer([parameter], **job.hparams)
        parameter.grad = torch.zeros(8, 8)
        optimizer.step()
    except Exception:  # an optimizer that wants more than a tensor: nothing is foreseen
        return 0.0, 0
    kept = [torch.as_tensor(v) for v in optimizer.state[parameter].values() if isinstance(v, (Tensor, float, int))]
    ratio = sum(value.nbytes for value in kept if value.dim()) / parameter.nbytes
    return ratio, sum(value.nbytes for value in kept if not value.dim())
