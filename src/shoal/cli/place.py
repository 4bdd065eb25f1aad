"""`shoal place TARGET`: which layers of a network to compute where; with `--run`, train so."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.arguments import FILE_ENDS, call_target, check_device, check_jobs, checked, load_target, only_job
from shoal.cli.output import check_picture, check_writable, show_result
from shoal.utils.tables import say

if TYPE_CHECKING:
    import torch

    from shoal import Job
    from shoal.place.placement import Placement

TARGET_HELP = (
    "A job file (.toml, .yaml) of one job, or MODULE:FUNCTION or FILE.py:FUNCTION: a function that takes nothing and "
    "returns a shoal.Job, or a network and a sample input."
)
PLANNING = (
    "workers", "link", "server_link", "cut", "mode", "micro_batches", "sync", "memory", "server_memory", "server_speed",
    "cores", "batch_norm", "profile", "speed",
)  # fmt: skip
"""Options that are arguments of `shoal.place`."""
RUN_REFUSES = "is for planning; leave it out with --run, where the job's own batch is divided"


def place(
    target: Annotated[str, typer.Argument(help=TARGET_HELP)],
    workers: Annotated[
        str, typer.Option(help="Number of workers, or the relative speed of each, such as 1,1,0.5.")
    ] = "4",
    link: Annotated[str, typer.Option(help="Link of each worker, such as 100Mbit, 1Gbit, '1Gbit 2ms'.")] = "1Gbit",
    server_link: Annotated[
        str | None, typer.Option(help="Link of the server, which all workers share; by default a worker's.")
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(help="Rows of one worker in a step; by default the job's batch divided by the workers."),
    ] = None,
    cut: Annotated[str | None, typer.Option(help="The last layer on the workers; by default the fastest cut.")] = None,
    mode: Annotated[
        str | None,
        typer.Option(help="placed, 'parameter server', 'data parallel' or 'one machine'; by default the fastest."),
    ] = None,
    micro_batches: Annotated[
        int | None, typer.Option(help="Parts into which a worker's rows are divided; by default the fastest.")
    ] = None,
    sync: Annotated[
        str | None,
        typer.Option(help="How the workers' layers are synchronised: server, allreduce, sharded or factors."),
    ] = None,
    memory: Annotated[str | None, typer.Option(help="Memory limit of each worker, such as 8GB.")] = None,
    server_memory: Annotated[str | None, typer.Option(help="Memory limit of the server.")] = None,
    server_speed: Annotated[float, typer.Option(help="Speed of the server relative to the timed device.")] = 1.0,
    cores: Annotated[int | None, typer.Option(help="Number of cores, if all processes are on one machine.")] = None,
    batch_norm: Annotated[
        str, typer.Option(help="Batch norm statistics on the workers: joined (over all rows) or own.")
    ] = "joined",
    device: Annotated[
        str, typer.Option(callback=checked(check_device), help="Device on which to time the layers: cpu, cuda ...")
    ] = "cpu",
    measure: Annotated[
        bool,
        typer.Option("--measure/--no-measure", help="Time the layers here, or estimate their times from operations."),
    ] = True,
    speed: Annotated[float, typer.Option(help="With --no-measure: operations per second of a device.")] = 1e12,
    profile: Annotated[
        Path | None, typer.Option(help="File with the layers' times; read if it exists, else written.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the placement into this file, as JSON.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the placement into this file (.svg, .png, .pdf).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the placement as JSON.")] = False,
    run: Annotated[
        bool,
        typer.Option(
            "--run",
            "--train",
            help="Train the job with the placement, on this machine. Under torchrun always on.",
        ),
    ] = False,
    placement: Annotated[
        Path | None, typer.Option(help="With --run: a placement file from --out, instead of planning.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="With --run: a folder for checkpoints; run the same command to resume.")
    ] = None,
    patience: Annotated[float, typer.Option(help="With --run: seconds to wait for processes.")] = 60.0,
    progress: Annotated[bool, typer.Option(help="With --run: show progress on stderr.")] = True,
) -> None:
    """Choose which layers run on workers and which on a server.

    It predicts the seconds and bytes of a step for every choice. With --run the job is trained that way.
    Without it nothing is trained, and no cluster is needed. Under torchrun the first process is the server, the others
    are workers, and the job is always trained.
    """
    options = dict(locals())
    wanted = {name: options[name] for name in PLANNING} | {"measure": None if measure else False}
    if run or {"RANK", "WORLD_SIZE", "MASTER_PORT"} <= os.environ.keys():  # torchrun does not need --run
        _refuse({"--batch-size": batch_size, "--out": out, "--picture": picture}, RUN_REFUSES)
        train_placed(
            target, wanted, placement=placement, folder=folder, device=device, patience=patience, progress=progress,
            as_json=as_json,
        )  # fmt: skip
    else:
        _refuse({"--placement": placement, "--folder": folder}, "is for training; give it with --run")
        print_placement(target, {**wanted, "device": device}, batch_size, out=out, picture=picture, as_json=as_json)


def _refuse(options: dict[str, Any], why: str) -> None:
    """Raise a usage error if one of these options was given."""
    given = next((name for name, value in options.items() if value is not None), None)
    if given is not None:
        raise typer.BadParameter(f"{given} {why}")


def print_placement(
    target: str,
    wanted: dict[str, Any],
    batch_size: int | None,
    *,
    out: Path | None,
    picture: Path | None,
    as_json: bool,
) -> None:
    """Plan, print the placement, and write its files. `wanted` are arguments of `plan`."""
    check_writable(out)
    check_picture(picture)
    planned = plan(*load_network(target, wanted["workers"]), wanted, batch_size)
    if out is not None:
        planned.save(out)
    if picture is not None:
        planned.picture(picture)
    typer.echo(json.dumps(planned.to_dict()) if as_json else str(planned))


def plan(
    model: Any, sample: Any, rows: int | None, optimizer: str, wanted: dict[str, Any], batch_size: int | None = None
) -> "Placement":
    """Return the placement of a network.

    Args:
        wanted: Arguments of `shoal.place`, as they are on the command line.
    """
    import shoal

    cut = wanted["cut"]
    if cut is not None and cut.isdigit() and cut not in dict(model.named_modules()):
        cut = int(cut)
    return shoal.place(
        model, sample, **{**wanted, "workers": workers_of(wanted["workers"]), "cut": cut},
        batch_size=rows if batch_size is None else batch_size, optimizer=optimizer,
    )  # fmt: skip


def workers_of(text: str) -> int | list[float]:
    try:
        return int(text) if "," not in text else [float(speed) for speed in text.split(",")]
    except ValueError:
        raise ValueError(f"--workers is {text!r}; give a number, or the speed of each worker, as 1,1,0.5") from None


def load_network(target: str, workers: str) -> tuple[Any, Any, int | None, str]:
    """Return a target's network, a sample, a worker's rows if known, and the type of its optimizer."""
    from torch import nn

    from shoal import Job

    if target.lower().endswith(FILE_ENDS) or ":" not in target:
        return network_of(load_target(target).jobs, target, workers)
    result = call_target(target)
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], nn.Module):
        return result[0], result[1], None, "sgd"
    if not isinstance(result, (Job, list)):
        kind = type(result).__name__
        raise ValueError(f"{target} gives {kind}; return a shoal.Job, or a network and a sample of its inputs")
    return network_of(check_jobs(result, target), target, workers)


def network_of(jobs: "list[Job]", target: str, workers: str) -> tuple[Any, Any, int | None, str]:
    """Return the network of the only job, a sample, a worker's rows, and the type of its optimizer."""
    import torch

    from shoal.place.training.roles import Built, Roles
    from shoal.preparation.checks import prepare

    (member,) = prepare([only_job(jobs, target, "placement")], torch.device("cpu"))
    built, given = Built(member, Roles(cut=1, ways={}, workers=1)), workers_of(workers)
    rows = max(1, built.job.batch_size // max(1, given if isinstance(given, int) else len(given)))
    sample = built.sample(member.data.take(0, min(rows, len(member.data))))
    kind = built.job.optimizer.__name__.lower()
    plain = kind == "sgd" and not built.job.hparams.get("momentum")
    return member.model, sample, rows, "none" if plain else "adam" if "adam" in kind else "sgd"


def train_placed(
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
    """Plan, unless a placement is given, and train.

    Args:
        wanted: The options of `shoal place`.
    """
    from shoal.net.torchrun import Torchrun
    from shoal.place.training.api import one_job, run_process, server_threads, train_job
    from shoal.settings import make_settings

    if not patience > 0:
        raise ValueError(f"--patience is {patience:g}; use seconds above 0")
    loaded = load_target(target)
    started = Torchrun.read()
    settings = make_settings(device, None, None, "auto", "60s", False, "fifo")
    log = say if progress and not as_json else None
    with loaded.placed():
        job = one_job(loaded.jobs)
        if started is None:
            planned = _plan(job, placement, wanted, settings.device, server_threads(settings))
            results = train_job(job, planned, settings, out=folder, progress=log is not None)
        else:
            if started.world < 2:
                raise ValueError("torchrun started one process; a server and a worker need two: use --nproc-per-node 2")
            server_plan = None
            if started.rank == 0:
                wanted["workers"] = wanted["workers"] if "," in wanted["workers"] else str(started.world - 1)
                server_plan = _plan(job, placement, wanted, settings.device, server_threads(settings, started))
            worker_results = run_process(
                job, server_plan, settings, started, out=folder, progress=log is not None, patience=patience, log=log
            )
            if worker_results is None:
                return
            results = worker_results
    show_result(results[0], as_json, {}, missing="trained on one machine")


def _plan(job: "Job", path: Path | None, wanted: dict[str, Any], device: "torch.device", threads: int) -> "Placement":
    """Return the placement in the file, or plan for workers on this device and a server with so many threads."""
    import torch

    from shoal.place.placement import Placement
    from shoal.utils.torch_flags import torch_flags

    if path is not None:
        return Placement.load(path)
    with torch_flags(torch.device("cpu"), threads):
        return plan(*network_of([job], "the target", wanted["workers"]), {**wanted, "device": device})
