"""`shoal train TARGET`: train a list of jobs together."""

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.target import TARGET_HELP, load_target

if TYPE_CHECKING:
    from shoal import Results


def train(
    target: Annotated[str, typer.Argument(help=TARGET_HELP)],
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1 ...")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for checkpoints, weights and histories; run the same command to resume.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="Memory limit, such as 20GB; by default 90 % of free memory.")
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="Which job runs first: fifo, priority, shortest, round-robin or fair.")
    ] = None,
    checkpoint_every: Annotated[str | None, typer.Option(help="How often to save, such as 60s or 5m.")] = None,
    tensorboard: Annotated[Path | None, typer.Option(help="Folder for TensorBoard logs, a subfolder per job.")] = None,
    progress: Annotated[
        bool | None, typer.Option("--progress/--no-progress", help="Show progress on stderr; by default yes.")
    ] = None,
    compile: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="Compile steps on a GPU; by default where it pays.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads, in one process; by default a process for each free core.")
    ] = None,
    deterministic: Annotated[
        bool | None,
        typer.Option("--deterministic/--no-deterministic", help="Only kernels that give the same bits every time."),
    ] = None,
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
    try:
        return shoal.train(jobs, **settings)
    except KeyboardInterrupt:
        print(f"shoal: {how_to_resume(settings.get('out'))}", file=sys.stderr)
        raise


def last_line(results: "Results") -> str:
    """Return the results as one line of JSON, which follows the events."""
    return json.dumps({"kind": "results", "results": json.loads(results.to_json())})


def how_to_resume(out: str | None) -> str:
    """Return what to do after Ctrl-C."""
    if out is None:
        return "nothing was saved, as there is no --out; with one, run the same command again to resume"
    command = ["shoal", *sys.argv[1:]] if Path(sys.argv[0]).name in ("shoal", "__main__.py") else ["the same command"]
    return f"saved in {out!r}; to resume: {shlex.join(command) if len(command) > 1 else command[0]}"
