"""Captured steps of several units, replayed as one CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Callable
from time import perf_counter

import torch

from shoal.pack.captured.unit import CapturedUnit
from shoal.pack.unit import Executor, Outcome, Unit, out_of_memory

STREAMS = 16
"""Branches of a captured graph at the most; see benchmarks for where more stops helping."""


class CapturedExecutor(Executor):
    """Units that can be captured share one graph a step; the others run one after another."""

    def __init__(self) -> None:
        self._graphs: dict[tuple[tuple[int, int], ...], torch.cuda.CUDAGraph] = {}
        self._streams: list[torch.cuda.Stream] = []

    def run(self, work: list[tuple[Unit, int]], meanwhile: Callable[[], None] | None = None) -> list[Outcome]:
        captured = [(unit, batches) for unit, batches in work if isinstance(unit, CapturedUnit)]
        start, full = perf_counter(), None
        try:
            if captured:
                self._run_captured(captured, meanwhile)
        except Exception as error:
            if not out_of_memory(error):
                raise
            full = error
        share = (perf_counter() - start) / max(1, sum(len(unit.members) for unit, _ in captured))
        largest = max(captured, key=lambda pair: len(pair[0].members), default=(None, 0))[0]
        return [
            Outcome(share * len(unit.members), full=full if unit is largest else None)
            if isinstance(unit, CapturedUnit)
            else self._turn(unit, batches)
            for unit, batches in work
        ]

    def forget(self) -> None:
        self._graphs = {}
        gc.collect()
        torch.cuda.empty_cache()

    def _run_captured(self, work: list[tuple[CapturedUnit, int]], meanwhile: Callable[[], None] | None) -> None:
        left = {id(unit): unit.load(batches) for unit, batches in work}
        rounds: list[tuple[torch.cuda.CUDAGraph, int]] = []
        while active := [unit for unit, _ in work if left[id(unit)]]:
            count = min(left[id(unit)] for unit in active)
            rounds.append((self.graph(active), count))  # all are made before one of them runs: memory may be full
            for unit in active:
                left[id(unit)] -= count
        for graph, count in rounds:
            for _ in range(count):
                graph.replay()
        for unit, _ in work:
            unit.finish()
        if meanwhile is not None:
            meanwhile()
        torch.cuda.synchronize()
        for unit, _ in work:
            unit.note()

    def graph(self, units: list[CapturedUnit]) -> torch.cuda.CUDAGraph:
        """One step of all these units, captured once."""
        key = tuple((id(unit), unit.version) for unit in units)
        if key not in self._graphs:
            live = {id(unit): unit.version for unit in units}
            self._graphs = {k: g for k, g in self._graphs.items() if all(live.get(i, v) == v for i, v in k)}
            for unit in units:
                unit.prepare()
            self._graphs[key] = self._capture(units)
        return self._graphs[key]

    def _capture(self, units: list[CapturedUnit]) -> torch.cuda.CUDAGraph:
        branches = sum(len(unit.chunks) for unit in units)
        while len(self._streams) < min(branches, STREAMS):
            self._streams.append(torch.cuda.Stream())  # type: ignore[no-untyped-call]
        streams = self._streams[: min(branches, STREAMS)]
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        # One pool for all graphs, since one runs at a time. It lives as long as a graph in it: never keep its handle.
        pool = next((other.pool() for other in self._graphs.values()), None)
        with torch.cuda.graph(graph, pool=pool):
            main = torch.cuda.current_stream()
            for stream in streams:
                stream.wait_stream(main)
            offset = 0
            for unit in units:
                unit.enqueue(streams, offset)
                offset += len(unit.chunks)
            for stream in streams:
                main.wait_stream(stream)
        return graph
