"""The stacked and streams tiers on a GPU: chunks of members whose steps are captured side by side into one graph."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from shoal.engine.members.member import Member
from shoal.engine.planning import memory, perf_cache
from shoal.engine.recipes.recipe import Recipe, TraceCache
from shoal.engine.stack import transfer
from shoal.engine.tiers.captured.background import BackgroundCompile, NoteTimes
from shoal.engine.tiers.captured.chunk import Cache, Chunk
from shoal.engine.tiers.captured.graphs import LANES, SPARE, Graph, Recorder, clear, held, scarce
from shoal.engine.tiers.unit import Findings, Unit, member_output, stack_outputs
from shoal.utils.set_up_times import timed

_lanes = itertools.count()
FEW = 3
"""The number of batches from which a graph is made; a warm-up and a capture take as long as two batches without a
graph."""
SURE = 3
"""If this many times the rough estimate of a step's memory is free, no closer estimate is needed."""
FITTING_GAIN = 0.25
"""The assumed fraction of a step that a stack of half the size saves."""


class CapturedUnit(Unit):
    """Members of one recipe in one or more chunks. The executor runs full batches, this class runs short ones."""

    def __init__(
        self, recipes: Sequence[Recipe], trace_cache: TraceCache, cache: Cache, *, chunk: int, compiled: bool
    ) -> None:
        """Build the chunks.

        Args:
            chunk: The number of members in one stack; with 1, each is a stack of its own, side by side on streams.
        """
        self.tier = "streams" if chunk == 1 else "stacked"
        self.compiled, self.compile_seconds = compiled, 0.0
        solo = chunk == 1
        shared = not solo and _orders_agree([recipe.member for recipe in recipes])
        groups = [recipes[i : i + chunk] for i in range(0, len(recipes), chunk)]
        self.chunks = [
            Chunk.build(group, trace_cache, cache, solo=solo, shared=shared, compiled=compiled) for group in groups
        ]
        self.lane = next(_lanes) % LANES
        """The stream on which the unit is captured and launched."""
        self.graphs: dict[int, Graph] = {}
        """Graphs of a step of all chunks, by the batch's rows. They are dropped when a chunk changes."""
        self.step_seconds = self.set_up_seconds = 0.0
        """The seconds of a step, and of making it ready, if known."""
        self.set_up_bytes = 0
        """The most bytes that the allocator held while steps were made ready."""
        self._background: BackgroundCompile | None = None
        self._compiled_meanwhile = False
        self._save_memory = False
        self.full = min(recipes[0].member.job.batch_size, recipes[0].member.shape_rows)
        """The rows of a full batch."""
        self._short: list[int] = []
        self._mixed = False
        """Whether some members have a full batch now and others a short one."""
        self._batches = 0
        self._note_members()

    @property
    def form(self) -> str:
        return self.tier + perf_cache.COMPILED if self.compiled else self.tier

    def _note_members(self) -> None:
        """Update the list of members from the chunks."""
        self.members = [member for chunk in self.chunks for member in chunk.members]

    def graph(self, recorder: Recorder, rows: int | None = None) -> Graph:
        """Return the graph of a step of all chunks on batches of `rows` rows (None for full ones), captured once."""
        rows = self.full if rows is None else rows
        if rows not in self.graphs:
            with timed("capture") as spent:
                self.compile_seconds += sum(chunk.prepare(rows, rows == self.full) for chunk in self.chunks)
                branches = [chunk.branch(rows) for chunk in self.chunks]
                warm = sum(held())
                self._make_sure()
                beside = next(iter(self.graphs.values()), None)
                self.graphs[rows] = recorder.capture(branches, self.lane, beside)
                self.set_up_bytes = max(self.set_up_bytes, warm, sum(held()))
            self.set_up_seconds += spent.seconds
        return self.graphs[rows]

    # --- batches ----------------------------------------------------------------------------------------------------

    def load(self, batches: int) -> int:
        """Prepare for this many batches, and return how many of them are full for any member; `finish` runs the
        others."""
        self._fit()
        self._batches = batches
        last = {member.rows_in(batches) - (batches - 1) * self.full for member in self.members}
        assert len(last) == 1 or batches == 1, "members with batches of different sizes go one batch at a time"
        self._short = [size for size in last if size != self.full]
        self._mixed = len(last) > 1
        full = batches if self._mixed or not self._short else batches - 1
        for chunk in self.chunks:
            chunk.load(batches, self.full if full else self._short[0])
        raising = [chunk.stack.optimizer.raises_in for chunk in self.chunks]
        last_step = min((step for step in raising if step is not None), default=batches)
        return full if last_step == batches else self.load(last_step)  # a schedule that raises ends its member

    def ready(self, recorder: Recorder) -> Graph | None:
        """Return the full batch's graph, or None if so few batches are left that they are run operator by operator."""
        if self._background is not None and self._background.ended():
            self._compiled_meanwhile = self._background.take_over(self, recorder)
            self._end_background()
        if self.full in self.graphs or self.compiled or self._coming(self.full) >= FEW:
            return self.graph(recorder)
        self._make_sure()
        return None

    def ready_to_finish(self, recorder: Recorder) -> None:
        """Capture graphs for the short batches that come next, if more of them will follow."""
        for rows in self._short:
            if self._coming(rows) >= FEW:
                self.graph(recorder, rows)
            else:
                self._make_sure()

    def _make_sure(self) -> None:
        """Raise an error if there is not enough memory for a step, since in the middle of one it is too late."""
        if self.members[0].device.type == "cuda":
            ensure_memory(self.chunks[0].stack.recipes[0], self.tier, sum(len(chunk.by_row) for chunk in self.chunks))

    def drop_graphs(self) -> None:
        """Drop the graphs, and keep no more than needed from now on, because memory was full."""
        self._end_background()
        self.graphs, self._save_memory = {}, True

    def seconds_left(self) -> float:
        """Return the seconds that the remaining full batches will take."""
        return self._coming(self.full) * self.step_seconds

    def _coming(self, rows: int) -> int:
        """Return the largest number of batches of this many rows that a member still has."""
        return max(batches_left(member, full=rows == self.full) for member in self.members)

    def _fit(self) -> None:
        """Drop free rows if they are at least half of all rows and that saves time."""
        if (len(self.chunks) == 1 and len(self.members) > len(self.chunks[0].by_row) // 2) or not self._worth_fitting():
            return
        chunks = [chunk for chunk in self.chunks if chunk.members]
        chunks = self.chunks if len(chunks) > len(self.chunks) // 2 else chunks
        chunks = [chunk.fitted() for chunk in chunks]
        if any(a is not b for a, b in zip(chunks, self.chunks, strict=False)) or len(chunks) != len(self.chunks):
            self._end_background()  # the new stacks have other shapes
            if self._compiled_meanwhile:  # and training does not wait for them to be compiled
                self.compiled = self._compiled_meanwhile = False
                for chunk in chunks:
                    chunk.use(self.full, None)
            self.chunks, self.graphs = chunks, {}
            self._note_members()

    def _worth_fitting(self) -> bool:
        """Return whether a smaller stack would save the time it takes to make it ready, as far as both are known."""
        saved = FITTING_GAIN * self.step_seconds * self._coming(self.full)
        if self._save_memory or not self.step_seconds or saved > self.set_up_seconds:
            return True
        return self.members[0].device.type == "cuda" and scarce()

    def batch(self, rows: int | None = None) -> None:
        """Run a batch of `rows` rows (None for a full one), operator by operator."""
        for chunk in self.chunks:
            if chunk.members:
                chunk.batch(self.full if rows is None else rows)

    def finish(self) -> None:
        """Run the last batch of members for which it is not full."""
        for rows in self._short:
            for chunk in self.chunks:
                if self._mixed:
                    chunk.inputs.tick.zero_()
                chunk.move(rows, self._batches - 1)
            if rows in self.graphs:
                self.graphs[rows].replay()
            else:
                self.batch(rows)

    def note(self) -> None:
        """Write the results of the batches into the members, once the device is done with them."""
        for chunk in self.chunks:
            if chunk.members:
                chunk.note(self._batches)

    def run(self, batches: int) -> None:
        """Run batch by batch without a captured graph, for devices that cannot capture."""
        for _ in range(self.load(batches)):
            self.batch()
        self.finish()
        self.note()

    def rewind(self) -> None:
        """Go back to the epoch's first batch, for a trial."""
        for chunk in self.chunks:
            chunk.inputs.place.zero_()
            chunk.inputs.tick.zero_()

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Allow steps to be tried inside this context, and restore all members afterwards."""
        written = [tensor.detach() for chunk in self.chunks for tensor in chunk.written()]
        # The copies stay on the device if they need no more memory than training will.
        beside = _is_small(sum(tensor.nbytes for tensor in written), self.members[0].device)
        before = [tensor.clone() if beside else tensor.to("cpu", copy=True) for tensor in written]
        try:
            yield
        finally:
            for tensor, value in zip(written, before, strict=True):
                tensor.copy_(value)

    def compile_meanwhile(self, note_times: NoteTimes) -> None:
        """Compile the step on full batches in another process while the unit trains, and use it from then on if it is
        faster. Nothing happens if its chunks have different steps."""
        if len({chunk.key(self.full, compiled=True) for chunk in self.chunks}) == 1:
            self._background = BackgroundCompile(note_times)

    def end_reading(self) -> None:
        self._end_background()

    def _end_background(self) -> None:
        if self._background is not None:
            self._background.close()
            self._background = None

    # --- epochs -----------------------------------------------------------------------------------------------------

    def rates(self) -> list[float]:
        rates = []
        for chunk in self.chunks:
            chunk.stack.optimizer.note_rates()
            last = chunk.stack.optimizer.last_rates
            rates += [last[row] for row in chunk.alive]
        return rates

    def end_epoch(self, values: Mapping[int, float | None]) -> None:
        places = self._places()
        for chunk in self.chunks:
            of_chunk = {places[slot][1]: value for slot, value in values.items() if places[slot][0] is chunk}
            if of_chunk:
                chunk.view.end_epoch(of_chunk)

    def failures(self) -> dict[int, Exception]:
        errors = {id(chunk): chunk.stack.optimizer.schedule_failures() for chunk in self.chunks if chunk.members}
        places = enumerate(self._places())
        return {slot: errors[id(chunk)][row] for slot, (chunk, row) in places if row in errors[id(chunk)]}

    # --- in and out -------------------------------------------------------------------------------------------------

    def write_back(self, slots: list[int] | None = None) -> None:
        for chunk, rows in self._rows(range(len(self.members)) if slots is None else set(slots)):
            chunk.view.write_back(rows)

    def look_ahead(self, ending: list[int]) -> None:
        if self._background is not None:
            self._background.begin(self)
        for chunk in self.chunks:
            chunk.look_ahead()
        for chunk, rows in self._rows(set(ending)):
            transfer.expect(chunk.stack.row_bytes * len(rows), chunk.stack.device)

    def keep(self, slots: list[int]) -> Unit:
        for chunk, rows in self._rows(set(range(len(self.members))) - set(slots)):
            chunk.release(rows)
        self._note_members()
        return self

    def _rows(self, slots: Container[int]) -> Iterator[tuple[Chunk, list[int]]]:
        """Yield each chunk with its rows of these slots."""
        first = 0
        for chunk in self.chunks:
            alive = chunk.alive
            rows = [row for slot, row in enumerate(alive, first) if slot in slots]
            first += len(alive)
            if rows:
                yield chunk, rows

    def accepts(self, recipe: Recipe, beside: Sequence[Recipe] = ()) -> bool:
        """Return whether there is a free row for a member, besides those for others that are about to join."""
        return self._free_rows([*beside, recipe]) is not None

    def join(self, recipes: Sequence[Recipe]) -> Unit:
        """Give each of these members a free row; nothing is compiled or captured again."""
        assigned = self._free_rows(recipes)
        assert assigned is not None, "members that join were accepted before"
        for chunk, recipes_by_row in assigned:
            if recipes_by_row:
                chunk.assign(recipes_by_row)
        self._note_members()
        return self

    def _free_rows(self, recipes: Sequence[Recipe]) -> list[tuple[Chunk, dict[int, Recipe]]] | None:
        """Return the rows that members would get in each chunk, or None if there is none for one of them."""
        assigned: list[tuple[Chunk, dict[int, Recipe]]] = [(chunk, {}) for chunk in self.chunks]
        for recipe in recipes:
            free = ((rows, row) for chunk, rows in assigned if (row := chunk.free_row(recipe, rows)) is not None)
            first = next(free, None)
            if first is None:
                return None
            rows, row = first
            rows[row] = recipe
        return assigned

    def forget_evaluations(self) -> None:
        for chunk in self.chunks:
            chunk.view.forget_evaluations()

    def outputs(self, inputs: Sequence[Any], slots: list[int] | None = None) -> Any:
        wanted = list(range(len(self.members))) if slots is None else slots
        places = self._places()
        outputs = []
        for chunk in self.chunks:
            rows = [places[slot][1] for slot in wanted if places[slot][0] is chunk]
            if rows:
                out = chunk.view.outputs(inputs, rows)
                outputs += [member_output(out, i) for i in range(len(rows))]
        return stack_outputs(outputs)

    def undo_validation(self) -> Callable[[], None]:
        undos = [chunk.view.undo_validation() for chunk in self.chunks]

        def undo() -> None:
            for each in undos:
                each()

        return undo

    def adopt_state(self, slots: list[int]) -> None:
        places = self._places()
        for slot in slots:
            chunk, row = places[slot]
            chunk.view.adopt_state([row])

    def validate(self, batch: Any, slots: list[int]) -> Findings | None:
        places = self._places()
        parts = []
        for chunk in self.chunks:
            rows = [places[slot][1] for slot in slots if places[slot][0] is chunk]
            if rows:
                parts.append(chunk.view.validate(batch, rows))
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        logs = {name: torch.cat([part.logs[name] for part in known]) for name in known[0].logs}
        outputs = torch.utils._pytree.tree_map(lambda *leaves: torch.cat(leaves), *[part.outputs for part in known])
        return Findings(torch.cat([part.losses for part in known]), logs, outputs)

    def _places(self) -> list[tuple[Chunk, int]]:
        return [(chunk, row) for chunk in self.chunks for row in chunk.alive]


def batches_left(member: Member, *, full: bool) -> int:
    """Return how many full batches, or short ones, a member will still have."""
    left = member.batches_left
    short = (member.place + left) // member.num_batches if member.num_rows % member.job.batch_size else 0
    return left - short if full else short


def _orders_agree(members: list[Member]) -> bool:
    """Return whether these members will read the same rows in the same order, epoch after epoch."""
    first = members[0]
    return len(members) > 1 and all(
        member.data.same(first.data)
        and member.job.shuffle == first.job.shuffle
        and (member.epoch, member.place, member.skipped) == (first.epoch, first.place, first.skipped)
        and (not first.job.shuffle or torch.equal(member.drawn_from, first.drawn_from))
        for member in members
    )


def _is_small(nbytes: int, device: torch.device) -> bool:
    """Return whether this many bytes are small compared to the device's free memory."""
    return nbytes <= SPARE or (device.type == "cuda" and nbytes < memory.unreserved(device) // 8)


def ensure_memory(recipe: Recipe, tier: str, members: int) -> None:
    """Raise an error now if there is no memory for a step of this many members and its capture.

    Raises:
        torch.OutOfMemoryError: If there is not enough memory.
    """
    rough, device = members * memory.rough_bytes(recipe), recipe.member.device
    if SURE * rough < memory.unreserved(device):
        return
    clear()
    try:
        need = memory.analytic(recipe, tier)[1].at(members)
    except Exception:  # an operator that does not support fake tensors
        need = float(rough)
    left = memory.unreserved(device)
    if need > left:
        raise torch.OutOfMemoryError(f"a step needs about {need / 1e6:,.0f} MB, and {left / 1e6:,.0f} MB are left")
