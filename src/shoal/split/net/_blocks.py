"""A part's tensors on their way: their shapes from the method, and what is sent where bits are saved.

Exactly: the trained values themselves. With fewer bits: what has changed since the task, plus what earlier rounds
rounded away. The coordinator adds the change to its own copy, which never lost a bit, so that rounding does not pile up
in the network; and the worker starts from what the task was after its own rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from shoal.engine.members.member import seeded
from shoal.engine.members.ownership import build_model
from shoal.jobs.job import Job
from shoal.split.core.method import Method
from shoal.split.core.parts import Index, Outcome, Part, Slice, Task, Tensors
from shoal.split.core.state import tensors_of
from shoal.split.net._codec import Codec, Feedback, Shape


class Blocks:
    """What both sides know about the tensors of a method's parts."""

    def __init__(self, job: Job, method: Method, codec: Codec) -> None:
        self.method, self.codec = method, codec
        with seeded(job.seed, torch.device("cpu")):
            whole = {**tensors_of(build_model(job)), **method.companions()}
        self.whole: dict[str, Shape] = {name: tuple(tensor.shape) for name, tensor in whole.items()}
        self.feedback = Feedback(codec, self.whole)

    def task_shapes(self, part: Part) -> dict[str, Shape]:
        """What a part is sent."""
        return self._shapes(self.method.slices(part))

    def outcome_shapes(self, part: Part) -> dict[str, Shape]:
        """What a part gives back."""
        return self._shapes(self.method.returns(part))

    def _shapes(self, slices: Mapping[str, Slice]) -> dict[str, Shape]:
        return {name: piece.shape(self.whole[piece.name]) for name, piece in slices.items()}

    def sent(self, task: Task, outcome: Outcome) -> Outcome:
        """What a worker sends of an outcome."""
        if self.codec.exact:
            return outcome
        wanted = self.method.returns(task.part)
        changes = self._moved(task, outcome.tensors, -1)
        return replace(outcome, tensors={n: self.feedback.corrected(wanted[n], t) for n, t in changes.items()})

    def received(self, task: Task, outcome: Outcome) -> Outcome:
        """The outcome again, at the coordinator, which has the task as it was before it was encoded."""
        if self.codec.exact:
            return outcome
        return replace(outcome, tensors=self._moved(task, outcome.tensors, 1))

    def _moved(self, task: Task, tensors: Tensors, sign: int) -> Tensors:
        """Tensors plus or minus what the task started from; gradients start from nothing."""
        if self.method.merge == "gradients":
            return tensors
        held, wanted = self.method.slices(task.part), self.method.returns(task.part)
        found: Tensors = {}
        for name, value in tensors.items():
            if value.dtype.is_floating_point:
                base = Slice(name, within(held[name], wanted[name])).take(task.tensors[name])
                value = value + base if sign > 0 else value - base
            found[name] = value
        return found


def within(held: Slice, wanted: Slice) -> Index:
    """Where a slice lies in a larger one of the same tensor."""

    def rows(dim: int) -> Tensor | None:
        inner = wanted.index[dim]
        outer = held.index[dim] if dim < len(held.index) else None
        return inner if inner is None or outer is None else torch.searchsorted(outer, inner)

    return tuple(rows(dim) for dim in range(len(wanted.index)))
