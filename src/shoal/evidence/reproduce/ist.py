"""Reproduce IST's comparison: one fully connected network on workers with slow links, against local SGD and data
parallel.

Every method gets its own best rate (and local SGD and IST their own best window), chosen on rows held out of the
training rows. Then each is trained with several seeds and evaluated on the whole test set: accuracy by steps and by
bytes. Both are the same wherever the parts are trained, so this is done in one process; seconds are those of real
workers over links of a given rate (`shoal.evidence.reproduce.ist_links`).

Published, for a 3-layer network on spoken words: to the same accuracy 6.1 times faster than local SGD and 16.6 times
faster than data parallel (2 layers: 4.2 and 10.6), and a better network in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import mean
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.evidence.bench.datasets import Data, accuracy
from shoal.utils.tables import Log

if TYPE_CHECKING:
    from shoal.jobs.job import Job
    from shoal.split.core.method import Method, TaskExecutor

DATA_PARALLEL, LOCAL_SGD, IST = "data parallel", "local SGD", "IST"
METHODS = (DATA_PARALLEL, LOCAL_SGD, IST)
PUBLISHED = {LOCAL_SGD: 6.1, DATA_PARALLEL: 16.6}
"""How many times faster than these methods IST reaches the same accuracy, with 3 layers."""
WINDOWS = (5, 10, 20, 50, 100, 200)
RATES = {DATA_PARALLEL: (0.03, 0.1, 0.3), LOCAL_SGD: (0.03, 0.1, 0.2), IST: (0.1, 0.3, 0.6)}
MOMENTUM = 0.9
LOOK_EVERY = 20
"""The minimum number of local steps between two evaluations of the accuracy."""


class Network(nn.Module):
    """A network of two hidden layers with batch norm."""

    def __init__(self, features: int, width: int, classes: int) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Linear(features, width, bias=False), nn.BatchNorm1d(width)
        self.second, self.norm2 = nn.Linear(width, width, bias=False), nn.BatchNorm1d(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x_BD: Tensor) -> Tensor:
        x_BD = F.relu(self.norm1(self.first(x_BD)))
        logits: Tensor = self.head(F.relu(self.norm2(self.second(x_BD))))
        return logits


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """The data, the network and the lengths of the comparison."""

    data: Data
    width: int = 1024
    workers: int = 4
    batch: int = 128
    """The rows in a worker's batch."""
    steps: int = 400
    """The steps of data parallel, and times `longer` of local SGD."""
    longer: float = 1.5
    """How much longer local SGD may take to reach the target."""
    ist_longer: float = 4.0
    """The same for IST, whose steps are several times cheaper."""

    def length(self, method: str) -> int:
        return round(self.steps * {DATA_PARALLEL: 1.0, LOCAL_SGD: self.longer, IST: self.ist_longer}[method])


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One way to train."""

    method: str
    window: int = 1
    rate: float = 0.1
    steps: int = 400


def job_of(scene: Scene, setting: Setting, seed: int) -> Job:
    """Return the job that is split."""
    from shoal.jobs.job import Job

    data = scene.data
    return Job(
        model=lambda: Network(data.features, scene.width, data.classes),
        data=(data.x, data.y),
        val=(data.x_test, data.y_test),
        loss=F.cross_entropy,
        optimizer=torch.optim.SGD,
        hparams={"lr": setting.rate, "momentum": MOMENTUM},
        batch_size=scene.batch,
        steps=setting.steps,
        seed=seed,
        metrics={"accuracy": accuracy},
        name=f"{setting.method}, {setting.window} steps a round, rate {setting.rate:g}, seed {seed}",
    )


def method_of(job: Job, scene: Scene, setting: Setting) -> Method:
    """Return the method of the split. Momentum starts again in every round of local SGD and IST, so that it costs no
    traffic.

    IST has none of its corrections except re-estimated batch norm statistics: batch norm makes up for fewer inputs, and
    the input of the head is not scaled, so that one rate suits all layers.
    """
    from shoal.split.methods.averaging import DataParallel, LocalSGD
    from shoal.split.methods.ist import IST as Subnets

    if setting.method == DATA_PARALLEL:
        return DataParallel(job, scene.workers)
    if setting.method == LOCAL_SGD:
        return LocalSGD(job, scene.workers, setting.window, moments="fresh")
    return Subnets(job, scene.workers, setting.window, moments="fresh", recovery=0, scale=False)


def trained(
    scene: Scene,
    setting: Setting,
    seed: int,
    *,
    device: str = "cpu",
    executor: Callable[[Job, Method], TaskExecutor] | None = None,
    look_every: int = LOOK_EVERY,
) -> dict[str, Any]:
    """Train once, and return the settings and the accuracy by steps, bytes and seconds."""
    from shoal.split.executors.local import Serial
    from shoal.split.executors.packed import Packed
    from shoal.split.trainer import train_split

    job = job_of(scene, setting, seed)
    method = method_of(job, scene, setting)
    if executor is not None:
        task_executor = executor(job, method)
    else:
        task_executor = (Packed if device.startswith("cuda") else Serial)(job, method, scene.workers, device)
    result = train_split(job, method, task_executor, device=device, val_every=max(1, look_every // setting.window))
    report = result.split
    assert report is not None
    columns = ("step", "bytes", "seconds", "accuracy")
    return {
        **asdict(setting),
        "seed": seed,
        "status": result.status,
        "curve": [{name: row[name] for name in columns} for row in result.history if "accuracy" in row],
        "bytes": report.bytes_measured,
        "bytes_predicted": report.bytes_predicted,
        "seconds": report.seconds_measured,
        "lost": report.lost,
        "peak_bytes": max(report.peak_measured.values(), default=0),
        "peak_whole": report.peak_predicted.get("whole", 0),
    }


def choose(
    scene: Scene,
    *,
    windows: Sequence[int] = WINDOWS,
    methods: Sequence[str] = METHODS,
    device: str = "cpu",
    seed: int = 100,
    log: Log = lambda line: None,
) -> list[Setting]:
    """Choose for each method and window the rate that is best on held-out rows, in as many steps as it will have."""
    inner = replace(scene, data=scene.data.held_out())
    settings = []
    for method in methods:
        for window in (1,) if method == DATA_PARALLEL else windows:
            scores = {}
            for rate in RATES[method]:
                setting = Setting(method=method, window=window, rate=rate, steps=inner.length(method))
                log(f"choosing: {method}, {window} steps a round, rate {rate:g}")
                row = trained(inner, setting, seed, device=device, look_every=setting.steps)
                scores[rate] = last(row) if row["status"] == "done" else 0.0
            best = max(scores, key=lambda rate: scores[rate])
            settings.append(Setting(method=method, window=window, rate=best, steps=scene.length(method)))
    return settings


def windows_of(text: str, *, small: bool) -> tuple[int, ...]:
    """Parse windows such as "5,10,20"; if empty, return those of the comparison, or fewer for small data."""
    if not text:
        return (10, 50) if small else WINDOWS
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"windows is {text!r}; use whole numbers with commas, such as 5,20,100")
    return tuple(int(part) for part in parts)


def last(row: dict[str, Any]) -> float:
    """Return the final accuracy."""
    return float(row["curve"][-1]["accuracy"])


# --- summaries ------------------------------------------------------------------------------------------------------


def averaged(rows: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """Return the mean curve of one setting's seeds."""
    curves = [row["curve"] for row in rows]
    return [{name: mean(point[name] for point in points) for name in points[0]} for points in zip(*curves, strict=True)]


