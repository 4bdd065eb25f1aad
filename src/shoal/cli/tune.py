"""`shoal tune FILE`: search for the best settings of a training."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.cli.arguments import (
    CheckpointEvery,
    Deterministic,
    Device,
    Memory,
    Progress,
    check_mode,
    checked,
    errors_of_code,
)
from shoal.cli.output import saying_how_to_resume

MISSING = object()


def tune(
    file: Annotated[
        str,
        typer.Argument(
            help="A Python file with make_job and space, and optionally settings, a dict of arguments of shoal.tune."
        ),
    ],
    max_epochs: Annotated[int | None, typer.Option(min=1, help="The most epochs that a trial trains.")] = None,
    metric: Annotated[str | None, typer.Option(help="What to compare: val_loss, or one of the jobs' metrics.")] = None,
    mode: Annotated[
        str | None, typer.Option(callback=checked(check_mode), help="min or max; by default from the metric's name.")
    ] = None,
    eta: Annotated[
        int | None, typer.Option(min=2, help="At each rung one in eta trials continues; by default 3.")
    ] = None,
    scheduler: Annotated[
        str | None, typer.Option(help="hyperband, successive-halving, asha, pbt or none; by default hyperband.")
    ] = None,
    sampler: Annotated[
        str | None, typer.Option(help="random, grid, or Optuna's tpe, cma, gp, nsga2; by default random.")
    ] = None,
    trials: Annotated[int | None, typer.Option(min=1, help="Number of trials.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the search; each job has its own.")] = None,
    storage: Annotated[str | None, typer.Option(help="An Optuna storage, such as sqlite:///study.db.")] = None,
    study_name: Annotated[str | None, typer.Option(help="The study's name in the storage.")] = None,
    device: Device = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the study and its weights; run the same command to resume.")
    ] = None,
    memory: Memory = None,
    checkpoint_every: CheckpointEvery = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    deterministic: Deterministic = None,
    progress: Progress = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print events as JSON, one object per line; the last one is the study.")
    ] = False,
) -> None:
    """Search for the best settings, all trials in one run.

    Options override the file's settings.
    The exit status is 1 when no trial has a value, 130 after Ctrl-C.
    """
    given = {name: value for name, value in locals().items() if value is not None and name not in ("file", "as_json")}
    given["out"] = str(out) if out is not None else None
    given["num_trials"] = given.pop("trials", None)
    make_job, space, settings = load_search(file)
    settings |= {name: value for name, value in given.items() if value is not None}
    settings.setdefault("progress", not as_json)
    study = _tune(make_job, space, settings, as_json)
    best = study.best_trials
    weights = [study.weights_file(trial) for trial in best]
    if as_json:
        typer.echo(json.dumps({"kind": "study", **study.to_dict()}))
    else:
        typer.echo(study.table())
        if study.folder is not None:
            typer.echo(f"report: {study.folder / 'report.html'}")
        for path in weights:
            if path is not None:
                typer.echo(f"best weights: {path}")
    if not best:
        raise typer.Exit(1)


def load_search(file: str) -> tuple[Any, Any, dict[str, Any]]:
    """Return a file's make_job, space and settings, or raise a ValueError if it is not a search."""
    if not file.endswith(".py"):
        raise ValueError(f"{file!r} is not a Python file; name one with make_job and space: search.py")
    from shoal.jobfile.importing import import_code

    with errors_of_code(repr(file)):
        module = import_code(file, Path.cwd())
    make_job, settings = getattr(module, "make_job", MISSING), getattr(module, "settings", {})
    if make_job is MISSING:
        raise ValueError(f"{file!r} has no make_job; define make_job(params), which returns a shoal.Job")
    if not isinstance(settings, dict):
        raise ValueError(f"{file!r} has settings that are a {type(settings).__name__}; use a dict")
    return make_job, getattr(module, "space", None), dict(settings)


def _tune(make_job: Any, space: Any, settings: dict[str, Any], as_json: bool) -> Any:
    from shoal.reporting.events import JsonLines
    from shoal.tune.studies.api import arguments, tune

    unknown = sorted(settings.keys() - arguments())
    if unknown:
        raise ValueError(
            f"settings has {unknown[0]!r}, which shoal.tune does not take; it takes {', '.join(arguments())}"
        )
    if "max_epochs" not in settings:
        raise ValueError("max_epochs is not set; add --max-epochs 81, or settings = {'max_epochs': 81} to the file")
    if as_json:
        settings["events"] = JsonLines(sys.stdout)
    with saying_how_to_resume(settings.get("out")):
        return tune(make_job, space, **settings)
