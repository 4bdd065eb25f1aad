"""`shoal explain TARGET`: a dry run."""

import json
from typing import Annotated

import typer

from shoal.cli.target import TARGET_HELP, load_jobs


def explain(
    target: Annotated[str, typer.Argument(help=TARGET_HELP)],
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 ...")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Say what would be stacked, what not and why, without training."""
    jobs = load_jobs(target)
    import shoal

    plan = shoal.explain(jobs, device=device)
    typer.echo(json.dumps(plan.to_dict(), indent=2) if as_json else str(plan))
