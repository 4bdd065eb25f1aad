"""`shoal split TARGET`: train one network as many parts, by processes here or on other machines."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.arguments import TARGET_HELP, CheckpointEvery, check_device, checked, load_target, only_job
from shoal.cli.output import show_result
from shoal.utils.tables import say

SETTINGS = (
    "method", "workers", "local_steps", "overlap", "recovery", "layers", "shares", "scale", "moments", "cuts",
    "variant", "codec", "seed",
)  # fmt: skip
"""The options that are settings of a method."""


def split(
    target: Annotated[str, typer.Argument(help=TARGET_HELP + " It must hold one job.")],
    method: Annotated[str | None, typer.Option(help="ist (default), local-sgd, data-parallel or sil.")] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Number of workers; by default 4, for sil one per part.")
    ] = None,
    local_steps: Annotated[
        int | None, typer.Option(help="Steps of each worker between two merges: ist 50, local-sgd 20, sil an epoch.")
    ] = None,
    overlap: Annotated[float | None, typer.Option(help="ist: the fraction of units that all workers share.")] = None,
    recovery: Annotated[
        int | None, typer.Option(help="Final rounds (ist) or epochs (sil) that train the whole network.")
    ] = None,
    layers: Annotated[
        str | None, typer.Option(help="ist: hidden layers to divide: auto (default), all or alternate.")
    ] = None,
    shares: Annotated[
        str | None, typer.Option(help="ist: share of each worker, such as 1,1,2; or 'speed', from measured speeds.")
    ] = None,
    scale: Annotated[
        bool | None,
        typer.Option("--scale/--no-scale", help="ist: scale up for the missing units; by default yes."),
    ] = None,
    moments: Annotated[
        str | None,
        typer.Option(help="Optimizer state: travel (default) sends it with the weights; fresh resets it each round."),
    ] = None,
    cuts: Annotated[
        str | None, typer.Option(help="sil: modules before which to cut, such as fc3,fc5; or a number of parts.")
    ] = None,
    variant: Annotated[str | None, typer.Option(help="sil: heads (default), or labels A or B.")] = None,
    codec: Annotated[
        str | None, typer.Option(help="Format in which numbers are sent: exact (default), fp16, bf16 or int8.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed, instead of the job's.")] = None,
    coordinator: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Start the coordinator at this address; workers --join it.")
    ] = None,
    join: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Start a worker that joins this coordinator.")
    ] = None,
    local: Annotated[
        int | None,
        typer.Option(min=0, help="Workers to start here; by default all, none with --coordinator, one with torchrun."),
    ] = None,
    shard: Annotated[
        int | None,
        typer.Option(min=0, help="With --join: the data of this file is only this shard of the rows, and is not sent."),
    ] = None,
    deadline: Annotated[
        float | None, typer.Option(help="Seconds that a worker may take for a round; by default from measured rounds.")
    ] = None,
    patience: Annotated[float, typer.Option(help="Seconds to wait for a coordinator that cannot be reached.")] = 60.0,
    device: Annotated[
        str | None, typer.Option(callback=checked(check_device), help="auto, cpu, cuda, cuda:1 ...; by default cpu.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for checkpoints; run the same command to resume.")] = None,
    checkpoint_every: CheckpointEvery = None,
    link: Annotated[
        str | None,
        typer.Option(help="Speed of a worker's link, such as 100Mbit, for the prediction; by default measured."),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Only predict the cost, and whether it is faster than one machine.")
    ] = False,
    progress: Annotated[
        bool | None, typer.Option("--progress/--no-progress", help="Print progress on stderr; by default yes.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Train one network as several parts, here or over links.

    Started by torchrun, its first process is the coordinator. The exit status is 1 when the training failed.
    """
    options = dict(locals())
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # so that looking for a GPU does not prevent forking
    from shoal.split.net.run import DistributedSplit, ProcessRole

    loaded = load_target(target)
    role = ProcessRole(coordinator=coordinator, join=join, local=local, shard=shard)
    run = DistributedSplit(
        job=only_job(loaded.jobs, target, "split"),
        given={name: options[name] for name in SETTINGS if options[name] is not None},
        role=role,
        device=device or "cpu",
        out=str(out) if out is not None else loaded.settings.get("out"),
        checkpoint_every=checkpoint_every or loaded.settings.get("checkpoint_every", "60s"),
        deadline=deadline,
        patience=patience,
        link=link,
        log=say if progress or (progress is None and not as_json) else None,
    )
    with loaded.placed():
        if explain:
            advice = run.advice()
            typer.echo(json.dumps(advice.to_dict()) if as_json else str(advice))
            return
        result = run.go()
    if result is not None:
        show_result(result, as_json, {"split": result.split.to_dict() if result.split is not None else None})
