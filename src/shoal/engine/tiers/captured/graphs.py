"""Steps as CUDA graphs, which are recorded once and replayed for every batch.

A graph belongs to the unit whose tensors it reads and writes, and is dropped with it. Units with one stack are recorded
and replayed side by side, each on a lane (a stream); those on the same lane run one after the other, since they share
what a library stores per stream. A unit of many steps side by side takes all lanes, and runs alone.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol

import torch

from shoal.engine.tiers.unit import out_of_memory
from shoal.utils import garbage_collection

LANES = 16
"""The largest number of branches of a captured graph, and of graphs side by side; see benchmarks for where more
stops helping."""
SCARCE = 0.25
"""The fraction of a device's memory that should be free; with less, unused memory is freed more often."""

SPARE = 128 << 20
"""The bytes that the allocator may hold unused; more is freed before something large is built."""

REPLAYS = 10
ENOUGH_SECONDS = 0.1
"""Replays are timed three times, or until so many seconds have passed."""

Branch = Callable[[], None]


class Graph(Protocol):
    """Recorded work that can be replayed."""

    def replay(self) -> None: ...

    def pool(self) -> Any: ...


class Recorder:
    """Records work and launches it on the current CUDA device."""

    def __init__(self) -> None:
        self._lanes: dict[int, list[torch.cuda.Stream]] = {}
        """The streams of each device."""

    def capture(self, branches: Sequence[Branch], lane: int, beside: Graph | None = None) -> Graph:
        """Capture these branches as one graph, calling each of them once.

        Args:
            beside: A graph that never runs at the same time, whose memory this one may share.
        """
        if scarce():
            clear()
        trim()  # frees what the warm-up used, since a graph has its own memory
        try:
            return self._capture(branches, lane, beside)
        except Exception as error:
            if not out_of_memory(error):
                raise
        clear()
        return self._capture(branches, lane, beside)

    def _capture(self, branches: Sequence[Branch], lane: int, beside: Graph | None) -> Graph:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        stream, collects = self._lane(lane), gc.isenabled()
        gc.disable()  # a destructor must not call CUDA in the middle of the capture
        try:
            with torch.cuda.stream(stream):
                # A pool lives as long as a graph in it: never keep its handle. Other threads may use the GPU meanwhile,
                # such as that of a DataLoader that pins batches.
                if beside is None:
                    graph.capture_begin(capture_error_mode="thread_local")
                else:
                    graph.capture_begin(beside.pool(), capture_error_mode="thread_local")
                try:
                    self._branch(branches, stream, lane)
                except BaseException:
                    with suppress(RuntimeError):
                        graph.capture_end()
                    raise
                graph.capture_end()
        finally:
            if collects:
                gc.enable()
        return graph

    def _branch(self, branches: Sequence[Branch], main: torch.cuda.Stream, lane: int) -> None:
        streams = [self._lane(lane + place) for place in range(min(len(branches), LANES))]
        for stream in streams[1:]:
            stream.wait_stream(main)
        for place, branch in enumerate(branches):
            with torch.cuda.stream(streams[place % len(streams)]):
                branch()
        for stream in streams[1:]:
            main.wait_stream(stream)

    def on(self, lane: int) -> AbstractContextManager[Any]:
        """Launch work on this lane inside this context."""
        return torch.cuda.stream(self._lane(lane))

    def fork(self, lanes: Sequence[int]) -> None:
        """Make these lanes wait for what was launched until now."""
        for lane in lanes:
            self._lane(lane).wait_stream(torch.cuda.current_stream())

    def join(self, lanes: Sequence[int]) -> None:
        """Make what is launched from now on wait for these lanes."""
        for lane in lanes:
            torch.cuda.current_stream().wait_stream(self._lane(lane))

    def time(self, graph: Graph, before: Callable[[], object]) -> float:
        """Return the seconds of a replay, the best of a few; `before` is called before each replay."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        best, total = float("inf"), 0.0
        while total < ENOUGH_SECONDS and total < 3 * REPLAYS * best:
            start.record()
            for _ in range(REPLAYS):
                before()
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            seconds = start.elapsed_time(end) / 1e3
            best, total = min(best, seconds / REPLAYS), total + seconds
        return best

    def wait(self) -> None:
        """Wait until everything that was launched is done."""
        torch.cuda.synchronize()

    def _lane(self, lane: int) -> torch.cuda.Stream:
        lanes = self._lanes.setdefault(torch.cuda.current_device(), [])
        while len(lanes) < LANES:
            lanes.append(torch.cuda.Stream())  # type: ignore[no-untyped-call]
        return lanes[lane % LANES]


RECORDER = Recorder()
"""The recorder of this process; two recorders would not know of each other's lanes."""


def scarce() -> bool:
    """Return whether little of the device's memory is free."""
    free, total = torch.cuda.mem_get_info()
    return bool(free < SCARCE * total)


def held() -> tuple[int, int]:
    """Return the bytes in use, and the bytes that the allocator holds besides."""
    used = torch.cuda.memory_allocated()
    return used, torch.cuda.memory_reserved() - used


def trim() -> None:
    """Free unused memory of the allocator if it is much."""
    if held()[1] > SPARE:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def clear() -> None:
    """Collect garbage and free the unused memory of the allocator."""
    garbage_collection.collect()
    torch.cuda.empty_cache()
