"""`shoal train TARGET`: train a list of jobs together."""

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.target import TARGET_HELP, load_jobs


def train(
    target: Annotated[str, typer.Argument(help=TARGET_HELP)],
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 ...")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Folder for weights and histories.")] = None,
    compiled: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="Compile steps on a GPU; by default where it pays.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads, in one process; by default a process for each free core.")
    ] = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Only kernels that give the same bits every time.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON, without a progress bar.")] = False,
) -> None:
    """Train a list of jobs together.

    The exit status is 1 when a job failed or diverged.
    """
    jobs = load_jobs(target)
    import shoal

    results = shoal.train(
        jobs,
        device=device,
        out=None if out is None else str(out),
        progress=not as_json,
        threads=threads,
        compile="auto" if compiled is None else compiled,
        deterministic=deterministic,
    )
    typer.echo(results.to_json() if as_json else results.table())
    if any(result.status in ("failed", "diverged") for result in results):
        raise typer.Exit(1)
