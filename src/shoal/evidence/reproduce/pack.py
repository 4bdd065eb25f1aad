"""Reproduce Pack's table: gain = (sequential - packed) / sequential for 2, 3 and 4 networks in one step.

It was published on one 16 GB GPU with ImageNet-shaped input, batch 32. Here a GPU gets the same shape; a CPU gets
smaller images and batches, and the output says so. The data are on the device, and each network gathers its rows in its
own order, so that sharing an input pipeline (a part of Pack's own gain) adds nothing to ours.
"""

from __future__ import annotations

from typing import Any

from shoal.evidence.bench.report import heading, milliseconds, peak, percent
from shoal.evidence.bench.run import Settings, bench
from shoal.evidence.bench.workloads import Spec
from shoal.utils.tables import Log

TITLES = {"mlp3": "MLP-3", "mobilenetv2": "MobileNetV2", "resnet50": "ResNet-50", "densenet121": "DenseNet-121"}
PUBLISHED: dict[str, dict[int, float | None]] = {
    "mlp3": {2: 0.397, 3: 0.65, 4: 0.74},
    "mobilenetv2": {2: 0.218, 3: 0.30, 4: 0.332},
    "resnet50": {2: 0.211, 3: 0.25, 4: 0.27},
    "densenet121": {2: 0.179, 3: 0.21, 4: None},  # four did not fit
}


def scale(device: str, *, quick: bool) -> dict[str, int]:
    """Return image side and batch size: the published ones on a GPU, smaller ones on a CPU."""
    if quick:
        return {"side": 32, "batch_size": 2}
    return {"side": 224, "batch_size": 32} if device.startswith("cuda") else {"side": 64, "batch_size": 4}


def line(eager: dict[str, Any], packed: dict[str, Any]) -> dict[str, Any]:
    """Return one cell of the table, from the benchmark's rows of both ways."""
    network, k = eager["network"], eager["members"]
    alone, together = peak(eager["memory"]), peak(packed["memory"])
    return {
        "network": network,
        "packed": k,
        "sequential_ms": eager["ms"],
        "packed_ms": packed["ms"],
        "gain": None if packed["ratio"] is None else 1 - 1 / packed["ratio"],
        "published": PUBLISHED[network][k],
        "ceiling": 1 - 1 / k,
        "memory_ratio": None if not alone or together is None else together / alone,
        "error": eager["error"] or packed["error"],
        "note": packed["note"],
        "outcomes": [eager, packed],
    }


def pack(
    settings: Settings,
    *,
    networks: list[str],
    sizes: list[int],
    precision: str | None,
    quick: bool,
    log: Log = lambda _: None,
) -> dict[str, Any]:
    """Measure every network at every size and return the result as plain data."""
    for name in networks:
        if name not in TITLES:
            raise ValueError(f"no network {name!r} in Pack's table; there are {', '.join(TITLES)}")
    at = scale(settings.device, quick=quick)
    specs = [Spec(network=name, members=k, precision=precision, batches=8, **at) for name in networks for k in sizes]
    measured = bench(specs, settings, log)
    rows = iter(measured["results"])
    return {
        "stamp": measured["stamp"],
        "settings": measured["settings"],
        "precision": precision or "fp32",
        "scale": at,
        "lines": [line(eager, packed) for eager, packed in zip(rows, rows, strict=True)],
    }


def table(result: dict[str, Any], console: Any) -> None:
    """Print our numbers beside the published ones."""
    from rich.table import Table

    shown = Table("network", "packed", "sequential ms", "packed ms", "gain", "published", "ceiling", "memory", "")
    last = None
    for row in result["lines"]:
        if last not in (None, row["network"]):
            shown.add_section()
        shown.add_row(
            TITLES[row["network"]] if row["network"] != last else "",
            str(row["packed"]),
            milliseconds(row["sequential_ms"]),
            milliseconds(row["packed_ms"]),
            percent(row["gain"]),
            percent(row["published"], "no room"),
            percent(row["ceiling"]),
            "" if row["memory_ratio"] is None else f"{row['memory_ratio']:.2f}x one",
            str(row["error"] or row["note"])[:90].replace("[", "("),
        )
        last = row["network"]
    console.print(shown)
    side, batch = result["scale"]["side"], result["scale"]["batch_size"]
    published = (
        " (the published scale)" if (side, batch) == (224, 32) else " (published: 3 x 224 x 224, batch 32, a GPU)"
    )
    console.print(
        f"Input 3 x {side} x {side}, batch {batch}{published}, {result['precision']}, Adam. Gain over sequential "
        "eager; the ceiling 1 - 1/k is Pack's own, which does not fuse: ours may pass it.",
        style="dim",
    )
    console.print(heading(result), style="dim")


def bars(result: dict[str, Any]) -> list[tuple[str, float | None, float]]:
    """Return label, our number and the published one for each bar of the picture."""
    return [
        (f"{TITLES[row['network']]} x {row['packed']}", row["gain"], row["published"] or 0.0) for row in result["lines"]
    ]
