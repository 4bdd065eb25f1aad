"""One way of training, in a process of its own so that its peak memory can be compared with the other way's.

`python -m shoal.demo.worker alone|packed FOLDER SECONDS` prints one JSON line for each event and leaves the weights
in FOLDER as NumPy arrays.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from shoal.demo import task

THREADS = 1
"""For both ways: the fastest choice for networks this small, and steady on a busy machine."""


def peak_memory() -> int | None:
    """The largest resident size of this process so far, in bytes; None where the system does not tell."""
    status = Path("/proc/self/status")
    if status.exists():  # not getrusage: on Linux its peak is inherited from the parent process
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def tell(event: str, **values: Any) -> None:
    """One event, as one line of JSON."""
    print(json.dumps({"event": event, **values}), flush=True)


def save(folder: Path, way: str, models: Sequence[nn.Module]) -> None:
    arrays = {
        f"{i}/{key}": value.numpy() for i, model in enumerate(models) for key, value in model.state_dict().items()
    }
    np.savez(folder / f"{way}.npz", **arrays)


def alone(folder: Path, longest: float) -> None:
    """One network after the other, as many of them as there is time for."""
    torch.set_num_threads(THREADS)
    digits, settings = task.Digits.load(), task.settings()
    before, start = peak_memory(), time.perf_counter()
    models, histories = [], []
    for done, setting in enumerate(settings, 1):
        model, history = task.train_alone(setting, digits)
        models.append(model)
        histories.append(history)
        seconds = time.perf_counter() - start
        tell("progress", done=done, total=len(settings))
        if seconds > longest:
            break
    save(folder, "alone", models)
    finish(seconds, before, histories)


def packed(folder: Path) -> None:
    """All networks together."""
    import shoal

    digits = task.Digits.load()
    jobs = task.jobs(digits)
    before, start = peak_memory(), time.perf_counter()
    results = shoal.train(jobs, device="cpu", threads=THREADS)
    seconds = time.perf_counter() - start
    for result in results:
        if result.status != "done":
            raise ValueError(f"{result.name} ended as {result.status}: {result.error}")
    save(folder, "packed", [result.model for result in results])
    tiers = sorted({result.tier for result in results})
    histories = [[dict(row) for row in result.history] for result in results]
    finish(seconds, before, histories, tiers=tiers)


def finish(seconds: float, before: int | None, histories: list[list[dict[str, float]]], **more: Any) -> None:
    """The last event: what the parent process compares."""
    settings = task.settings()
    tell(
        "result",
        seconds=seconds,
        trained=len(histories),
        before=before,
        peak=peak_memory(),
        histories=histories,
        names=[setting.name for setting in settings],
        rates=[setting.lr for setting in settings],
        **more,
    )


def main(argv: Sequence[str]) -> int:
    way, folder, longest = argv
    if way == "alone":
        alone(Path(folder), float(longest))
    else:
        packed(Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
