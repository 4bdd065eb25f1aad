"""`shoal explain TARGET`: a dry run."""

from typing import Annotated

import typer

from shoal.cli.target import TARGET_HELP, load_jobs


def explain(
    target: Annotated[str, typer.Argument(help=TARGET_HELP)],
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 ...")] = "auto",
    measure: Annotated[
        bool, typer.Option("--measure/--no-measure", help="Time a few steps on copies, for the gain to expect.")
    ] = True,
    memory: Annotated[
        str | None, typer.Option(help="Bytes that may be used, such as 20GB: how packs are sized, and who waits.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Say what would be stacked, what not and why, without training."""
    jobs = load_jobs(target)
    import shoal

    explanation = shoal.explain(jobs, device=device, measure=measure, memory=memory)
    typer.echo(explanation.to_json() if as_json else str(explanation))
