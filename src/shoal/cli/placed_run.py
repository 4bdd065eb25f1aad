"""`shoal place TARGET --run`: train a job as it was placed, here or as one process of torchrun's."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from shoal.cli.target import load_target
from shoal.utils.tables import say

if TYPE_CHECKING:
    from shoal import Job
    from shoal.place.placement import Placement


def run_placed(
    target: str,
    wanted: dict[str, Any],
    *,
    placement: Path | None,
    folder: Path | None,
    device: str,
    patience: float,
    progress: bool,
    as_json: bool,
) -> None:
    """Plan, unless a placement is given, and train. `wanted`: the options of `shoal place`."""
    from shoal.place.training.api import one_job, run_process, train_job
    from shoal.split.net.launch import Torchrun
    from shoal.training import make_settings

    read = load_target(target)
    started = Torchrun.read()
    settings = make_settings(device, None, None, "auto", "60s", False, "fifo")
    tell = say if progress and not as_json else None
    with read.placed():
        job = one_job(read.jobs)
        if started is None:
            results = train_job(job, _plan(job, placement, wanted), settings, out=folder, progress=tell is not None)
        else:
            if started.rank == 0:
                wanted["workers"] = wanted["workers"] if "," in wanted["workers"] else str(started.world - 1)
            planned = _plan(job, placement, wanted) if started.rank == 0 else None
            answer = run_process(
                job, planned, settings, started, out=folder, progress=tell is not None, patience=patience, tell=tell
            )
            if answer is None:
                return
            results = answer
    _show(results[0], as_json)


def _plan(job: "Job", path: Path | None, wanted: dict[str, Any]) -> "Placement":
    import shoal
    from shoal.cli.place import network_of, workers_of
    from shoal.place.placement import Placement

    if path is not None:
        return Placement.load(path)
    workers, cut = workers_of(wanted["workers"]), wanted["cut"]
    count = workers if isinstance(workers, int) else len(workers)
    if count < 1:
        raise ValueError("torchrun started one process; a server and a worker are at least two: --nproc-per-node 2")
    model, sample, rows, optimizer = network_of([job], "the target", count)
    if cut is not None and cut.isdigit() and cut not in dict(model.named_modules()):
        cut = int(cut)
    return shoal.place(
        model, sample, **{**wanted, "workers": workers, "cut": cut}, batch_size=rows, optimizer=optimizer
    )


def _show(result: Any, as_json: bool) -> None:
    from shoal.results import Results, finite

    report = result.split
    if as_json:
        typer.echo(json.dumps(finite(result.to_dict())))
    else:
        typer.echo(Results([result]).table())
        typer.echo(f"\n{report}" if report is not None else "\ntrained on one machine")
    if result.status in ("failed", "diverged"):
        raise typer.Exit(1)