def grouped(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, int, float], list[dict[str, Any]]]:
    """Group the rows of different seeds by their setting."""
    groups: dict[tuple[str, int, float], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["method"], row["window"], row["rate"]), []).append(row)
    return groups


def target_of(rows: Sequence[dict[str, Any]]) -> float:
    """Return the accuracy that data parallel reaches in its run."""
    return mean(last(row) for row in rows if row["method"] == DATA_PARALLEL)


def reaching(curve: Sequence[dict[str, float]], target: float) -> dict[str, float] | None:
    """Return the first point of a curve at or above an accuracy."""
    return next((point for point in curve if point["accuracy"] >= target), None)


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one line for each setting: its final accuracy, and its cost to reach data parallel's accuracy."""
    target = target_of(rows)
    lines = []
    for (method, window, rate), seeds in grouped(rows).items():
        curve = averaged(seeds)
        first_point = reaching(curve, target)
        final = [last(row) for row in seeds]
        lines.append(
            {
                "method": method,
                "window": window,
                "rate": rate,
                "seeds": len(seeds),
                "accuracy": mean(final),
                "spread": max(final) - min(final),
                "bytes": mean(row["bytes"] for row in seeds),
                "seconds": mean(row["seconds"] for row in seeds),
                "target": target,
                "steps_to_target": None if first_point is None else first_point["step"],
                "bytes_to_target": None if first_point is None else first_point["bytes"],
                "seconds_to_target": None if first_point is None else first_point["seconds"],
            }
        )
    return lines
