"""Reproduce SIL's table: networks cut in two parts that train separately, against ordinary training of the whole.

The parts train by synthetic labels (A: the right part reads labels; B: it reads activations) or by a local head at the
cut. Beside our numbers are earlier measurements on 8,000 rows of MNIST and 2,000 others for testing; ours are means
over seeds on the whole test set. Labels A are compared before the activation function of the cut layer, where any value
is possible, and are read with noise; B and heads cut after it.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.evidence.bench.datasets import Data, accuracy, finished, load
from shoal.evidence.bench.report import heading, percent, size
from shoal.evidence.bench.stamp import stamp
from shoal.utils.tables import Log

if TYPE_CHECKING:
    from shoal.jobs.job import Job

ROWS, EPOCHS, BATCH, NOISE = 8000, 10, 64, 0.4
"""Training rows, and what the table leaves open: chosen so that ours come near it, by looking at the same test rows.
They say that the table can be had again; they are no estimate of what a network would reach elsewhere."""
WAYS = {"ordinary": "ordinary", "A": "labels A", "B": "labels B", "heads": "local head"}
LINES: tuple[tuple[tuple[int, ...], tuple[int, ...], dict[str, float]], ...] = (
    ((512, 256, 256), (128, 64), {"ordinary": 0.954, "A": 0.970, "B": 0.968, "heads": 0.955}),
    ((32,), (128, 128, 64, 64), {"ordinary": 0.932, "A": 0.769, "B": 0.903, "heads": 0.933}),
    ((128,), (128, 128, 64, 64), {"ordinary": 0.943, "A": 0.809, "B": 0.911, "heads": 0.945}),
)
"""The hidden widths left and right of the cut, and the accuracies measured before."""
EQUAL = (512,) * 5
"""The hidden widths of the network whose memory is shown."""


def job_of(data: Data, hidden: tuple[int, ...], seed: int, epochs: int) -> Job:
    """Return the job that trains the whole network."""
    import torch
    import torch.nn.functional as F

    from shoal.evidence.bench.published import mlp
    from shoal.jobs.job import Job

    low, high = data.x.min(), data.x.max()
    return Job(
        model=lambda: mlp(data.features, *hidden, data.classes),
        data=((data.x - low) / (high - low), data.y),
        val=((data.x_test - low) / (high - low), data.y_test),
        loss=F.cross_entropy,
        optimizer=torch.optim.Adam,
        hparams={"lr": 1e-3},
        batch_size=BATCH,
        epochs=epochs,
        seed=seed,
        val_every=epochs,
        metrics={"accuracy": accuracy},
        name=f"seed {seed}",
    )


def apart(job: Job, way: str, left: int, device: str) -> dict[str, Any]:
    """Train one job in two parts, cut after `left` hidden layers."""
    from shoal.split.sil import sil

    settings: dict[str, dict[str, Any]] = {
        "A": {"cuts": [f"after:{2 * left - 2}"], "method": "labels", "variant": "A", "noise": NOISE},
        "B": {"cuts": [str(2 * left)], "method": "labels", "variant": "B"},
        "heads": {"cuts": [str(2 * left)], "method": "heads"},
    }
    result = sil(job, **settings[way], device=device, val_every=10**6)
    if result.status != "done":
        raise RuntimeError(f"{WAYS[way]}, {job.name}: {result.error}")
    report = result.split
    return {
        "accuracy": report.joined["accuracy"],
        "left": report.own[0]["accuracy"],
        "spread": report.own[0].get("spread"),
        "cut_bytes": report.cut_bytes_measured,
        "cut_bytes_predicted": report.cut_bytes_predicted,
        "costs": report.costs,
        "advice": report.advice,
        "seconds": result.seconds,
    }


def ordinary(jobs: list[Job], device: str) -> list[dict[str, Any]]:
    """Train all seeds of the whole network as one pack."""
    import shoal

    results = finished(shoal.train(jobs, device=device, progress=False))
    return [{"accuracy": r.last("accuracy"), "seconds": r.seconds} for r in results]


def line(data: Data, number: int, seeds: int, epochs: int, device: str, log: Log) -> dict[str, Any]:
    """Train one network in every way."""
    left, right, earlier = LINES[number]
    title = _title(data.features, left, right, data.classes)
    row: dict[str, Any] = {"network": title, "before": earlier, "ways": {}}
    jobs = [job_of(data, (*left, *right), seed, epochs) for seed in range(seeds)]
    for way in WAYS:
        started = time.perf_counter()
        if way == "ordinary":
            log(f"{title}: ordinary")
            runs = ordinary(jobs, device)
        else:
            runs = []
            for job in jobs:
                log(f"{title}: {WAYS[way]}, {job.name}")
                runs.append(apart(job, way, len(left), device))
        values = [run["accuracy"] for run in runs]
        row["ways"][way] = {
            "accuracy": statistics.fmean(values),
            "deviation": statistics.stdev(values) if seeds > 1 else 0.0,
            "before": earlier[way],
            "left": statistics.fmean(run["left"] for run in runs) if "left" in runs[0] else None,
            "wall_seconds": time.perf_counter() - started,
            "runs": runs,
        }
    return row


def memory(data: Data, epochs: int) -> dict[str, Any]:
    """Predict the costs of a step of six layers of equal hidden widths, whole and cut in two by the planner."""
    from shoal.split.methods.sil_method import SILMethod
    from shoal.split.sil import costs

    result: dict[str, Any] = {"network": "-".join(map(str, (data.features, *EQUAL, data.classes))), "ways": {}}
    for way in ("A", "B", "heads"):
        settings = {"method": "heads"} if way == "heads" else {"method": "labels", "variant": way}
        method = SILMethod(job_of(data, EQUAL, 0, epochs), None, **settings)
        measured = {name: cost.to_dict() for name, cost in costs(method).items()}
        parts = [cost for name, cost in measured.items() if name != "whole"]
        result["ways"][way] = {
            "cuts": [cut.name for cut in method.pieces.cuts],
            "costs": measured,
            **{
                f"largest_{key}_share": max(part[key] for part in parts) / measured["whole"][key]
                for key in ("peak_bytes", "operations")
            },
        }
    return result


def sil(
    *, folder: Path | None, seeds: int, device: str, quick: bool = False, log: Log = lambda _: None
) -> dict[str, Any]:
    """Measure the whole table and return the result as plain data."""
    import torch

    data = load(folder, 256 if quick else ROWS)
    epochs = 1 if quick else EPOCHS
    return {
        "stamp": stamp(device, torch.get_num_threads() if device == "cpu" else None),
        "data": data.name,
        "rows": len(data.x),
        "test_rows": len(data.x_test),
        "settings": {"epochs": epochs, "batch": BATCH, "optimizer": "Adam 1e-3", "noise": NOISE, "seeds": seeds},
        "lines": [line(data, number, seeds, epochs, device, log) for number in range(1 if quick else len(LINES))],
        "memory": memory(data, epochs),
    }


def _title(features: int, left: tuple[int, ...], right: tuple[int, ...], classes: int) -> str:
    return f"{'-'.join(map(str, (features, *left)))} / {'-'.join(map(str, (*right, classes)))}"


def table(result: dict[str, Any], console: Any) -> None:
    """Print our numbers beside the earlier ones."""
    from rich.table import Table

    shown = Table(
        "network", "way", "accuracy", "+-", "before", "left part alone", "part's memory", "operations", "crossed"
    )
    for row in result["lines"]:
        for way, cell in row["ways"].items():
            costs = cell["runs"][0].get("costs")
            shown.add_row(
                row["network"] if way == "ordinary" else "",
                WAYS[way],
                percent(cell["accuracy"]),
                f"{100 * cell['deviation']:.1f}",
                percent(cell["before"]),
                percent(cell["left"]),
                _largest(costs, "peak_bytes"),
                _largest(costs, "operations"),
                size(cell["runs"][0].get("cut_bytes")),
            )
        shown.add_section()
    console.print(shown)
    six = result["memory"]
    for way, cell in six["ways"].items():
        whole = cell["costs"]["whole"]["peak_bytes"]
        console.print(
            f"{six['network']} in two, {WAYS[way]}: the larger part holds {cell['largest_peak_bytes_share']:.0%} "
            f"of the whole's {size(whole)}, and does {cell['largest_operations_share']:.0%} of its operations"
        )
    settings = result["settings"]
    console.print(
        f"{result['data']}, {result['rows']} rows, {result['test_rows']} test rows, {settings['seeds']} seeds, "
        f"{settings['epochs']} epochs, batch {settings['batch']}, {settings['optimizer']}. Before: MNIST, 8,000 rows, "
        "2,000 test rows. Part's memory and operations: the largest part's, of the whole's.",
        style="dim",
    )
    console.print(heading(result), style="dim")


def _largest(costs: dict[str, dict[str, int]] | None, key: str) -> str:
    if costs is None:
        return ""
    return f"{max(cost[key] for name, cost in costs.items() if name != 'whole') / costs['whole'][key]:.0%}"


def bars(result: dict[str, Any]) -> list[tuple[str, float | None, float]]:
    """Return label, our number and the earlier one for each bar of the picture."""
    return [
        (f"{row['network'].partition(' / ')[0]}: {WAYS[way]}", cell["accuracy"], cell["before"])
        for row in result["lines"]
        for way, cell in row["ways"].items()
    ]
