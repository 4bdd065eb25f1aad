"""Replay the captured steps of several units side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from shoal.engine.tiers.captured.graphs import RECORDER, Graph, Recorder, clear
from shoal.engine.tiers.captured.unit import CapturedUnit
from shoal.engine.tiers.unit import Executor, Outcome, Unit, memory_message, out_of_memory

BURST = 16
"""How many batches of a unit are launched before the next unit's; few, so that no unit waits long for its launches."""


@dataclass(slots=True)
class _Turn:
    """What a unit has to do in this turn."""

    unit: CapturedUnit
    left: int
    """The number of remaining full batches."""
    graph: Graph | None


class CapturedExecutor(Executor):
    """Runs units that can be captured side by side, each by its own graph, and the others one after another."""

    def __init__(self, recorder: Recorder | None = None) -> None:
        self.recorder = recorder or RECORDER

    def run(self, work: list[tuple[Unit, int]], meanwhile: Callable[[], None] | None = None) -> list[Outcome]:
        captured = [(unit, batches) for unit, batches in work if isinstance(unit, CapturedUnit)]
        start, full = perf_counter(), None
        try:
            if captured:
                self._run_captured(captured, meanwhile)
        except Exception as error:
            if not out_of_memory(error):
                raise
            full = memory_message(error)
            for unit, _ in captured:
                unit.drop_graphs()
        share = (perf_counter() - start) / max(1, sum(len(unit.members) for unit, _ in captured))
        largest = max(captured, key=lambda pair: len(pair[0].members), default=(None, 0))[0]
        return [
            Outcome(share * len(unit.members), full=full if unit is largest else None)
            if isinstance(unit, CapturedUnit)
            else self._turn(unit, batches)
            for unit, batches in work
        ]

    def forget(self) -> None:
        clear()

    def _run_captured(self, work: list[tuple[CapturedUnit, int]], meanwhile: Callable[[], None] | None) -> None:
        turns = []
        for unit, batches in work:
            left = unit.load(batches)  # all graphs are made before one runs, since memory may be full
            turns.append(_Turn(unit, left, unit.ready(self.recorder) if left else None))
            unit.ready_to_finish(self.recorder)
        self._side_by_side([turn for turn in turns if len(turn.unit.chunks) == 1])
        for turn in turns:
            if len(turn.unit.chunks) > 1:
                self._side_by_side([turn])
        if meanwhile is not None:
            meanwhile()
        self.recorder.wait()
        for turn in turns:
            turn.unit.note()

    def _side_by_side(self, turns: list[_Turn]) -> None:
        """Launch all remaining batches of these units, some batches of each in turn."""
        lanes = sorted({turn.unit.lane for turn in turns})
        self.recorder.fork(lanes)
        while any(turn.left for turn in turns):
            for turn in turns:
                count = min(turn.left, BURST)
                turn.left -= count
                if count:
                    with self.recorder.on(turn.unit.lane):
                        for _ in range(count):
                            turn.graph.replay() if turn.graph is not None else turn.unit.batch()
        for turn in turns:
            with self.recorder.on(turn.unit.lane):
                turn.unit.finish()
        self.recorder.join(lanes)
