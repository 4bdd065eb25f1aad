"""`shoal bench`: the same work several ways, in one table."""

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.arguments import Limit, MeasuredDevice, NumbersAsJson, NumbersFile
from shoal.cli.output import pick_precision, quick_settings, report

NETWORKS = ("tiny", "mlp", "cnn", "gpt", "resnet", "lstm", "encoder", "mixed")
"""What `shoal bench` runs by default: every network of the bench, and a mixed list."""


def bench(
    networks: Annotated[
        list[str] | None, typer.Argument(help=f"Networks: {', '.join(NETWORKS)}. None given: all of them.")
    ] = None,
    members: Annotated[int, typer.Option(min=1, help="Networks trained at once.")] = 32,
    precision: Annotated[str, typer.Option(help="bf16 or fp32; auto: bf16 on a GPU, fp32 on a CPU.")] = "auto",
    ways: Annotated[
        str, typer.Option(help="Ways to measure, separated by commas: eager, captured, vmap, vmap-captured, shoal.")
    ] = "all",
    device: MeasuredDevice = "auto",
    rounds: Annotated[int, typer.Option(min=1, help="Measurements of each way; the median is shown.")] = 20,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads for every way; 0: torch's default.")] = 0,
    batch_size: Annotated[int, typer.Option(min=0, help="Rows in a batch; 0: the network's own.")] = 0,
    dropout: Annotated[
        float | None, typer.Option(help="Dropout rate, for networks with dropout: tiny, mlp, cnn, gpt, encoder.")
    ] = None,
    limit: Limit = 1800.0,
    out: NumbersFile = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the bars into this file.")] = None,
    as_json: NumbersAsJson = False,
    quick: Annotated[bool, typer.Option(help="A few short rounds on little data, only to see that it runs.")] = False,
) -> None:
    """Measure Shoal against other ways to train many networks.

    Sequential eager, sequential compiled and captured, vmap, and Shoal do the same work,
    each in a process of its own: milliseconds for a step of all networks, memory, set-up time.
    """
    from shoal.evidence.bench.report import plot as draw
    from shoal.evidence.bench.report import table
    from shoal.evidence.bench.run import Settings
    from shoal.evidence.bench.run import bench as measure
    from shoal.evidence.bench.titles import TITLES
    from shoal.evidence.bench.workloads import WITH_DROPOUT, Spec
    from shoal.settings import pick_device

    chosen_device = str(pick_device(device))
    settings = Settings(
        ways=tuple(TITLES) if ways == "all" else tuple(way.strip() for way in ways.split(",")),
        device=chosen_device,
        rounds=min(rounds, 2) if quick else rounds,
        threads=threads or None,
        limit=limit,
        **(quick_settings() if quick else {}),
    )
    specs = [
        Spec(
            network=name,
            members=members,
            precision=pick_precision(precision, chosen_device),
            batch_size=batch_size or None,
            dropout=dropout,
            batches=4 if quick else None if chosen_device.startswith("cuda") else 64,
        )
        for name in networks or (NETWORKS if dropout is None else WITH_DROPOUT)
    ]
    report(
        lambda log: measure(specs, settings, log), table, lambda path, result: draw(result, path), out, plot, as_json
    )
