"""`shoal train TARGET`: train a list of jobs together."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.target import TARGET_HELP, load_jobs

if TYPE_CHECKING:
    from shoal.results import Results


def train(
    target: Annotated[str, typer.Argument(help=TARGET_HELP)],
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 ...")] = "auto",
    out: Annotated[
        Path | None, typer.Option(help="Folder for weights and histories; unfinished jobs in it are resumed.")
    ] = None,
    compiled: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="Use torch.compile; by default where it pays.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; by default Shoal measures.")] = None,
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
    typer.echo(json.dumps(rows(results), indent=2) if as_json else str(results.table()))
    if any(result.status in ("failed", "diverged") for result in results):
        raise typer.Exit(1)


def rows(results: "Results") -> list[dict[str, Any]]:
    """One plain row for each job: how it ended, on which tier, and the last line of its history."""
    return [
        {
            "name": result.name,
            "status": result.status,
            "tier": result.tier,
            "error": result.error,
            **{key: _plain(value) for key, value in (result.history[-1] if result.history else {}).items()},
        }
        for result in results
    ]


def _plain(value: Any) -> Any:
    """JSON has no NaN: a loss that is not finite becomes null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
