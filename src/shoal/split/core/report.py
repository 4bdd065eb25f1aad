"""What a split cost: bytes, seconds and memory, predicted beside measured."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from shoal.engine.members.optimizers import make_optimizer
from shoal.jobs.job import Job
from shoal.split.core.method import Method, Worker
from shoal.split.core.moments import moments_of
from shoal.split.core.parts import Outcome, Part, Task, Tensors
from shoal.split.core.state import State
from shoal.utils.tables import duration, size

MANY = 64
"""Rounds from which a forecast goes by some of them."""


@dataclass(kw_only=True, slots=True)
class SplitReport:
    """What a split did and what it cost. Bytes go both ways, over all workers and rounds, headers not included."""

    method: str
    workers: int
    tier: str
    """How the parts were trained: serial, packed, or distributed."""
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


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that were sent to workers and received from them; no TCP or IP headers."""

    sent: int = 0
    received: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.sent + other.sent, self.received + other.received)

    @property
    def both(self) -> int:
        return self.sent + self.received


def tensor_bytes(content: Task | Outcome) -> int:
    """Bytes of the tensors of a task or an outcome."""
    groups = (content.tensors, content.moments, content.extras)
    return sum(tensor.nbytes for group in groups for tensor in group.values())


class Forecast:
    """Bytes of rounds before they happen: the tasks and outcomes of a method, made of tensors without data.

    `size` says how long one of them is: its tensors alone, or its message.
    """

    def __init__(self, method: Method, size: Callable[[Task | Outcome], int] = tensor_bytes) -> None:
        self.method, self.size = method, size
        self.state = State.of(method.model, method.companions(), device="meta")
        self.travels = method.moments == "travel" and method.merge == "weights"
        self.moments = _all_moments(method) if self.travels else {}
        self.owners = self.state.tensors.keys()

    def part(self, number: int, part: Part, owners: Collection[str] | None = None) -> Traffic:
        """One part of a round, there and back. `owners`: tensors whose optimizer state exists already; None: all."""
        method, state = self.method, self.state
        known = self.owners if owners is None else owners
        state.moments = {key: moment for key, moment in self.moments.items() if key.rpartition("/")[0] in known}
        given, back = method.predicted_extras(part)
        sent = self.size(state.task(number, part, method.slices(part), moments=self.travels, extras=given))
        state.moments = self.moments
        result = state.task(number, part, method.returns(part) if part.steps else {}, moments=self.travels)
        outcome = Outcome(
            round=number, number=part.number, tensors=result.tensors, moments=result.moments, extras=back,
            losses=(0.0,) * part.steps,
        )  # fmt: skip
        return Traffic(sent, self.size(outcome))

    def all_rounds(self, workers: Sequence[Worker]) -> Traffic:
        """The whole run, should these workers stay; where there are many rounds, some stand for those in between."""
        rounds, total, usual, owners = self.method.rounds, Traffic(), Traffic(), set[str]()
        for number in range(rounds) if rounds <= MANY else [*range(MANY // 2), *range(rounds - MANY // 2, rounds)]:
            parts = self.method.parts(number, workers)
            one = sum((self.part(number, part, owners) for part in parts), Traffic())
            owners |= {piece.name for part in parts if part.steps for piece in self.method.returns(part).values()}
            total += one
            usual = one if number < MANY // 2 else usual
        missing = max(0, rounds - MANY)
        return total + Traffic(usual.sent * missing, usual.received * missing)


def _all_moments(method: Method) -> Tensors:
    """What the optimizer keeps for the network's parameters, and for those that train beside them."""
    job, beside = method.member.job, method.companions()
    moments = optimizer_state(job, method.model)
    if beside:
        extra = optimizer_state(replace(job, params=None), nn.ParameterList(beside.values()))
        names = list(beside)
        moments |= {f"{names[int(key.partition('/')[0])]}/{key.partition('/')[2]}": t for key, t in extra.items()}
    return moments


def optimizer_state(job: Job, network: nn.Module) -> Tensors:
    """What the job's optimizer keeps after a step, "<parameter>/<name>" -> tensor on the meta device; empty where it
    needs more than gradients."""
    for device in ("meta", "cpu"):  # few optimizers read numbers, and need real ones
        twin = copy.deepcopy(network).to(device)
        for parameter in twin.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        try:
            optimizer = make_optimizer(job, twin)
            optimizer.step()
        except Exception:
            continue
        return {name: value.to("meta") for name, value in moments_of(optimizer, twin).items()}
    return {}
