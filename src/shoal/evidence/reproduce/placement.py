"""Placed training over slow links: bytes and seconds of a step, predicted and measured, against the usual ways.

Every machine, including the server, is a namespace with its own link (see `namespaces.py`), and all share the cores of
this machine. Parameter server and data parallel are Shoal's own; torch's DistributedDataParallel and one process alone
are measured too. All ways of a case run one after another, since their ratio is what counts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.errors import ShoalError, describe
from shoal.evidence.bench.datasets import accuracy
from shoal.evidence.bench.stamp import stamp
from shoal.evidence.reproduce.namespaces import Links, shaped
from shoal.evidence.reproduce.placement_arithmetic import arithmetic
from shoal.evidence.reproduce.placement_arithmetic import table as arithmetic_table
from shoal.evidence.reproduce.placement_networks import SHAPES
from shoal.evidence.reproduce.plain_training import WAIT, TimedTraining, ask, time_alone, time_ddp
from shoal.net.links import Address
from shoal.place.api import place
from shoal.place.placement import DATA_PARALLEL, ONE_MACHINE, PARAMETER_SERVER, PLACED, Placement
from shoal.place.training.api import train_placed
from shoal.settings import make_settings
from shoal.utils.tables import Log

WIDTH = 1 / 8
PIXELS = {"AlexNet": 64, "VGG-16": 32, "ResNet-50": 32, "Inception-v3": 75}
"""The side of the images, such that networks of an eighth of the width fit; widths stay in proportion."""
CLASSES, ROWS = 10, 512
RATE = 0.02
DDP = "DistributedDataParallel"


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison."""

    network: str
    rows: int
    """The rows of one worker in a step."""
    rate: str
    """The rate of every machine's link, for tc."""
    workers: int = 4

    @property
    def batch(self) -> int:
        return self.rows * self.workers

    @property
    def link(self) -> str:
        return self.rate.replace("mbit", "Mbit").replace("gbit", "Gbit")


def make_network(name: str) -> nn.Module:
    """Return a network with an eighth of the published widths."""
    shape = next(shape for shape in SHAPES if shape.name == name)
    return shape.make(WIDTH, CLASSES)


