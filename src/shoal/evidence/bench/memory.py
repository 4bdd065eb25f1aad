"""What a way costs in memory: as the allocator, the operating system and the driver see it."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


@dataclass(kw_only=True)
class Memory:
    """Bytes; None where this device cannot say."""

    allocated: int | None = None
    """GPU: the most that tensors took."""
    reserved: int | None = None
    """GPU: the most that the allocator held, captured graphs included."""
    growth: int | None = None
    """CPU: how far the resident set grew over a process that has only imported torch."""
    resident: int | None = None
    """Host: proportional set size of all the processes of this way, libraries included."""
    driver: int | None = None
    """GPU: what the driver reports in use beyond what was in use before, contexts included."""

    def plus(self, other: Memory) -> Memory:
        """Two processes together."""

        def add(a: int | None, b: int | None) -> int | None:
            return None if a is None or b is None else a + b

        return Memory(
            allocated=add(self.allocated, other.allocated),
            reserved=add(self.reserved, other.reserved),
            growth=add(self.growth, other.growth),
            resident=add(self.resident, other.resident),
        )

    def times(self, factor: float) -> Memory:
        """Scaled from a sample of the processes to all of them."""

        def scale(a: int | None) -> int | None:
            return None if a is None else int(a * factor)

        return Memory(
            allocated=scale(self.allocated),
            reserved=scale(self.reserved),
            growth=scale(self.growth),
            resident=scale(self.resident),
            driver=scale(self.driver),
        )


def _proc(file: str, field: str) -> int | None:
    """A kB line of a file in /proc/self, in bytes; None where there is no /proc."""
    try:
        for line in Path("/proc/self", file).read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None


def peak_resident() -> int | None:
    """The most this process has held.

    Not ru_maxrss: after an exec that still holds what the parent had.
    """
    peak = _proc("status", "VmHWM")
    if peak is None and sys.platform == "darwin":
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak


class Meter:
    """Measures this process from the moment it is made: make it after the imports, before the work."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.start = peak_resident()
        if device.startswith("cuda"):
            import torch

            torch.cuda.init()  # type: ignore[no-untyped-call]
            torch.cuda.reset_peak_memory_stats()

    def read(self) -> Memory:
        peak = peak_resident()
        growth = None if peak is None or self.start is None else peak - self.start
        memory = Memory(growth=growth, resident=_proc("smaps_rollup", "Pss"))
        if self.device.startswith("cuda"):
            import torch

            memory.allocated = torch.cuda.max_memory_allocated()
            memory.reserved = torch.cuda.max_memory_reserved()
            memory.growth = None
        return memory


def _driver_process(device: str, pipe: Connection) -> None:
    import torch

    torch.cuda.set_device(torch.device(device).index or 0)
    torch.zeros(1, device=device)
    while True:
        try:
            pipe.recv()
        except (EOFError, OSError):
            return
        free, total = torch.cuda.mem_get_info()
        pipe.send(total - free)


class Driver:
    """Asks the driver how much of the GPU is in use.

    The asking needs a context of its own, which takes memory too: it lives in one process that stays
    for the whole benchmark, so that its share is in every reading and drops out of the differences.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.pipe: Connection | None = None
        self.process: Any = None

    def __enter__(self) -> Driver:
        if self.device.startswith("cuda"):
            context = get_context("spawn")
            self.pipe, theirs = context.Pipe()
            self.process = context.Process(target=_driver_process, args=(self.device, theirs), daemon=True)
            self.process.start()
            theirs.close()
        return self

    def used(self) -> int | None:
        if self.pipe is None:
            return None
        try:
            self.pipe.send("used")
            return int(self.pipe.recv()) if self.pipe.poll(60) else None
        except (EOFError, OSError):
            return None

    def __exit__(self, *_: object) -> None:
        if self.pipe is not None:
            self.pipe.close()
            self.process.join(10)
            if self.process.is_alive():
                self.process.kill()


def host_cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
