"""Bytes at the sockets before they are sent: a formula of shapes, with every header.

message  = 32 (header) + 8 (table's name) + description + tensors
task     : description = 34 + role + groups of units (name, 5 bytes, one bit a unit);  tensors = what the part holds
outcome  : description = 28 + 8 for each step;                                         tensors = what it gives back
gloo adds 192 bytes at the sender of a message and 96 at its receiver; each link's first messages carry the names
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.engine.members.member import make_optimizer, seeded
from shoal.engine.members.ownership import build_model
from shoal.jobs.job import Job
from shoal.split.core.method import Method, Worker
from shoal.split.core.moments import moment_slice, moments_of
from shoal.split.core.parts import Part, Slice, Tensors
from shoal.split.core.state import tensors_of
from shoal.split.net._codec import Codec
from shoal.split.net._sockets import Traffic
from shoal.split.net._wire import (
    HEADER_BYTES,
    LOSS_BYTES,
    OUTCOME_BYTES,
    TABLE_BYTES,
    chosen,
    part_bytes,
    table_bytes,
)
from shoal.split.net.links import on_the_wire

MANY = 64
"""Rounds from which some stand for those in between."""
Entry = tuple[str, str, torch.dtype, tuple[int, ...], bool]
"""Section, name, type, shape, and whether the shape follows from the part."""


@dataclass(frozen=True, slots=True)
class Messages:
    """One part's round: bytes at the worker's socket, and how many of those are names that go only once."""

    traffic: Traffic
    names: Traffic


class TrafficForecast:
    """What the workers of a method will send and receive. Sent and received are the coordinator's."""

    def __init__(self, job: Job, method: Method, codec: Codec) -> None:
        self.method, self.codec = method, codec
        with seeded(job.seed, torch.device("cpu")):
            network = build_model(job)
        self.whole: Tensors = {**tensors_of(network), **method.companions()}
        travels = method.moments == "travel" and method.merge == "weights"
        self.moments = _moments(job, network) if travels else {}

    def part(self, part: Part, number: int) -> Messages:
        """One part of a round, there and back."""
        down = self._entries(self.method.slices(part), with_moments=number > 0)
        up = self._entries(self.method.returns(part), with_moments=True) if part.steps else []
        sent, sent_names = self._message(len(part_bytes(part)), down)
        back, back_names = self._message(OUTCOME_BYTES + LOSS_BYTES * part.steps, up)
        out, out_answer = on_the_wire(sent)
        home, home_answer = on_the_wire(back)
        return Messages(Traffic(out + home_answer, home + out_answer), Traffic(sent_names, back_names))

    def round(self, number: int, parts: Sequence[Part]) -> Traffic:
        """One round, without the names."""
        return sum((self.part(part, number).traffic for part in parts), Traffic())

    def all_rounds(self, executor: Sequence[Worker], rounds: int | None = None) -> Traffic:
        """The whole run, should this crew stay: every round, and the names on each link."""
        rounds = self.method.rounds if rounds is None else rounds
        counted = range(rounds) if rounds <= MANY else [*range(MANY // 2), *range(rounds - MANY // 2, rounds)]
        each = {number: self.round(number, self.method.parts(number, executor)) for number in counted}
        total = sum(each.values(), Traffic())
        if rounds > MANY:
            usual, missing = each[MANY // 2 - 1], rounds - MANY
            total += Traffic(usual.sent * missing, usual.received * missing)
        return total + self._all_names(executor, min(rounds, 2))

    def _all_names(self, executor: Sequence[Worker], rounds: int) -> Traffic:
        """The tables: the first task's and outcome's, and the second task's, which has moments."""
        total = Traffic()
        for number in range(rounds):
            for part in self.method.parts(number, executor):
                names = self.part(part, number).names
                total += names if number == 0 else Traffic(names.sent if self.moments else 0, 0)
        return total

    def _entries(self, slices: Mapping[str, Slice], *, with_moments: bool) -> list[Entry]:
        found: list[Entry] = []
        for name, piece in slices.items():
            whole = self.whole[piece.name]
            found.append(("tensors", name, whole.dtype, piece.shape(tuple(whole.shape)), True))
        for name, piece in slices.items() if with_moments else ():
            weight = self.whole[piece.name].shape
            for key, moment in self.moments.get(piece.name, {}).items():
                place = moment_slice(piece, weight, moment.shape)
                if place is not None:
                    shape = place.shape(tuple(moment.shape))
                    like = shape == piece.shape(tuple(weight))
                    found.append(("moments", f"{name}/{key}", moment.dtype, shape, like))
        return found

    def _message(self, description: int, entries: Sequence[Entry]) -> tuple[int, int]:
        """Bytes of a message without its table, and of the table."""
        body = sum(chosen(self.codec, dtype, section).size(shape, dtype) for section, _, dtype, shape, _ in entries)
        table: list[list[list[object]]] = [[], [], []]
        for section, name, dtype, shape, follows in entries:
            told = None if follows else list(shape)
            table[section == "moments"].append([name, str(dtype).removeprefix("torch."), told])
        return HEADER_BYTES + TABLE_BYTES + description + body, len(table_bytes(table))


def _moments(job: Job, network: torch.nn.Module) -> dict[str, dict[str, Tensor]]:
    """What the job's optimizer keeps for each parameter, from one step on zero gradients; nothing where it cannot."""
    network = copy.deepcopy(network)
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer = make_optimizer(job, network)
    try:
        optimizer.step()
    except Exception:  # one that wants a closure, or more than a gradient
        return {}
    found: dict[str, dict[str, Tensor]] = {}
    for key, value in moments_of(optimizer, network).items():
        owner, _, name = key.rpartition("/")
        found.setdefault(owner, {})[name] = value
    return found