def images(name: str, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Return images of noise in which each class has its own pattern, so that there is something to learn."""
    draw = torch.Generator().manual_seed(0)
    pixels = PIXELS[name]
    patterns = torch.randn(CLASSES, 3, pixels, pixels, generator=draw)
    y = torch.randint(0, CLASSES, (rows,), generator=draw)
    return patterns[y] + torch.randn(rows, 3, pixels, pixels, generator=draw), y


def job_of(case: Case, steps: int, *, validates: bool = False) -> shoal.Job:
    """Return the job that all ways train."""
    x, y = images(case.network)
    return shoal.Job(
        model=partial(make_network, case.network), data=(x, y), val=(x[:256], y[:256]) if validates else None,
        loss=F.cross_entropy, optimizer=torch.optim.SGD, hparams={"lr": RATE, "momentum": 0.9},
        batch_size=case.batch, steps=steps, seed=0, metrics={"accuracy": accuracy} if validates else {},
        val_every=10_000 if validates else 1,
    )  # fmt: skip


def plan(case: Case, mode: str | None = None, **how: Any) -> Placement:
    """Return the placement for a case, of one mode or the fastest; layers are timed here."""
    model = make_network(case.network)
    sample = images(case.network, case.batch)[0]
    given: dict[str, Any] = {"cores": os.cpu_count(), "batch_norm": "own", **how}
    return place(
        model, sample, workers=case.workers, link=case.link, batch_size=case.rows, mode=mode,  # type: ignore[arg-type]
        **given,
    )  # fmt: skip


def measure_way(
    case: Case, placement: Placement, links: Links, steps: int, *, validates: bool = False
) -> dict[str, Any]:
    """Measure one way over these links: seconds and bytes of a step, beside the predicted ones."""
    try:
        (measured,) = ask([partial(_serve, case, placement, links, steps, validates)])
    except OSError as error:
        measured = {"seconds": None, "bytes": None, "error": str(error)}
    return {
        "way": placement.mode, "cut": placement.cut_name, "micro_batches": placement.micro_batches,
        "predicted_seconds": placement.seconds, "predicted_bytes": placement.predicted.socket_bytes, **measured,
    }  # fmt: skip


def _serve(case: Case, placement: Placement, links: Links, steps: int, validates: bool, pipe: Connection) -> None:
    """Run the server, in its own process behind the first link."""
    links.enter(0)
    job = job_of(case, steps, validates=validates)
    settings = make_settings("cpu", None, 1, "auto", "1h", False, "fifo")
    try:
        (result,) = train_placed(
            job, placement, settings, address=Address(links.address(0), 0), start_seconds=WAIT,
            enter=lambda number: links.enter(1 + number),
        )  # fmt: skip
        report = result.split
        answer = {"seconds": report.seconds_measured, "bytes": report.bytes_measured, "error": result.error}
        answer |= {"loss": result.history[-1]["loss"], "accuracy": result.history[-1].get("accuracy")}
    except ShoalError as error:
        answer = {"seconds": None, "bytes": None, "error": str(error)}
    pipe.send(answer)


def measure_one(case: Case, steps: int, *, validates: bool = False) -> dict[str, Any]:
    """Measure one process with the whole batch and no link."""
    plain = _plain(case, case.batch, steps, validates)
    return _row(ONE_MACHINE, lambda: ask([partial(time_alone, plain)])[0], moved=0)


def measure_ddp(case: Case, links: Links, steps: int, *, validates: bool = False) -> dict[str, Any]:
    """Measure torch's DistributedDataParallel over these links, with a worker behind each but the first."""
    plain = _plain(case, case.rows, steps, validates)
    return _row(DDP, lambda: time_ddp(plain, case.workers, links, first=1), moved=None)


def _row(way: str, measure: Callable[[], tuple[float, Any]], moved: int | None) -> dict[str, Any]:
    try:
        seconds, reached = measure()
    except OSError as error:
        return {"way": way, "seconds": None, "bytes": None, "error": str(error)}
    return {"way": way, "seconds": seconds, "bytes": moved, "error": None, "accuracy": reached}


def _plain(case: Case, rows: int, steps: int, validates: bool) -> TimedTraining:
    """Return the training in plain PyTorch, with `rows` rows per process and step."""
    x, y = images(case.network)

    def evaluate(network: nn.Module) -> float | None:
        with torch.no_grad():
            return float(accuracy(network.eval()(x[:256]), y[:256])) if validates else None

    return TimedTraining(partial(make_network, case.network), (x, y), rows, RATE, steps, evaluate)


def compare(case: Case, steps: int, log: Log, *, validates: bool = False) -> dict[str, Any]:
    """Measure all ways of one case over the same links."""
    rows: list[dict[str, Any]] = []
    with shaped(1 + case.workers, case.rate) as links:
        planned = plan(case)
        chosen = planned if planned.mode == PLACED else plan(case, PLACED, profile=planned)
        usual_ways = [plan_like(case, planned, mode) for mode in (PARAMETER_SERVER, DATA_PARALLEL)]
        for placement in (chosen, *usual_ways):
            log(f"{case.network}, {case.rows} rows, {case.rate}: {placement.mode}")
            rows.append(measure_way(case, placement, links, steps, validates=validates))
        log(f"{case.network}, {case.rows} rows, {case.rate}: {DDP}")
        rows.append(measure_ddp(case, links, steps, validates=validates))
        rows.append(measure_one(case, steps, validates=validates))
    alone = planned.alternative(ONE_MACHINE)
    rows[-1] |= {"predicted_seconds": alone.seconds if alone is not None else None, "predicted_bytes": 0}
    return {
        "network": case.network, "rows": case.rows, "rate": case.rate, "workers": case.workers,
        "chosen": planned.mode, "ways": rows,
    }  # fmt: skip


def plan_like(case: Case, planned: Placement, mode: str) -> Placement:
    """Return the placement of one of the usual ways, from the same times of layers."""
    other = planned.alternative(mode)  # type: ignore[arg-type]
    assert other is not None
    where = "server" if mode == PARAMETER_SERVER else "allreduce"
    layers = tuple(
        replace(layer, where="workers", sync=where if layer.parameters else None)  # type: ignore[arg-type]
        for layer in planned.layers
    )
    return replace(
        planned, mode=other.mode, cut=len(layers), cut_name="", layers=layers, micro_batches=1, predicted=other
    )


def placement(cases: Sequence[Case], *, steps: int, limit: float, log: Log, validates: bool = False) -> dict[str, Any]:
    """Measure all cases, as far as there is time."""
    until, compared = time.monotonic() + limit, list[dict[str, Any]]()
    for case in cases:
        if time.monotonic() > until:
            break
        try:
            compared.append(compare(case, steps, log, validates=validates))
        except (OSError, ShoalError) as error:
            compared.append({"network": case.network, "rows": case.rows, "rate": case.rate, "error": describe(error)})
    return {
        "stamp": stamp("cpu", 1), "steps": steps, "asked": len(cases), "results": compared,
        "summary": summary(compared), "arithmetic": arithmetic(),
    }  # fmt: skip


def summary(compared: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return how good the predictions and the choices were."""
    bytes_off, seconds_off, right, speed = [], [], [], []
    for row in compared:
        ways = [way for way in row.get("ways", ()) if way["seconds"]]
        ours = [way for way in ways if way["way"] != DDP]
        chosen = next((way for way in ours if way["way"] == row["chosen"]), None)
        if chosen is None:
            continue
        right.append(chosen["seconds"] <= 1.05 * min(way["seconds"] for way in ours))
        seconds_off += [abs(way["predicted_seconds"] / way["seconds"] - 1) for way in ours if way["predicted_seconds"]]
        bytes_off += [abs(way["predicted_bytes"] / way["bytes"] - 1) for way in ours if way["bytes"]]
        usual = [way["seconds"] for way in ways if way["way"] in (PARAMETER_SERVER, DDP)]
        placed = next((way for way in ours if way["way"] == PLACED), None)
        if usual and placed is not None:
            speed.append({"network": row["network"], "rows": row["rows"], "rate": row["rate"],
                          "times_faster": min(usual) / placed["seconds"]})  # fmt: skip
    return {
        "largest_difference_of_bytes": max(bytes_off, default=None),
        "predictions_within_20_percent": sum(off <= 0.2 for off in seconds_off) / max(1, len(seconds_off)),
        "median_difference_of_seconds": median(seconds_off) if seconds_off else None,
        "chosen_is_fastest_or_within_5_percent": sum(right) / max(1, len(right)),
        "faster_than_the_better_of_parameter_server_and_ddp": speed,
    }


def table(result: dict[str, Any], console: Any) -> None:
    """Print a line for each case and way."""
    from rich.table import Table

    from shoal.utils.tables import duration, size

    shown = Table(
        "network", "rows", "link", "way", "cut after", "step", "predicted", "bytes/worker", "predicted", "accuracy"
    )
    for row in result["results"]:
        for number, way in enumerate(row.get("ways", ())):
            first = [row["network"], str(row["rows"]), row["rate"]] if not number else ["", "", ""]
            mark = " *" if way["way"] == row["chosen"] else ""
            predicted, moved = way.get("predicted_seconds"), way.get("predicted_bytes")
            shown.add_row(
                *first, way["way"] + mark, way.get("cut") or "",
                duration(way["seconds"]) if way["seconds"] else str(way["error"]),
                duration(predicted) if predicted else "",
                size(int(way["bytes"])) if way["bytes"] else "", size(moved) if moved else "",
                f"{way['accuracy']:.3f}" if way.get("accuracy") is not None else "",
            )  # fmt: skip
        if "error" in row:
            shown.add_row(row["network"], str(row["rows"]), row["rate"], row["error"])
        shown.add_section()
    if result["results"]:
        console.print(shown)
        console.print("* what shoal.place chose")
        for name, value in result["summary"].items():
            console.print(f"{name.replace('_', ' ')}: {value}")
    console.print("\nFull-size networks, MB a step and worker both ways, computed; published in brackets:")
    console.print(arithmetic_table(result["arithmetic"]))


def draw(path: Any, result: dict[str, Any]) -> None:
    """Draw the seconds of a step, by case and way."""
    from shoal.evidence.bench.report import grouped_bars, heading

    compared = [row for row in result["results"] if "ways" in row]
    labels = [f"{row['network']} {row['rows']} {row['rate']}" for row in compared]
    names = list(dict.fromkeys(way["way"] for row in compared for way in row["ways"]))
    series = {
        name: [
            next((1000 * w["seconds"] for w in row["ways"] if w["way"] == name and w["seconds"]), None)
            for row in compared
        ]
        for name in names
    }
    grouped_bars(path, labels, series, ylabel="ms for a step", title=heading(result), log=True)
