"""`shoal train TARGET`: train a list of jobs together."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.arguments import (
    TARGET_HELP,
    CheckpointEvery,
    Deterministic,
    Device,
    Memory,
    Progress,
    check_policy,
    checked,
    load_target,
)
from shoal.cli.output import saying_how_to_resume

if TYPE_CHECKING:
    from shoal import Results


def train(
    target: Annotated[str, typer.Argument(help=TARGET_HELP)],
    device: Device = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for checkpoints, weights and histories; run the same command to resume.")
    ] = None,
    memory: Memory = None,
    policy: Annotated[
        str | None,
        typer.Option(
            callback=checked(check_policy), help="Which job runs first: fifo, priority, shortest, round-robin or fair."
        ),
    ] = None,
    checkpoint_every: CheckpointEvery = None,
    tensorboard: Annotated[
        Path | None, typer.Option(help="Folder for TensorBoard logs, with a subfolder per job.")
    ] = None,
    progress: Progress = None,
    compile: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="Compile steps on a GPU; by default if it saves time.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads, in one process; by default a process for each free core.")
    ] = None,
    deterministic: Deterministic = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print events as JSON, one object per line; the last one is the results.")
    ] = False,
) -> None:
    """Train a list of jobs together.

    Options override the run table of a job file.
    The exit status is 1 when a job failed or diverged, 130 after Ctrl-C.
    """
    options = dict(locals())
    converted = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    loaded = load_target(target)
    chosen = {
        name: value for name, value in converted.items() if value is not None and name not in ("target", "as_json")
    }
    settings = {**loaded.settings, **chosen}
    with loaded.placed():
        results = _train(loaded.jobs, settings, as_json)
    if as_json:
        typer.echo(last_line(results))
    else:
        typer.echo(results.table())
    if any(result.status in ("failed", "diverged") for result in results):
        raise typer.Exit(1)


def _train(jobs: list[Any], settings: dict[str, Any], as_json: bool) -> "Results":
    import shoal
    from shoal.reporting.events import JsonLines

    settings.setdefault("progress", not as_json)
    folder = settings.pop("tensorboard", None)
    if folder is not None:
        from shoal.reporting.tensorboard import TensorBoard

        settings["callbacks"] = [TensorBoard(folder)]
    if as_json:
        settings["events"] = JsonLines(sys.stdout)
    with saying_how_to_resume(settings.get("out")):
        return shoal.train(jobs, **settings)


def last_line(results: "Results") -> str:
    """Return the results as one line of JSON, which follows the events."""
    return json.dumps({"kind": "results", "results": json.loads(results.to_json())})
