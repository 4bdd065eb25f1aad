"""The GPU comparisons in one process, for when the device is lent by the minute.

`shoal bench` starts a process for every way, which is fairer to memory and costs a start-up each; this script runs the
same ways on the same workloads one after another. Usage: python benchmarks/one_process.py FILE four mixed pack
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shoal.engine.runtime._timing import open_pack
from shoal.environment import environment
from shoal.evidence.bench.ways import open_way
from shoal.evidence.bench.workloads import Spec, workload

DEVICE = torch.device("cuda", 0)
START = time.time()


def clean() -> None:
    gc.collect()
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def measured(make: Callable[[], Any], steps: int, rounds: int) -> dict[str, Any]:
    """Median milliseconds of a step of all members, and the peaks of the allocator."""
    clean()
    start = time.time()
    try:
        way = make()
        way.step(2)
        torch.cuda.synchronize()
        times = []
        for _ in range(rounds):
            began = time.perf_counter()
            way.step(steps)
            torch.cuda.synchronize()
            times.append((time.perf_counter() - began) / steps * 1e3)
        found = {
            "ms": statistics.median(times),
            "reserved_mib": torch.cuda.max_memory_reserved() / 2**20,
            "note": str(getattr(way, "tier", "")),
            "seconds_in_all": time.time() - start,
        }
        way.close()
    except Exception as error:
        found = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"}
    return found


class Book:
    """Results, written after each measurement."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: dict[str, Any] = {"environment": environment(DEVICE)}

    def add(self, name: str, make: Callable[[], Any], steps: int, rounds: int = 3) -> dict[str, Any]:
        self.rows[name] = measured(make, steps, rounds)
        self.path.write_text(json.dumps(self.rows, indent=1, default=str))
        print(f"[{time.time() - START:5.0f}s] {name}: {self.rows[name]}", flush=True)
        clean()
        return self.rows[name]  # type: ignore[no-any-return]


def four(book: Book) -> None:
    """Bar 3: 32 members in bf16."""
    for net in ("mlp", "cnn", "gpt", "resnet"):
        work = workload(Spec(network=net, members=32, precision="bf16"), epochs=10)
        book.add(f"{net} eager", lambda work=work: open_way("eager", work, DEVICE), 5)
        book.add(f"{net} shoal", lambda work=work: open_pack(work, DEVICE, True), 50, 5)
        book.add(f"{net} captured", lambda work=work: open_way("captured", work, DEVICE), 20)


def mixed(book: Book) -> None:
    """Bar 7: unlike networks in one list."""
    work = workload(Spec(network="mixed", members=8, precision="bf16"), epochs=10)
    book.add("mixed eager", lambda: open_way("eager", work, DEVICE), 5)
    book.add("mixed shoal", lambda: open_pack(work, DEVICE, False), 20)


def pack(book: Book) -> None:
    """Bar 6: the gain at 2, 3 and 4 packed."""
    for net in ("mlp3", "mobilenetv2", "resnet50", "densenet121"):
        alone = workload(Spec(network=net, members=1, batches=8), epochs=10)
        book.add(f"{net} 1 eager", lambda work=alone: open_way("eager", work, DEVICE), 5)
        for count in (2, 3, 4):
            work = workload(Spec(network=net, members=count, batches=8), epochs=10)
            book.add(f"{net} {count} shoal", lambda work=work: open_pack(work, DEVICE, True), 20)


if __name__ == "__main__":
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    results = Book(Path(sys.argv[1]))
    for part in sys.argv[2:]:
        {"four": four, "mixed": mixed, "pack": pack}[part](results)
