"""Steps as CUDA graphs: recorded once, replayed for every batch.

A graph belongs to the unit whose tensors it reads and writes, and ends with it: no other could replay it. Units with
one stack are recorded and replayed on a lane each, side by side; those on the same lane come one after the other, since
they share what a library keeps for a stream. A unit of many steps side by side takes all lanes, and runs alone.
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
"""Branches of a captured graph, and graphs side by side, at the most; see benchmarks for where more stops helping."""
SCARCE = 0.25
"""The share of a device's memory that should be free: below it, memory is looked after more closely."""

SPARE = 128 << 20
"""Bytes that the allocator may hold besides what is in use: more is given back before something large is built."""

Branch = Callable[[], None]


class Graph(Protocol):
    """Work that was recorded."""

    def replay(self) -> None: ...

    def pool(self) -> Any: ...


class Recorder:
    """Records work and launches it; this one on the current CUDA device."""

    def __init__(self) -> None:
        self._lanes: dict[int, list[torch.cuda.Stream]] = {}
        """Of each device."""

    def capture(self, branches: Sequence[Branch], lane: int, beside: Graph | None = None) -> Graph:
        """These branches as one graph, each of them called once.

        `beside`: a graph that never runs at the same time, whose memory this one may use too.
        """
        if scarce():
            clear()
        trim()  # what the warm-up used: a graph has memory of its own
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
        gc.disable()  # whatever it took apart would do so in the middle of the recording
        try:
            with torch.cuda.stream(stream):
                # A pool lives as long as a graph in it: never keep its handle.
                graph.capture_begin(*(() if beside is None else (beside.pool(),)))
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
        """Inside: what is launched goes to this lane."""
        return torch.cuda.stream(self._lane(lane))

    def fork(self, lanes: Sequence[int]) -> None:
        """Let these lanes wait for what was launched until now."""
        for lane in lanes:
            self._lane(lane).wait_stream(torch.cuda.current_stream())

    def join(self, lanes: Sequence[int]) -> None:
        """Let what is launched from now on wait for these lanes."""
        for lane in lanes:
            torch.cuda.current_stream().wait_stream(self._lane(lane))

    def wait(self) -> None:
        """Until all that was launched is done."""
        torch.cuda.synchronize()

    def _lane(self, lane: int) -> torch.cuda.Stream:
        lanes = self._lanes.setdefault(torch.cuda.current_device(), [])
        while len(lanes) < LANES:
            lanes.append(torch.cuda.Stream())  # type: ignore[no-untyped-call]
        return lanes[lane % LANES]


RECORDER = Recorder()
"""Of this process: two would not know of each other's lanes."""


def scarce() -> bool:
    """Whether little of the device's memory is free."""
    free, total = torch.cuda.mem_get_info()
    return bool(free < SCARCE * total)


def held() -> tuple[int, int]:
    """Bytes in use, and bytes that the allocator holds besides."""
    used = torch.cuda.memory_allocated()
    return used, torch.cuda.memory_reserved() - used


def trim() -> None:
    """Give back what is not in use, where it is much."""
    if held()[1] > SPARE:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def clear() -> None:
    """Give back memory that is no longer held."""
    garbage_collection.collect()
    torch.cuda.empty_cache()
