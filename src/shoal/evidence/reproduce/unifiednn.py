"""Reproduce UnifiedNN's comparison: M networks as M vanilla PyTorch processes, and as one Shoal process.

Published: up to 53 % less memory and 81 % less time than one process per network, accuracy unchanged. Time is what the
users wait: from starting the processes to the last trained network, libraries and data included. Memory on a GPU is the
most that the driver reports from start to end, contexts included; on a CPU it is the proportional set size of all
processes, when all have trained and still exist.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from shoal.evidence.bench.child import Child, ChildError
from shoal.evidence.bench.datasets import finished
from shoal.evidence.bench.memory import Driver, Memory, Meter, host_cores
from shoal.evidence.bench.report import heading, percent, size
from shoal.evidence.bench.stamp import stamp
from shoal.utils.tables import Log

PUBLISHED = {"memory": 0.53, "time": 0.81}
LOOK_SECONDS = 0.25  # between two queries of the driver
TITLES = {"processes": "one process per network", "shoal": "Shoal"}


@dataclass(frozen=True, kw_only=True)
class Users:
    """How many networks are trained, of one architecture or of four; small enough to send to another process."""

    members: int
    epochs: int
    same: bool

    @property
    def label(self) -> str:
        return f"{self.members} CNNs" if self.same else f"{self.members} of CNN, MLP, LSTM, encoder"


def _process(way: str, users: Users, share: range, device: str, threads: int | None, pipe: Connection) -> None:
    """Train a share of the networks, send the seconds, then on request the memory and the accuracies."""
    import torch

    from shoal.evidence.reproduce.digits import accuracy, jobs, load, vanilla

    if threads is not None:
        torch.set_num_threads(threads)
    meter = Meter(device)
    x, y, xt, yt = load()
    share_jobs = [jobs(users.members, users.epochs, (x, y), same=users.same)[i] for i in share]
    start = time.perf_counter()
    if way == "processes":
        models = [vanilla(job, torch.device(device)) for job in share_jobs]
    else:
        import shoal

        models = [result.model for result in finished(shoal.train(share_jobs, device=device, progress=False))]
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    pipe.send(time.perf_counter() - start)
    pipe.recv()
    pipe.send(meter.read())
    pipe.recv()
    pipe.send([(accuracy(m, x, y), accuracy(m, xt, yt)) for m in models])
    pipe.recv()


class _Watch:
    """Records the most memory that the driver reports beyond what was in use before."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.before = driver.used()
        self.most = self.before

    def look(self) -> None:
        used = self.driver.used()
        if used is not None and self.most is not None:
            self.most = max(self.most, used)

    @property
    def grown(self) -> int | None:
        return None if self.most is None or self.before is None else self.most - self.before


