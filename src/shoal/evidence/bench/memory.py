"""Measure the memory that a way needs, as the allocator, the operating system and the driver see it."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from shoal.evidence.bench.child import Child, ChildError


@dataclass(kw_only=True)
class Memory:
    """Numbers of bytes, or None if this device cannot measure them."""

    allocated: int | None = None
    """GPU: the peak of tensors."""
    reserved: int | None = None
    """GPU: the peak of the allocator, captured graphs included."""
    growth: int | None = None
    """CPU: how far the resident set grew beyond a process that has only imported torch."""
    resident: int | None = None
    """Host: the proportional set size of all processes of this way, libraries included."""
    driver: int | None = None
    """GPU: what the driver reports as used beyond what was used before, contexts included."""


def _proc(file: str, field: str) -> int | None:
    """Return a line in kB of a file in /proc/self, in bytes, or None if there is no /proc."""
    try:
        for line in Path("/proc/self", file).read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None


def peak_resident() -> int | None:
    """Return the peak of this process's resident set.

    ru_maxrss is not used, because after an exec it still includes the parent's memory.
    """
    peak = _proc("status", "VmHWM")
    if peak is None and sys.platform == "darwin":
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak


class Meter:
    """Measures this process from now on; create it after the imports, before the work."""

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


def _answer_with_used(device: str, pipe: Connection) -> None:
    import torch

    torch.cuda.set_device(torch.device(device).index or 0)
    torch.zeros(1, device=device)
    while True:
        pipe.recv()
        free, total = torch.cuda.mem_get_info()
        pipe.send(total - free)


class Driver:
    """Asks the driver how much of the GPU is in use.

    Asking needs a CUDA context, which takes memory too. It is in one process that stays for the whole benchmark, so
    that its share is in every reading and drops out of the differences.
    """

    def __init__(self, device: str) -> None:
        self.child = Child(_answer_with_used, device) if device.startswith("cuda") else None

    def __enter__(self) -> Driver:
        return self

    def used(self) -> int | None:
        if self.child is None:
            return None
        try:
            return int(self.child.ask(None, time.monotonic() + 60))
        except ChildError:
            return None

    def __exit__(self, *_: object) -> None:
        if self.child is not None:
            self.child.close()


def host_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
