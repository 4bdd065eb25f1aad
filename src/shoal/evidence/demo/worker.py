"""One way of training, in a process of its own so that its peak memory can be compared with the other way's.

`python -m shoal.evidence.demo.worker alone|packed|checked FOLDER SECONDS` prints one JSON line for each event;
`alone` and `packed` leave the weights in FOLDER as NumPy arrays, `checked` compares both ways in float64.
"""

import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from shoal.evidence.demo import task
from shoal.evidence.demo.compare import largest_difference

if TYPE_CHECKING:
    import shoal

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


def weights(model: nn.Module, index: int) -> dict[str, np.ndarray[Any, Any]]:
    """A network's weights as arrays, by the network's number and the weight's name."""
    return {f"{index}/{key}": value.numpy() for key, value in model.state_dict().items()}


def save(folder: Path, way: str, models: Sequence[nn.Module]) -> None:
    arrays = {key: value for i, model in enumerate(models) for key, value in weights(model, i).items()}
    np.savez(folder / f"{way}.npz", **arrays)  # type: ignore[arg-type]


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
    raise_unless_done(results)
    save(folder, "packed", [result.model for result in results])
    tiers = sorted({result.tier for result in results})
    histories = [[dict(row) for row in result.history] for result in results]
    finish(seconds, before, histories, tiers=tiers)


def checked(longest: float) -> None:
    """Both ways in float64 for a few epochs, where they must be equal: as many networks as there is time for.

    In float32 that is not well defined: another order of summation may flip a ReLU, and Adam makes a full step of it.
    """
    import shoal

    digits, settings = task.Digits.load(torch.float64), task.settings()
    results = shoal.train(task.jobs(digits, task.CHECKED_EPOCHS), device="cpu", threads=THREADS)
    raise_unless_done(results)
    start, difference = time.perf_counter(), 0.0
    for done, index in enumerate(spread(len(settings)), 1):
        model, _ = task.train_alone(settings[index], digits, task.CHECKED_EPOCHS)
        difference = max(difference, largest_difference(weights(model, index), weights(results[index].model, index)))
        tell("progress", done=done, total=len(settings))
        if time.perf_counter() - start > longest:
            break
    tell("result", trained=done, total=len(settings), difference=difference, steps=results[0].steps)


def spread(count: int) -> list[int]:
    """All numbers below `count`, each far from the one before, so that any first part covers the whole sweep."""
    stride = next(s for s in range(count // 3, count + 2) if math.gcd(s, count) == 1)
    return [i * stride % count for i in range(count)]


def raise_unless_done(results: "shoal.Results") -> None:
    for result in results:
        if result.status != "done":
            raise ValueError(f"{result.name} ended as {result.status}: {result.error}")


def finish(seconds: float, before: int | None, histories: list[list[dict[str, float]]], **more: Any) -> None:
    """The last event: what the parent process compares."""
    settings = task.settings()
    tell(
        "result",
        seconds=seconds,
        trained=len(histories),
        total=len(settings),
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
    elif way == "packed":
        packed(Path(folder))
    else:
        checked(float(longest))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