def _start(way: str, users: Users, device: str) -> list[Child]:
    """Start the processes of one way."""
    everybody = range(users.members)
    shares = [everybody[i : i + 1] for i in everybody] if way == "processes" else [everybody]
    threads = max(1, host_cores() // len(shares)) if way == "processes" and device == "cpu" else None
    return [Child(_process, way, users, share, device, threads) for share in shares]


def _receive(children: list[Child], end: float, watch: _Watch) -> list[Any]:
    """Return the next message of each process, while watching the driver."""
    messages = []
    for child in children:
        while not child.pipe.poll(LOOK_SECONDS) and time.monotonic() < end:
            watch.look()
        messages.append(child.receive(end))
    return messages


def _ask(children: list[Child], end: float, watch: _Watch) -> list[Any]:
    for child in children:
        child.send()
    return _receive(children, end, watch)


def measure(way: str, users: Users, device: str, driver: Driver, end: float) -> dict[str, Any]:
    """Measure one way's time, memory and accuracies, or return its error."""
    watch = _Watch(driver)
    start = time.monotonic()
    children = _start(way, users, device)
    try:
        training = max(_receive(children, end, watch))
        seconds = time.monotonic() - start
        watch.look()
        memories: list[Memory] = _ask(children, end, watch)
        accuracies = [pair for share in _ask(children, end, watch) for pair in share]
    except (ChildError, OSError) as error:
        return {"way": way, "error": str(error)}
    finally:
        for child in children:
            child.pipe.close()
        for child in children:
            child.close()
    resident = sum(m.resident or 0 for m in memories) or None
    return {
        "way": way,
        "error": None,
        "seconds": seconds,
        "training_seconds": training,
        "resident": resident,
        "driver": watch.grown,
        "memory": watch.grown if watch.grown is not None else resident,
        "train_accuracy": [a for a, _ in accuracies],
        "test_accuracy": [b for _, b in accuracies],
    }


def unifiednn(*, members: int, epochs: int, device: str, limit: float, log: Log = lambda _: None) -> dict[str, Any]:
    """Measure both ways, for networks of one architecture and of four, and return the result as plain data."""
    end = time.monotonic() + limit
    lines = []
    with Driver(device) as driver:
        for same in (True, False):
            users = Users(members=members, epochs=epochs, same=same)
            rows = []
            for way, title in TITLES.items():
                log(f"{users.label}: {title}")
                rows.append(measure(way, users, device, driver, end))
            lines.append({"networks": users.label, "ways": rows, **saved(*rows)})
    return {"stamp": stamp(device, None), "members": members, "epochs": epochs, "published": PUBLISHED, "lines": lines}


def saved(vanilla: dict[str, Any], packed: dict[str, Any]) -> dict[str, Any]:
    """Return what one process saves over many: fractions of memory and time, and the largest change of an accuracy."""
    if vanilla["error"] or packed["error"]:
        return {"memory_saved": None, "time_saved": None, "training_saved": None, "largest_accuracy_change": None}
    changes = [
        abs(a - b)
        for key in ("train_accuracy", "test_accuracy")
        for a, b in zip(vanilla[key], packed[key], strict=True)
    ]

    def share(key: str) -> float | None:
        return None if not vanilla[key] or packed[key] is None else 1 - packed[key] / vanilla[key]

    return {
        "memory_saved": share("memory"),
        "time_saved": share("seconds"),
        "training_saved": share("training_seconds"),
        "largest_accuracy_change": max(changes),
    }


def table(result: dict[str, Any], console: Any) -> None:
    """Print our numbers beside the published ones."""
    from rich.table import Table

    shown = Table("networks", "way", "seconds", "training", "memory", "train accuracy", "test accuracy", "")
    for line in result["lines"]:
        for row in line["ways"]:
            if row["error"]:
                shown.add_row(line["networks"], TITLES[row["way"]], "", "", "", "", "", str(row["error"])[:100])
                continue
            means = [sum(row[key]) / len(row[key]) for key in ("train_accuracy", "test_accuracy")]
            shown.add_row(
                line["networks"],
                TITLES[row["way"]],
                f"{row['seconds']:.1f}",
                f"{row['training_seconds']:.1f}",
                size(row["memory"]),
                *map(percent, means),
            )
    console.print(shown)
    gains = Table(
        "networks", "memory saved", "published", "time saved", "published", "training alone", "accuracy change"
    )
    for line in result["lines"]:
        published = result["published"]
        gains.add_row(
            line["networks"],
            percent(line["memory_saved"]),
            f"up to {percent(published['memory'])}",
            percent(line["time_saved"]),
            f"up to {percent(published['time'])}",
            percent(line["training_saved"]),
            percent(line["largest_accuracy_change"]),
        )
    console.print(gains)
    console.print(
        f"Digits, {result['epochs']} epochs, batch 32. Seconds: from start to the last trained network, libraries and "
        "data included. Memory: the driver's peak on a GPU, proportional set size on a CPU. Accuracy change: the "
        "largest of any network.",
        style="dim",
    )
    console.print(heading(result), style="dim")


def bars(result: dict[str, Any]) -> list[tuple[str, float | None, float]]:
    """Return label, our number and the published one for each bar of the picture."""
    return [
        (f"{line['networks']}: {key}", line[f"{key}_saved"], result["published"][key])
        for line in result["lines"]
        for key in ("memory", "time")
    ]
