"""The stacked and streams tiers on a GPU: chunks of members whose steps are captured side by side into one graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.pack.captured.chunk import Cache, Chunk
from shoal.pack.members import Member
from shoal.pack.recipe import Kitchen, Recipe
from shoal.pack.unit import Findings, Unit, Unlike
from shoal.pack.unit import stack_outputs as _stack


class CapturedUnit(Unit):
    """Members of one recipe in one or more chunks. Full batches are run by the executor, short ones here."""

    def __init__(
        self, recipes: Sequence[Recipe], kitchen: Kitchen, cache: Cache, *, chunk: int, compiled: bool
    ) -> None:
        """`chunk`: members in one stack; 1: each by itself, side by side on streams."""
        self.tier = "streams" if chunk == 1 else "stacked"
        solo = chunk == 1
        shared = not solo and _orders_agree([recipe.member for recipe in recipes])
        groups = [recipes[i : i + chunk] for i in range(0, len(recipes), chunk)]
        self.chunks = [
            Chunk.build(group, kitchen, cache, solo=solo, shared=shared, compiled=compiled) for group in groups
        ]
        self.members = [member for part in self.chunks for member in part.members]
        self.done = 0
        self.version = 0
        """Changes whenever a captured graph no longer fits."""
        self._full = min(self.members[0].job.batch_size, self.members[0].num_rows)

    def prepare(self) -> float:
        """Make full batches ready for capture; seconds spent compiling."""
        return sum(chunk.prepare(self._full) for chunk in self.chunks)

    def begin_epoch(self, orders_MN: Tensor) -> None:
        start = 0
        for chunk in self.chunks:
            chunk.begin_epoch(orders_MN[start : start + len(chunk.alive)])
            start += len(chunk.alive)
        self.done = 0

    def full_batches(self, batches: int) -> int:
        """How many of the next `batches` are full."""
        left = self.members[0].num_rows // self._full - self.done
        return min(batches, left)

    def enqueue(self, streams: Sequence[torch.cuda.Stream], offset: int = 0) -> None:
        """One full batch of every chunk, spread over the streams."""
        for index, chunk in enumerate(self.chunks):
            with torch.cuda.stream(streams[(index + offset) % len(streams)]):
                chunk.enqueue()

    def advanced(self, batches: int) -> None:
        """Note that so many full batches were replayed."""
        self.done += batches
        for chunk in self.chunks:
            chunk.advanced(batches)

    def run(self, batches: int) -> None:
        """Batch by batch without a captured graph: short batches, and devices that capture nothing."""
        member = self.members[0]
        for _ in range(batches):
            rows = min(self._full, member.num_rows - self.done * self._full)
            for chunk in self.chunks:
                chunk.short(rows)
            self.advanced(1)

    def rewind(self) -> None:
        """Back to the epoch's first batch, for a trial that is thrown away."""
        for chunk in self.chunks:
            chunk.inputs.place.zero_()

    def losses(self) -> Tensor:
        parts = [chunk.inputs.losses[: self.done, chunk.alive].T for chunk in self.chunks]
        return torch.cat(parts).double().cpu()

    def rates(self) -> list[float]:
        found = []
        for chunk in self.chunks:
            chunk.view.rates_of.settle_rates()
            found += [chunk.view.rates_of.last[row] for row in chunk.alive]
        return found

    def end_epoch(self, values: list[float | None]) -> None:
        start = 0
        for chunk in self.chunks:
            wide: list[float | None] = [None] * len(chunk.stack.members)
            for row in chunk.alive:
                wide[row] = values[start]
                start += 1
            chunk.view.end_epoch(wide)

    def write_back(self, slots: list[int] | None = None) -> None:
        wanted = set(range(len(self.members)) if slots is None else slots)
        for slot, (chunk, row) in enumerate(self._places()):
            if slot in wanted:
                chunk.view.write_back([row])

    def keep(self, slots: list[int]) -> Unit:
        places = self._places()
        kept: list[Chunk] = []
        for chunk in self.chunks:
            rows = [row for slot, (own, row) in enumerate(places) if own is chunk and slot in set(slots)]
            if rows:
                kept.append(chunk.keep(rows))
        self.chunks = kept
        self.members = [self.members[slot] for slot in slots]
        self.version += 1
        return self

    def outputs(self, inputs: Sequence[Any], slots: list[int] | None = None) -> Any:
        wanted = list(range(len(self.members))) if slots is None else slots
        places = self._places()
        found = []
        for chunk in self.chunks:
            rows = [places[slot][1] for slot in wanted if places[slot][0] is chunk]
            if rows:
                out = chunk.view.outputs(inputs, rows)
                found += [_member(out, i) for i in range(len(rows))]
        return _stack(found)

    def validate(self, batch: Any, slots: list[int]) -> Findings | None:
        places = self._places()
        found = []
        for chunk in self.chunks:
            rows = [places[slot][1] for slot in slots if places[slot][0] is chunk]
            if rows:
                found.append(chunk.view.validate(batch, rows))
        known = [part for part in found if part is not None]
        if len(known) < len(found):
            return None
        logs = {name: torch.cat([part.logs[name] for part in known]) for name in known[0].logs}
        outputs = torch.utils._pytree.tree_map(lambda *leaves: torch.cat(leaves), *[part.outputs for part in known])
        return Findings(torch.cat([part.losses for part in known]), logs, outputs)

    def _places(self) -> list[tuple[Chunk, int]]:
        return [(chunk, row) for chunk in self.chunks for row in chunk.alive]


def _member(outputs: Any, index: int) -> Any:
    if isinstance(outputs, Unlike):
        return outputs[index]
    return torch.utils._pytree.tree_map(lambda leaf: leaf[index], outputs)


def _orders_agree(members: list[Member]) -> bool:
    """Will these members read the same rows in the same order, epoch after epoch?"""
    first = members[0]
    return len(members) > 1 and all(
        member.data.same(first.data)
        and member.job.shuffle == first.job.shuffle
        and member.epoch == first.epoch
        and (not first.job.shuffle or member.job.order_seed == first.job.order_seed)
        for member in members
    )
