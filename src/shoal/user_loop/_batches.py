"""The batches of a user's own loop as members and stacks read them, and the losses that result."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.data.source import Source
from shoal.engine.members.evaluation_weights import with_evaluation_weights
from shoal.engine.members.member import Member
from shoal.engine.tiers.serial import SerialUnit
from shoal.engine.tiers.stacked.forward import Forward, joined
from shoal.engine.tiers.stacked.given_batches import GivenBatchesStack
from shoal.engine.tiers.unit import member_output
from shoal.errors import MemberError

LoopUnit = GivenBatchesStack | SerialUnit
"""What runs the members of a user's own loop."""
Losses = list[tuple[list[int], Tensor]]
"""The ids of members with their losses, for each unit."""


class FixedBatchSource(Source):
    """A member's data in a user's own loop: one row, which is the entire batch of the step."""

    length = 1

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.batch: Any = None

    def take(self, rows: Tensor, *, seed: int = 0, epoch: int = 0) -> Any:
        return self.batch

    def feed(self, rows: Tensor, batch_size: int, *, seed: int = 0, epoch: int = 0) -> Iterator[Any]:
        return iter((self.batch,))

    def fingerprint(self) -> str:
        return "batches of a user's own loop"


class Batches:
    """The batch of one step, as each unit and each member sees it."""

    def __init__(self, leaves: list[Tensor], spec: pytree.TreeSpec, per_member: bool, ids: Sequence[int]) -> None:
        """Store the batch; `ids` are the members that take the step, in the order of the member axis."""
        self.leaves, self.spec, self.per_member = leaves, spec, per_member
        self.places = {id: index for index, id in enumerate(ids)}
        """The index of each member on the member axis."""
        flat = spec.type is tuple and spec.num_nodes == len(leaves) + 1
        folded = len(leaves) if flat else repr(spec)
        self.key: Hashable = (per_member, folded, *((tuple(leaf.shape), leaf.dtype) for leaf in leaves))
        """A key that is equal for batches which share a trace."""

    def of(self, member: Member) -> Any:
        """Return one member's batch, as a copy that it may write to."""
        leaves = [leaf[self.places[member.index]] for leaf in self.leaves] if self.per_member else self.leaves
        return pytree.tree_unflatten([leaf.clone() for leaf in leaves], self.spec)

    def give(self, member: Member) -> None:
        """Store a member's batch where the member reads its data."""
        assert isinstance(member.data.source, FixedBatchSource)
        member.data.source.batch = self.of(member)

    def rows(self, unit: GivenBatchesStack) -> list[Tensor]:
        """Return the batch for the rows of a stack."""
        indices = [self.places[unit.members[slot].index] for slot in unit.stack.rows]
        if not self.per_member or indices == list(range(len(self.places))):
            return self.leaves
        return [leaf[indices] for leaf in self.leaves]

    def shapes(self) -> str:
        """Return the shapes as text, for a message."""
        return ", ".join(str(list(leaf.shape)) for leaf in self.leaves)


def check_ids(members: Sequence[int], known: Sequence[int]) -> list[int]:
    """Return the ids that the user asked for, in the given order.

    Raises:
        KeyError: If there is no such member.
        ValueError: If an id is given twice.
    """
    ids = list(members)
    unknown = [id for id in ids if id not in known]
    if unknown:
        raise KeyError(f"no member {unknown[0]!r} in this pack; it has {', '.join(map(str, known)) or 'none'}")
    if len(set(ids)) < len(ids):
        repeated = next(id for id in ids if ids.count(id) > 1)
        raise ValueError(f"members has {repeated} more than once; a member takes one step: name it once")
    return ids


def in_order(losses: Losses, ids: Sequence[int], device: torch.device) -> Tensor:
    """Return the losses as one tensor in the order of `ids`, with NaN for members that have none."""
    if len(losses) == 1 and losses[0][0] == ids:
        return losses[0][1]
    if not ids:
        return torch.empty(0, device=device)
    by_id = {id: loss for part, values in losses for id, loss in zip(part, values, strict=True)}
    dtype = next(iter(by_id.values())).dtype if by_id else torch.get_default_dtype()
    nan = torch.full((), math.nan, dtype=dtype, device=device)
    return torch.stack([by_id.get(id, nan).to(dtype) for id in ids])


def step_alone(unit: SerialUnit, batches: Batches) -> tuple[Losses, dict[int, Exception]]:
    """Step a serial member, for which the batch is an epoch of one, and return its loss and any error."""
    batches.give(unit.member)
    unit.begin_epoch(torch.zeros(1, 1, dtype=torch.int64))
    id = unit.member.index
    try:
        unit.run(1)
    except MemberError as error:
        unit._stuck = False
        assert isinstance(error.cause, Exception)
        return [], {id: error.cause}
    unit.member.step += 1
    errors = {id: unit.failures()[0]} if unit.failures() else {}
    return [([id], unit.losses()[0].to(batches.leaves[0].device))], errors


def stacked_state(models: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return the weights and buffers of networks by name, [M, ...].

    Raises:
        ValueError: If they differ in name or shape.
    """
    states = [{**dict(model.named_parameters()), **dict(model.named_buffers())} for model in models]
    shapes = [{name: (tensor.shape, tensor.dtype) for name, tensor in state.items()} for state in states]
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError("members' weights differ in name or shape, and so cannot be stacked; use member(id)")
    return {name: torch.stack([state[name].detach() for state in states]) for name in states[0]} if states else {}


def outputs_of(members: Sequence[Member], inputs: Any) -> Any:
    """Return the eval-mode outputs of members that were written back, [M, ...]."""
    with ExitStack() as contexts:
        for member in members:
            contexts.enter_context(with_evaluation_weights(member))
        if len({member.job.precision for member in members}) == 1:
            return Forward([member.model for member in members], members[0].job.precision)(inputs)
        return joined([member_output(Forward([m.model], m.job.precision)(inputs), 0) for m in members])
